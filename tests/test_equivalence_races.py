"""Promise 1, one result, whatever the ranks wait for: collectives that come late, and hooks in another order."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import (
    EXACT,
    Snapshot,
    assert_ranks_agree,
    assert_snapshots_close,
    sharded_snapshot,
)
from test_equivalence import WAYS, Recipe, assert_all_equal_the_first, train_all_ways
from torch import Tensor, nn

import zero_shard


class _RandomDelays:
    """Sleeps up to 4 ms before each collective, differently on each rank."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._random = random.Random(dist.get_rank())

    def __call__(self, label: str) -> None:
        self.num_calls += 1
        time.sleep(self._random.random() * 0.004)


def _train_with_delays(recipe: Recipe, ways: list[dict[str, Any]]) -> tuple[list[Any], list[Any], int]:
    calm = train_all_ways(recipe, ways)
    delays = _RandomDelays()
    zero_shard.collectives.pending.before_collective = delays
    try:
        delayed = train_all_ways(recipe, ways)
    finally:
        zero_shard.collectives.pending.before_collective = None
    return calm, delayed, delays.num_calls


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_delays_before_collectives_change_nothing(world_size: int) -> None:
    """Ranks that come late to any collective, each at another one, don't change a bit."""
    ways = [way for way in WAYS if way["stage"] > 0]
    calm, delayed, num_calls = ranks.run(world_size, _train_with_delays, Recipe(num_steps=3), ways)[0]
    assert num_calls > 3 * len(ways)
    for way, want, got in zip(ways, calm, delayed, strict=True):
        assert_all_equal_the_first([want, got], [way, way])


class _Bundle(nn.Module):
    """Four parameters of different sizes, read in a given order."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(n, dtype=torch.float64) for n in (40, 3, 1, 17))

    def forward(self, order: list[int], scale: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for index in order:
            weight = self.weights[index]
            total = total + scale * (index + 1) * (weight * torch.arange(1.0, weight.numel() + 1)).sum()
        return total


class _Bundles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_Bundle() for _ in range(4))

    def forward(self, order: list[int], shuffle: random.Random, scale: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for index in order:
            inner = [0, 1, 2, 3]
            shuffle.shuffle(inner)
            total = total + self.parts[index](inner, scale * (index + 1))
        return total


def _orders(way: dict[str, Any], shuffle: random.Random) -> Iterator[list[int]]:
    while True:
        order = [0, 1, 2, 3]
        if way["stage"] < 3:  # at stage 3 the ranks agree about the order of modules, not about what a module does
            shuffle.shuffle(order)
        yield order


def _train_shuffled(ways: list[dict[str, Any]], is_shuffled: bool) -> list[list[Snapshot]]:
    rank, results = dist.get_rank(), []
    for way in ways:
        model = _Bundles()
        optimizer = zero_shard.AdamW(model.parameters(), lr=0.01, module=model, config=way)
        snapshots = []
        for step in range(4):
            shuffle = random.Random(100 * rank * is_shuffled + step * is_shuffled)
            optimizer.zero_grad()
            model(next(_orders(way, shuffle)), shuffle, rank + step + 1.0).backward()
            optimizer.step()
            assert_ranks_agree(model, f"{way}, step {step}")
            snapshots.append(sharded_snapshot(model, optimizer))
        results.append(snapshots)
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_order_of_hooks_may_differ_between_ranks(world_size: int) -> None:
    """Gradients that arrive in another random order on each rank and in each step give the same bits."""
    same = ranks.run(world_size, _train_shuffled, WAYS, False)[0]
    shuffled = ranks.run(world_size, _train_shuffled, WAYS, True)[0]
    for way, want, got in zip(WAYS, same, shuffled, strict=True):
        for step in range(4):
            assert_snapshots_close(got[step], want[step], EXACT, f"{way}, step {step}")
            assert_snapshots_close(want[step], same[0][step], EXACT, f"{way}, step {step}, against stage 0")
