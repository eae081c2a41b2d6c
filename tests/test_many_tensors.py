"""Very many small parameters: what each of them costs beside its update."""

from __future__ import annotations

import time

import torch
from torch import nn

import zero_shard


def _seconds_to_build(num_params: int) -> float:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(num_params)]
    start = time.process_time()
    zero_shard.AdamW(params)
    return time.process_time() - start


def test_building_takes_a_time_in_proportion() -> None:
    _seconds_to_build(1)  # what torch imports at the first time
    few = min(_seconds_to_build(5_000) for _ in range(2))
    assert _seconds_to_build(20_000) < 8 * few  # 3.7 times; 15 where each parameter joined sets of all
