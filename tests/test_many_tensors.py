"""Very many small parameters: what each of them costs beside its update."""

from __future__ import annotations

from typing import Any
from unittest import mock

import ranks
import torch
from torch import nn

import zero_shard
from zero_shard.stages.released import ReleasedParameter


class _Counted(set[int]):
    """Counts the sets that are made of it."""

    num_made = 0

    def __or__(self, other: Any) -> Any:
        self.num_made += 1
        return super().__or__(other)


def test_building_makes_no_set_for_each_parameter() -> None:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(101)]
    optimizer = zero_shard.AdamW(params[:1])
    counted = optimizer._builder._bucketed = _Counted(optimizer._builder._bucketed)
    optimizer.add_param_group({"params": params[1:]})
    assert counted >= {id(param) for param in params}
    assert 1 <= counted.num_made < 5  # one for each parameter took seconds with 20,000 of them


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
