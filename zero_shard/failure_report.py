"""When a rank fails: one file that says what every rank was doing.

Off unless the environment has ``ZERO_SHARD_REPORT_DIR``: where files may go is a matter of the machine, not of the
run, and every rank has to know it before anything can fail. Ranks are broken when this is needed, so none talks to
another:

    thread of each rank     rank-1.json: phases, collectives, memory, stacks; every second, so that a killed one has it
    rank that fails         rank-0.json with its error; touches "failed"; writes the report of what there is
    threads of the others   see "failed"; write their file once more, with what they are doing now
    rank that fails         writes the report anew when all have, or after two seconds

Nothing here raises or takes longer than `_LONGEST_S`, and what went wrong stays the error that is raised.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import resource
import secrets
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from zero_shard import phases
from zero_shard.collectives import World, pending, world
from zero_shard.failure_text import describe

VARIABLE = "ZERO_SHARD_REPORT_DIR"
_LOOK_S, _PERIOD_S = 0.2, 1.0  # between looks for a failure, and between files
_PATIENCE_S = 2.0  # with ranks that do not answer
_LONGEST_S = 5.0  # that an error is held up, on a file system that hangs
_NUM_FRAMES = 25
_LOG = logging.getLogger("zero_shard")


class Reporter:
    """What this rank tells about itself, and the report.

    Args:
        folder: Of the files of all ranks; the report is called like it.
    Attributes:
        optimizers: Whose memory and steps are told, weakly.
    """

    def __init__(self, folder: Path, ranks: World) -> None:
        self.folder, self.report = folder, folder.with_suffix(".txt")
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._rank, self._num_ranks, self._pid = ranks.rank, ranks.num_ranks, os.getpid()
        self._group = None if ranks.group is None else weakref.ref(ranks.group)
        self._errors: list[str] = []
        self._failed_s, self._failed_stack = 0.0, [""]  # when and where the first of them was raised
        self._is_alone = False
        self._answer: dict[str, Any] | None = None  # what has been told since somebody has failed
        known = pending.recent_collectives
        self._first_number = known[-1].number + 1 if known else 0
        self._has_report = self._has_waited = False
        self._lock, self._is_over = threading.Lock(), threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._watch, name="zero_shard reports", daemon=True)
        self._thread.start()

    def is_of(self, ranks: World) -> bool:
        """Whether it is this process's, and of the process group that there is now."""
        group = None if self._group is None else self._group()
        return group is ranks.group and self._pid == os.getpid()

    def fail(self, text: str, stack: list[str], is_alone: bool = False) -> str:
        """Write the report; return in words where it is, "" if it could not be written. Blocks for a while.

        Args:
            text: The error.
            stack: Where it is raised.
            is_alone: A peer was waited for.
        """
        if self._pid != os.getpid() or self._is_over.is_set():
            return ""
        if not self._errors:
            self._failed_s, self._failed_stack, self._is_alone = time.time(), stack[-_NUM_FRAMES:], is_alone
        self._errors.append(text)
        worker = threading.Thread(target=self._collect, name="zero_shard report", daemon=True)
        worker.start()
        worker.join(_LONGEST_S)
        return f"\nWhat every rank was doing: {self.report}" if self._has_report else ""

    def has_told(self, error: BaseException | None) -> bool:
        """Whether a report has been written of this error, or of what has led to it."""
        seen: set[int] = set()
        while error is not None and id(error) not in seen:  # an error may be its own cause
            if str(self.report) in str(error):
                return True
            seen.add(id(error))
            error = error.__cause__ or error.__context__
        return False

    def close(self) -> None:
        """Stop; remove the files of this rank unless somebody has failed."""
        if self._pid != os.getpid() or self._is_over.is_set():
            return
        self._is_over.set()
        self._thread.join(_LONGEST_S)
        with suppress(OSError):
            if not self._failed.exists():
                self._own.unlink(missing_ok=True)
                self.folder.rmdir()  # the last one does

    @property
    def _own(self) -> Path:
        return self.folder / f"rank-{self._rank}.json"

    @property
    def _failed(self) -> Path:
        return self.folder / "failed"

    def _watch(self) -> None:
        next_s = 0.0
        while True:
            is_asked = self._failed.exists()
            if is_asked or time.monotonic() >= next_s:
                next_s = time.monotonic() + _PERIOD_S
                with suppress(Exception):
                    self._write_own(is_answer=is_asked)
            if is_asked or self._is_over.wait(_LOOK_S):
                return

    def _collect(self) -> None:
        try:
            self._write_own(is_answer=True)
            self._failed.touch()
            self._write_report()  # at once: a launcher may end this process when another one has died
            end = time.monotonic() + (0 if self._has_waited else _PATIENCE_S)
            self._has_waited = True
            while time.monotonic() < end and not all(part and part["is_answer"] for part in self._parts()):
                time.sleep(_LOOK_S / 2)
            self._write_report()
        except Exception as error:  # the failure itself is what must be raised
            _LOG.warning("zero_shard: no report of the failure in %s: %r", self.folder, error)

    def _write_own(self, is_answer: bool) -> None:
        with self._lock:
            if self._answer is None:
                state = {**self._state(), "is_answer": is_answer}
                self._answer = state if is_answer else None
            else:  # what it did when the first one failed tells more than what came of it
                state = self._answer
            _write(self._own, json.dumps({**state, **self._failure()}))

    def _write_report(self) -> None:
        _write(self.report, describe(self._parts(), time.time(), str(self.folder)))
        self._has_report = True

    def _parts(self) -> list[dict[str, Any] | None]:
        parts: list[dict[str, Any] | None] = [None] * self._num_ranks
        for rank in range(self._num_ranks):
            with suppress(OSError, ValueError):
                parts[rank] = json.loads((self.folder / f"rank-{rank}.json").read_text())
        return parts

    def _state(self) -> dict[str, Any]:
        """Return all that this rank tells; times in seconds since 1970."""
        start_s = time.time() - time.perf_counter()
        optimizers = list(self.optimizers)
        return {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": self._pid,
            "time_s": time.time(),
            "step": max((each.held.ranks.num_steps for each in optimizers), default=0),
            "doing": [_chain(phase, start_s) for phase in phases.current()],
            "phases": [_told(phase, start_s) for phase in list(phases.recent)],
            "collectives": [
                {"number": number, "since_s": start_s + each.time_s, "label": each.label, "nbytes": each.nbytes}
                for each in list(pending.recent_collectives)
                if (number := each.number - self._first_number) >= 0
            ],
            "memory": _memory(optimizers),
            "stacks": {"the thread that failed": self._failed_stack} if any(self._failed_stack) else _stacks(),
        }

    def _failure(self) -> dict[str, Any]:
        return {"errors": self._errors, "failed_s": self._failed_s, "is_alone": self._is_alone}


