"""What this rank is doing: nested, named phases, for torch.profiler, the monitor and reports of failures.

    with Phase("reduce", bucket.label):     range "zero_shard.reduce bucket 3 (...)" where a profiler runs
        with Phase("wait", label):          seconds["wait"] grows by what it took; current() tells of both

Every thread has phases of its own: backward runs in threads of autograd, checkpoints are written in another.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from types import TracebackType
from typing import Any

from torch.autograd import profiler

_NUM_RECENT = 64

seconds: defaultdict[str, float] = defaultdict(float)
"""Spent so far in phases of each name, in threads that somebody waits for."""
recent: deque[Phase] = deque(maxlen=_NUM_RECENT)
"""The phases that were entered last, in any thread, oldest first."""

_innermost: dict[int, Phase] = {}  # thread -> the phase that it is in
_background: set[int] = set()  # threads


class Phase:
    """A span of work, as a context manager that is entered once; takes one or two microseconds.

    Args:
        name: What is done: "step", "update", "reduce", "gather", "publish", "wait", ...
        what: To what, in words: a bucket, a unit, or what is waited for.
    Attributes:
        outer: The phase around it in its thread.
        since_s: `time.perf_counter` when it was entered.
        until_s: The same when it was left; 0 before.
        error: The type of the exception that ended it, if one did.
    """

    __slots__ = ("_range", "_thread", "error", "name", "outer", "since_s", "until_s", "what")

    def __init__(self, name: str, what: str = "") -> None:
        self.name, self.what = name, what
        self.outer: Phase | None = None
        self.since_s = self.until_s = 0.0
        self.error: type[BaseException] | None = None
        self._thread = 0
        self._range: Any = None

    def __enter__(self) -> None:
        self._thread = thread = get_ident()
        self.outer = _innermost.get(thread)
        if profiler._is_profiler_enabled:
            self._range = profiler.record_function(str(self))
            self._range.__enter__()
        _innermost[thread] = self
        recent.append(self)
        self.since_s = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.until_s = until_s = perf_counter()
        if kind is not None:
            self.error = kind
        if self._range is not None:
            self._range.__exit__(kind, error, trace)
        if self.outer is None:
            del _innermost[self._thread]
        else:
            _innermost[self._thread] = self.outer
        if not _background or self._thread not in _background:
            seconds[self.name] += until_s - self.since_s

    def __str__(self) -> str:
        return f"zero_shard.{self.name} {self.what}".rstrip()


def current() -> list[Phase]:
    """Return the innermost phase of each thread that is in one, the one entered first first. Any thread may call."""
    return sorted(_innermost.copy().values(), key=lambda phase: phase.since_s)


@contextmanager
def in_background() -> Iterator[None]:
    """Have ``seconds`` not count what this thread does inside: nobody waits for it."""
    thread = get_ident()
    _background.add(thread)
    try:
        yield
    finally:
        _background.discard(thread)
