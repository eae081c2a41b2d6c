"""Ordinary training scripts: each is one function, run with torch.optim.AdamW alone and with ours on 2 and 3 ranks."""

from __future__ import annotations

import functools
import gc
import traceback
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from scripts import SCRIPTS, Job
from torch import Tensor

WORLDS = (2, 3)
LAUNCH_LIMIT_S = 150.0


def stages_of(name: str, world_size: int) -> list[int]:
    """Return the stages of a script: all on two ranks; on three they take turns, as schedulers always do."""
    turn = list(SCRIPTS).index(name)
    if name.startswith("scheduler"):
        return [(turn + world_size) % 4]
    stages = [0, 1, 2, 3] if world_size == 2 else [turn % 4]
    return [stage for stage in stages if stage < 3 or name != "warm_restart"]  # refused at stage 3


def _run_all(names: list[str], world_size: int) -> dict[tuple[str, int], Any]:
    """Run every script at its stages; a script that raises leaves its traceback."""
    found: dict[tuple[str, int], Any] = {}
    for name in names:
        for stage in stages_of(name, world_size):
            job = Job(stage)
            try:
                SCRIPTS[name](job)
                found[name, stage] = job.results
            except Exception:
                found[name, stage] = traceback.format_exc()
        gc.collect()
    return found if dist.get_rank() == 0 else {key: value for key, value in found.items() if isinstance(value, str)}


@functools.cache
def _found(world_size: int) -> list[dict[tuple[str, int], Any]]:
    """Return what all scripts gave, from one launch."""
    return ranks.run(world_size, _run_all, list(SCRIPTS), world_size, limit_s=LAUNCH_LIMIT_S)


@functools.cache
def _expected(name: str) -> list[Any]:
    job = Job(None)
    SCRIPTS[name](job)
    return job.results


def assert_same(got: Any, want: Any, where: str) -> None:
    """Compare nested results: numbers and tensors to 1e-9, everything else exactly."""
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor) and got.dtype == want.dtype, f"{where}: {got!r}, expected {want!r}"
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda text: f"{where}: {text}")
    elif isinstance(want, dict):
        assert list(got) == list(want), f"{where}: {list(got)}, expected {list(want)}"
        for key, value in want.items():
            assert_same(got[key], value, f"{where}, {key}")
    elif isinstance(want, (list, tuple)):
        assert type(got) is type(want) and len(got) == len(want), f"{where}: {got!r}, expected {want!r}"
        for number, (left, right) in enumerate(zip(got, want, strict=True)):
            assert_same(left, right, f"{where}, {number}")
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=1e-9, abs=1e-12), where
    else:
        assert got == want, where


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_gives_what_plain_adamw_gives(name: str, world_size: int) -> None:
    for stage in stages_of(name, world_size):
        for rank, found in enumerate(_found(world_size)):
            failure = found.get((name, stage))
            assert not isinstance(failure, str), f"stage {stage}, rank {rank}:\n{failure}"
        assert_same(_found(world_size)[0][name, stage], _expected(name), f"{name}, {world_size} ranks, stage {stage}")
