"""Warm-up, rounds and the lines of the table that come of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from step_bench import say
from step_bench.contender import HYPER, MAX_NORM, Contender, Entry, Variant
from step_bench.names import LIMITS
from step_bench.workload import Workload

NUM_WARM_UPS = 2
SLOW_S = 1.0
SLOW_ROUNDS = 3
"""A kernel whose step takes longer than SLOW_S takes part in the first rounds only."""
HEAD_START_CYCLES = 50_000_000  # about 30 ms

Clock = Callable[[Callable[[], object]], float]


@dataclass
class Row:
    """A line of the table."""

    group: str
    name: str
    clipping: str
    median_ms: float
    min_ms: float
    max_ms: float
    ns_per_param: float
    nbytes_per_param: float | None
    gb_per_s: float | None
    of_limit: float | None  # its bandwidth over that of the group's first line
    moment_nbytes_per_param: float
    diff: float | None
    times_ms: list[float] = field(repr=False)


@dataclass
class Run:
    """What one process measured."""

    threads: int
    num_params: int
    num_tensors: int
    num_small_tensors: int
    rows: list[Row] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass
class Timed:
    """A variant that has taken its first steps, and the times of those that followed."""

    name: str
    variant: Variant
    contender: Contender
    numel: int
    warm_up_s: float  # the last one
    diff: float | None
    times_ms: list[float] = field(default_factory=list)

    def gb_per_s(self) -> float | None:
        """Return the bandwidth of the median step; None: it is not known how much it moves."""
        if self.variant.nbytes is None:
            return None
        return self.variant.nbytes * self.numel / statistics.median(self.times_ms) / 1e6

    def row(self, group: str, limit_gb_per_s: float | None) -> Row:
        """Return its line of the table."""
        median_ms, gb_per_s = statistics.median(self.times_ms), self.gb_per_s()
        return Row(
            group=group,
            name=self.name,
            clipping=self.variant.clipping,
            median_ms=median_ms,
            min_ms=min(self.times_ms),
            max_ms=max(self.times_ms),
            ns_per_param=median_ms * 1e6 / self.numel,
            nbytes_per_param=self.variant.nbytes,
            gb_per_s=gb_per_s,
            of_limit=None if gb_per_s is None or limit_gb_per_s is None else gb_per_s / limit_gb_per_s,
            moment_nbytes_per_param=self.contender.moment_nbytes() / self.numel,
            diff=self.diff,
            times_ms=[round(each, 4) for each in self.times_ms],
        )


def build_all(entries: Sequence[tuple[Entry, Workload]], run: Run) -> Iterator[Timed]:
    """Build kernels and let them take their first steps; ``run`` notes what is missing."""
    for entry, work in entries:
        try:
            yield from _warm_up(entry.name, entry.build(work), work)
        except Exception as error:  # a peer that is missing or broken is a line in the report
            lines = str(error).strip().splitlines() or [""]
            run.missing[entry.name] = f"{type(error).__name__}: {lines[0][:200]}"
            say(f"left out: {entry.name}: {run.missing[entry.name]}")


def _warm_up(name: str, contender: Contender, work: Workload) -> list[Timed]:
    diff: float | None = None
    timed = []
    for variant in contender.variants:
        for _ in range(NUM_WARM_UPS):
            variant.prepare()
            warm_up_s = milliseconds(variant.call) / 1e3
            if diff is None and contender.sample is not None:
                diff = _difference(contender.sample(), work, bool(variant.clipping))
        timed.append(Timed(name, variant, contender, work.values.numel(), warm_up_s, diff))
    return timed


def _difference(actual: Tensor, work: Workload, is_clipped: bool) -> float:
    numel = actual.numel()
    param = nn.Parameter(work.values[:numel].clone())
    norm = float(torch.linalg.vector_norm(work.grad, dtype=torch.float64))
    param.grad = work.grad[:numel] * (min(1.0, MAX_NORM / (norm + 1e-6)) if is_clipped else 1.0)
    torch.optim.AdamW([param], **HYPER, foreach=False).step()
    return float((actual - param.detach()).abs().max())


def milliseconds(call: Callable[[], object]) -> float:
    """Return how long a call takes on the CPU."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def event_milliseconds(call: Callable[[], object]) -> float:
    """Return how long a call takes on the GPU, between two events on its stream.

    The GPU is kept waiting first, so that the launches are there when it begins, as they are in training, where it is
    busy with backward. A call that itself waits for the GPU gains nothing by that.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def time_group(group: str, timed: Sequence[Timed], rounds: int, clock: Clock) -> list[Row]:
    """Time kernels in turn, round after round.

    Args:
        group: For the table.
        timed: The first of them is the limit that memory sets.
        rounds: Calls of each.
        clock: Returns the milliseconds that a call takes.
    """
    for number in range(rounds):
        # Every other round in the opposite order, so that no kernel always follows the same one.
        for each in timed if number % 2 == 0 else reversed(timed):
            if each.warm_up_s <= SLOW_S or number < SLOW_ROUNDS:
                each.variant.prepare()
                each.times_ms.append(clock(each.variant.call))
    limit = timed[0].gb_per_s() if timed and timed[0].name in LIMITS else None
    return [each.row(group, limit) for each in timed]
