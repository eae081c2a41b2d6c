"""What a part of a run allocates and frees, in C++ too: by the profiler, for tests of memory."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function


class Allocations:
    """Records allocations and frees inside of the context; then tells how far a watched part rose above its start.

    Starting the profiler takes long, so that one recording serves a whole task.
    """

    def __init__(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._num_watched = 0
        self._spans: dict[str, tuple[int, int]] = {}
        self._changes: list[tuple[int, int]] = []  # time in ns, bytes

    def __enter__(self) -> Allocations:
        gc.collect()
        gc.freeze()  # what the libraries made need not be looked at for each measurement
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)
        for event in self._profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                self._changes.append((event.start_ns(), event.nbytes()))
            elif event.name().startswith("watched "):
                self._spans[event.name()] = (event.start_ns(), event.start_ns() + event.duration_ns())
        self._changes.sort()

    def watch(self, action: Callable[[], Any]) -> str:
        """Run ``action`` and return the name to ask for its rise with."""
        self._num_watched += 1
        name = f"watched {self._num_watched}"
        with record_function(name):
            action()
        return name

    def rise_nbytes(self, name: str) -> int:
        """Return the highest sum of allocations less frees since the start of a watched action."""
        start, stop = self._spans[name]
        inside = [nbytes for time_ns, nbytes in self._changes if start <= time_ns <= stop]
        return max(itertools.accumulate(inside, initial=0))