def _chain(phase: phases.Phase | None, start_s: float) -> list[dict[str, Any]]:
    """Return a phase and those around it, the outermost first."""
    return [] if phase is None else [*_chain(phase.outer, start_s), _told(phase, start_s)]


def _told(phase: phases.Phase, start_s: float) -> dict[str, Any]:
    return {
        "name": f"{phase.name} {phase.what}".rstrip(),
        "since_s": start_s + phase.since_s,
        "until_s": start_s + phase.until_s if phase.until_s else None,
        "error": phase.error.__name__ if phase.error is not None else None,
    }


def _memory(optimizers: list[Any]) -> dict[str, int]:
    """Return bytes by kind."""
    found: dict[str, int] = {}
    for optimizer in optimizers:
        for bucket in optimizer.held.buckets:
            for kind, nbytes in bucket.held_by_kind().items():
                found[kind] = found.get(kind, 0) + nbytes
        total = "model state promised"
        found[total] = found.get(total, 0) + optimizer.usage().promised_nbytes
    found["process at its peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_initialized():
        found["GPU allocated"] = torch.cuda.memory_allocated()
        found["GPU allocated at its peak"] = torch.cuda.max_memory_allocated()
        found["GPU reserved"] = torch.cuda.memory_reserved()
    return found


def _stacks() -> dict[str, list[str]]:
    """Return what each thread is doing, the main one first, but for those of this file."""
    names = {each.ident: each.name for each in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return {
        f"{names.get(ident, 'a thread')} ({ident})": traceback.format_stack(frame)[-_NUM_FRAMES:]
        for ident, frame in frames
        if not names.get(ident, "").startswith("zero_shard report")
    }


def _write(path: Path, text: str) -> None:
    """Write a file that is whole or not there."""
    made = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    made.write_text(text, encoding="utf-8")
    made.replace(path)


# ---- one for each process ----------------------------------------------------------------------------------

_reporter: Reporter | None = None
_num_groups = 0  # that this process has been in so far, with reports
_former_hook: Callable[..., Any] | None = None


def begin() -> Reporter | None:
    """Return this process's reporter for the process group that there is now, None where reports are off. Local."""
    global _reporter
    directory, ranks = os.environ.get(VARIABLE), world()
    if _reporter is not None and not (directory and _reporter.is_of(ranks)):
        _end()
    if not directory:
        return None
    if _reporter is None:
        try:
            _reporter = Reporter(Path(os.path.abspath(directory)) / _common_name(ranks), ranks)
        except (OSError, RuntimeError) as error:
            _LOG.warning("zero_shard: no reports of failures: %s=%r can't be used: %s", VARIABLE, directory, error)
            return None
        _hook_in()
    return _reporter


def _common_name(ranks: World) -> str:
    """Return a name that is equal on all ranks: what the first one to come has put into the store."""
    global _num_groups
    name = f"failure-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    if ranks.store is None:
        return name
    # torchrun keeps one store over restarts, and a process that ends its group and begins another one may do so.
    key = f"zero_shard/reports/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_num_groups}"
    _num_groups += 1
    return str(ranks.store.compare_set(key, "", name).decode())


def _hook_in() -> None:
    global _former_hook
    pending.on_failure = _on_missing_peer
    if _former_hook is None:
        _former_hook, sys.excepthook = sys.excepthook, _on_uncaught
        atexit.register(_end)


def _end() -> None:
    global _reporter
    reporter, _reporter, pending.on_failure = _reporter, None, None
    if reporter is not None:
        reporter.close()


def _on_missing_peer(text: str) -> str:
    return _reporter.fail(text, traceback.format_stack()[:-1], is_alone=True) if _reporter is not None else ""


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report what ends this process: out of memory, an error of the user's, Ctrl-C."""
    assert _former_hook is not None
    _former_hook(kind, error, trace)
    if _reporter is not None and not _reporter.has_told(error):
        text = "".join(traceback.format_exception_only(kind, error))
        where = _reporter.fail(text, traceback.format_tb(trace))
        if where:
            print(f"zero_shard: {where.strip()}", file=sys.stderr, flush=True)
