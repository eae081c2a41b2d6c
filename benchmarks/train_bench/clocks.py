"""Clocks: when each phase of a step begins and ends, and how long it waited for communication.

    CPU    host clock; a phase has waited while its thread slept: neither on a core nor in line for one
    CUDA   events on the compute stream, read after the last step; waiting comes from the profiler's trace of further
           steps: the time in which a communication kernel ran and no other kernel did

Both say what communication costs beyond computation, whoever started it and on whichever thread or stream it runs.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

PHASES = ("forward", "backward", "step", "zero_grad")
_COMMUNICATION_KERNELS = ("nccl", "rccl")
_NUM_SCHEDSTAT_FIELDS = 3


class Times(NamedTuple):
    """One training step of one rank.

    Attributes:
        phases_ms: For each of PHASES.
        waited_ms: What of it was spent asleep; empty where it is not known by phase.
    """

    phases_ms: list[float]
    waited_ms: list[float]


class Clock(Protocol):
    """Marks the bounds of phases of one step after the other."""

    def mark(self) -> None:
        """Note that a phase ends and the next begins."""

    def times(self) -> list[Times]:
        """Return the steps since the last call, each of which has marked one time more than there are phases."""


class HostClock:
    """Wall time, and time asleep, of the calling thread."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:  # no Linux, or a kernel without it: waiting for a core then counts as waiting
            self._file = -1

    def mark(self) -> None:
        """Note that a phase ends and the next begins."""
        now, busy = time.perf_counter_ns(), time.thread_time_ns()
        self._marks.append((now / 1e6, (now - busy - self._queued_ns()) / 1e6))

    def _queued_ns(self) -> int:
        if self._file < 0:
            return 0
        fields = os.pread(self._file, 100, 0).split()
        return int(fields[1]) if len(fields) == _NUM_SCHEDSTAT_FIELDS else 0

    def times(self) -> list[Times]:
        """Return the steps since the last call."""
        marks, self._marks = self._marks, []
        steps = []
        for first in range(0, len(marks), len(PHASES) + 1):
            bounds = marks[first : first + len(PHASES) + 1]
            pairs = list(itertools.pairwise(bounds))
            walls = [stop[0] - start[0] for start, stop in pairs]
            sleeps = [min(max(stop[1] - start[1], 0.0), wall) for (start, stop), wall in zip(pairs, walls, strict=True)]
            steps.append(Times(walls, sleeps))
        return steps


class EventClock:
    """Time between events on the present stream; nothing waits for the device before `times`."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def times(self) -> list[Times]:
        """Return the steps since the last call; waits for the device."""
        events, self._events = self._events, []
        torch.cuda.synchronize()
        steps = []
        for first in range(0, len(events), len(PHASES) + 1):
            bounds = events[first : first + len(PHASES) + 1]
            steps.append(Times([a.elapsed_time(b) for a, b in itertools.pairwise(bounds)], []))
        return steps


def make_clock(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return EventClock() if device.type == "cuda" else HostClock()


def exposed_ms_by_trace(run: Callable[[], object]) -> float:
    """Return for how long communication kernels ran on this GPU while no other kernel did, during ``run``."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    return exposed_us(kernel_spans(profiler.events())) / 1e3


def kernel_spans(events: Iterable[Any]) -> list[tuple[bool, float, float]]:
    """Return (is communication, start, stop) of the kernels among a profiler's events."""
    spans = []
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        # Annotations of host code, such as "nccl:all_reduce", are mirrored on the device's side.
        if getattr(event, "is_user_annotation", False) or event.name.startswith("nccl:"):
            continue
        is_communication = any(word in event.name.lower() for word in _COMMUNICATION_KERNELS)
        spans.append((is_communication, event.time_range.start, event.time_range.end))
    return spans


def exposed_us(spans: Sequence[tuple[bool, float, float]]) -> float:
    """Return the length of what communication covers and nothing else does."""
    bounds = []
    for is_communication, start, stop in spans:
        bounds += [(start, is_communication, 1), (stop, is_communication, -1)]
    num_open = {True: 0, False: 0}
    total, last = 0.0, 0.0
    for moment, is_communication, change in sorted(bounds):
        if num_open[True] and not num_open[False]:
            total += moment - last
        num_open[is_communication] += change
        last = moment
    return total
