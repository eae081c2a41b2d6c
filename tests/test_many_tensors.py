"""Very many small parameters: what each of them costs beside its update."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import ranks
import torch
from torch import nn

import zero_shard
from zero_shard.stages.released import ReleasedParameter


def _seconds_to_build(num_params: int) -> float:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(num_params)]
    start = time.process_time()
    zero_shard.AdamW(params)
    return time.process_time() - start


def test_building_takes_a_time_in_proportion() -> None:
    _seconds_to_build(1)  # what torch imports at the first time
    few = min(_seconds_to_build(5_000) for _ in range(2))
    assert _seconds_to_build(20_000) < 8 * few  # 3.7 times; 15 where each parameter joined sets of all


class _Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.terms = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(300))

    def forward(self) -> torch.Tensor:
        return sum((term.sum() for term in self.terms), torch.zeros(()))


def _count_calls() -> int:
    model = _Sum()
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": 3})
    calls = []
    handle = ReleasedParameter.__torch_function__.__func__

    def count(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls.append(func)
        return handle(cls, func, types, args, kwargs)

    for _ in range(2):
        model().backward()
        with mock.patch.object(ReleasedParameter, "__torch_function__", classmethod(count)):
            optimizer.step()
            optimizer.zero_grad()
    return len(calls)


def test_a_step_calls_no_python_for_each_released_parameter() -> None:
    assert max(ranks.run(2, _count_calls)) < 100
