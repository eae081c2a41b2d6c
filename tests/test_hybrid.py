"""Replicas and hosts: which hops a gradient takes, what each sends, and that the result is that of plain AdamW.

Ranks pretend to be on two hosts; ``test_hosts.py`` has real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import ranks
import torch.distributed as dist
from oracle import EXACT, assert_snapshots_close
from test_equivalence import Recipe, train, train_plain

from zero_shard import collectives


@contextmanager
def _two_hosts() -> Iterator[None]:
    """Have the first half of the ranks of a new group live on one host, the others on another."""
    host = f"host {2 * dist.get_rank() // dist.get_world_size()}"
    with mock.patch.object(collectives, "name_of_host", lambda: host):
        yield


_FULL = [{"stage": stage, "bucket_mib": mib} for stage in range(4) for mib in (0.001, 25)]
_HALF = [{"stage": stage, "bucket_mib": 0.001, "shard_size": 2} for stage in (1, 2, 3)]


def _train_on_two_hosts(recipe: Recipe, ways: list[dict[str, Any]]) -> list[Any]:
    with _two_hosts():
        return [train(recipe, way) for way in ways]


def test_two_hops_give_every_stage_and_shard_size_the_same_bits() -> None:
    recipe = Recipe(num_steps=3, clip="library")
    ways = [*_FULL, *_HALF]
    results = ranks.run(4, _train_on_two_hosts, recipe, ways)[0]
    plain, _ = train_plain(recipe, 4)
    for step, (got, want) in enumerate(zip(results[0][0], plain, strict=True)):
        assert_snapshots_close(got, want, None, f"against plain AdamW, step {step}", step + 1)
    for way, (snapshots, norms) in zip(ways, results, strict=True):
        for step, (got, want) in enumerate(zip(snapshots, results[0][0], strict=True)):
            assert_snapshots_close(got, want, EXACT, f"{way}, step {step}")
        assert norms == results[0][1], way
