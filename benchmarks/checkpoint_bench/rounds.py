"""What every contender does in a round, and the row that comes of it. All ranks call all functions."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPTConfig

from checkpoint_bench.contenders import CONTENDERS, Contender
from checkpoint_bench.memory import peak_above_nbytes

NUM_WARM_UP_STEPS = 2
STEPS_PER_SAVE = 1.5
"""Steps that are trained during an asynchronous save, in times of the blocking one."""
RESUME_TOLERANCE = 1e-5


@dataclass
class Subject:
    """A contender and what has been measured of it; times by round, the slowest rank's."""

    contender: Contender
    directory: Path
    save_ms: list[float] = field(default_factory=list)
    flush_ms: list[float] = field(default_factory=list)  # fsync of the files after the save has returned
    load_ms: list[float] = field(default_factory=list)
    call_ms: list[float] = field(default_factory=list)  # of async_save
    extra_ms: list[float] = field(default_factory=list)  # what an asynchronous save costs training, call included
    file_nbytes: int = 0
    save_peak_nbytes: int = 0
    load_peak_nbytes: int = 0
    async_peak_nbytes: int | None = None
    note: str = ""


def build_subjects(config: GPTConfig, directory: Path, only: str) -> tuple[list[Subject], dict[str, str]]:
    """Return the contenders that can be built, after their first steps, and why the others can't."""
    subjects, missing = [], {}
    for kind, stage in CONTENDERS:
        label = f"{kind.__name__}{stage}"
        if only and label not in only.split(","):
            continue
        try:
            contender = kind(config, stage)
        except ImportError as error:  # on all ranks alike
            missing[label] = f"{type(error).__name__}: {error}"
            continue
        for _ in range(NUM_WARM_UP_STEPS):
            contender.step()
        subjects.append(Subject(contender, directory / label))
    return subjects, missing


def warm_up(subject: Subject) -> None:
    """Save and load once: sizes, peak memory, and whether training goes on as it would have."""
    contender, path = subject.contender, subject.directory / "first"
    subject.save_peak_nbytes = _most(peak_above_nbytes(lambda: contender.save(path)))
    dist.barrier()
    subject.file_nbytes = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    step = contender.num_steps
    expected = [contender.step(), contender.step()]
    subject.load_peak_nbytes = _most(peak_above_nbytes(lambda: contender.load(path)))
    contender.num_steps = step
    found = [contender.step(), contender.step()]
    if not all(math.isclose(a, b, rel_tol=RESUME_TOLERANCE) for a, b in zip(expected, found, strict=True)):
        raise RuntimeError(f"{contender.name}: losses {found} after loading, expected {expected}")
    try:
        subject.async_peak_nbytes = _most(peak_above_nbytes(lambda: contender.async_save(path.with_name("async"))()))
    except NotImplementedError as error:
        subject.note = str(error)
    _forget(subject)


def measure_round(subject: Subject) -> None:
    """Save, flush, load, and save once more during training."""
    contender, path = subject.contender, subject.directory / "blocking"
    subject.save_ms.append(_timed(lambda: contender.save(path)))
    subject.flush_ms.append(_timed(lambda: _flush(path)))
    subject.load_ms.append(_timed(lambda: contender.load(path)))
    if not subject.note:
        _measure_async(subject)
    _forget(subject)


def _measure_async(subject: Subject) -> None:
    contender, path = subject.contender, subject.directory / "async"
    step_ms = _timed(contender.step)
    num_steps = math.ceil(STEPS_PER_SAVE * subject.save_ms[-1] / step_ms)

    def train() -> None:
        for _ in range(num_steps):
            contender.step()

    alone_ms = _timed(train)  # right before, as other work on the machine comes and goes
    wait: list[Callable[[], object]] = []
    call_ms = _timed(lambda: wait.append(contender.async_save(path)))
    subject.call_ms.append(call_ms)
    subject.extra_ms.append(call_ms + _timed(lambda: (train(), wait[0]())) - alone_ms)


def _timed(call: Callable[[], object]) -> float:
    """Return how long the slowest rank takes, in ms."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return _most((time.perf_counter() - start) * 1e3)


def _most(value: Any) -> Any:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return type(value)(found.item())


def _flush(path: Path) -> None:
    """Have the system write what it has only promised to write."""
    if dist.get_rank() == 0:
        for each in path.rglob("*"):
            if each.is_file():
                with each.open("rb") as file:
                    os.fsync(file.fileno())


def _forget(subject: Subject) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(subject.directory)
        subject.directory.mkdir()
    dist.barrier()


def measure(config: GPTConfig, directory: Path, rounds: int, only: str) -> dict[str, Any]:
    """Return what the table is made of. All ranks call; equal on all."""
    subjects, missing = build_subjects(config, directory, only)
    for subject in subjects:
        subject.directory.mkdir(parents=True, exist_ok=True)
        warm_up(subject)
    for number in range(rounds):
        for subject in subjects if number % 2 == 0 else subjects[::-1]:
            measure_round(subject)
            if dist.get_rank() == 0:
                print(f"round {number}: {subject.contender.name}", file=sys.stderr, flush=True)
    rows = []
    for subject in subjects:
        row = {"name": subject.contender.name, **vars(subject)}
        rows.append({key: value for key, value in row.items() if key not in ("contender", "directory")})
    numels = subjects[0].contender.numels
    return {"num_params": sum(numels), "largest_numel": max(numels), "rows": rows, "missing": missing}
