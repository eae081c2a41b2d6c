"""Saving while training goes on: a copy of the own shard at the call, written by a thread.

# Note [Copies under way]
Weights and buffers, which anybody may change, are copied in the call. Moments on a CPU change in ``step()`` and where
state is loaded, and these wait (`HeldState.settle`): so the thread copies them, while forward and backward run. Should
somebody else change them meanwhile, torch's count of changes tells, and the save fails with the remedy.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_shard.adamw import AdamW
from zero_shard.buffers import SCALE_NAMES, STATE_NAMES
from zero_shard.checkpoint.contents import Contents
from zero_shard.checkpoint.saving import prepare, write
from zero_shard.collectives import Agreements, ProcessGroup
from zero_shard.phases import Phase, in_background

_LATE_NAMES = (*STATE_NAMES, *SCALE_NAMES)
_LOG = logging.getLogger("zero_shard")
_last_threads: weakref.WeakKeyDictionary[ProcessGroup, threading.Thread] = weakref.WeakKeyDictionary()


class _LateCopy(NamedTuple):
    """A copy that the thread makes."""

    name: str
    room: Tensor
    tensor: Tensor
    version: int

    def make(self) -> None:
        """Copy, unless the tensor has changed since the call.

        Raises:
            RuntimeError: It has.
        """
        self.room.copy_(self.tensor)
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"{self.name} was changed before async_save had copied it; change optimizer.state after wait(), or "
                "use save()"
            )


class PendingSave:
    """A checkpoint that is being written."""

    def __init__(
        self, contents: Contents, target: Path, ranks: Agreements, keep: int | None, late: list[_LateCopy]
    ) -> None:
        self._error: BaseException | None = None
        self._late, self._is_copied = late, threading.Event()
        self._job: tuple[Contents, Path, Agreements, int | None] | None = (contents, target, ranks, keep)
        self._before: threading.Thread | None = None
        self._thread = threading.Thread(target=self._work, name=f"zero_shard saves {target}")
        if ranks.control is not None:
            # Threads of two optimizers would use one group in different orders on different ranks.
            self._before, _last_threads[ranks.control] = _last_threads.get(ranks.control), self._thread
        self._thread.start()

    def _work(self) -> None:
        assert self._job is not None
        with in_background(), Phase("save", str(self._job[1])):
            self._run()

    def _run(self) -> None:
        assert self._job is not None
        _, target, ranks, _ = self._job
        before, self._before = self._before, None
        try:
            failed = self._copy()
            if before is not None:
                before.join()
            with ranks.errors_on_all_ranks(f"saving {target}"):
                if failed is not None:
                    raise failed
            write(*self._job)
        except BaseException as error:  # for whoever waits
            self._error = error
            _LOG.error("zero_shard: %s failed: %s", self._thread.name, error)
        self._job = None

    def _copy(self) -> Exception | None:
        """Make the copies that are left; return what went wrong, which all ranks are to hear."""
        failed: Exception | None = None
        try:
            for copy in self._late:
                copy.make()
        except Exception as error:
            failed = error
        finally:
            self._late = []
            self._is_copied.set()  # whatever has happened: a step waits for it
        return failed

    def wait_for_copies(self) -> None:
        """Block until nothing live is needed any more. See Note [Copies under way]."""
        self._is_copied.wait()

    def join(self, timeout_s: float | None = None) -> None:
        """Block until it has ended, well or not, or for so long."""
        self._thread.join(timeout_s)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the checkpoint stands under its name. Local: every rank may wait when it likes.

        Raises:
            TimeoutError: It does not after so many seconds; it goes on.
            RuntimeError, OSError: What `save` would have raised; once.
        """
        self.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._thread.name} has not ended within {timeout_s} s")
        error, self._error = self._error, None
        if error is not None:
            raise error


class _Staging:
    """Copies of what an optimizer's shards hold, on the CPU; the memory is used again for the next save."""

    def __init__(self, ranks: Agreements) -> None:
        self.ranks = ranks.in_background()
        self.pending: PendingSave | None = None
        self.late: list[_LateCopy] = []
        self._room: dict[Any, Tensor] = {}
        self._used: dict[Any, Tensor] = {}

    def begin(self) -> None:
        """Wait for the save before; forget room that it did not use."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait()
        self._room, self._used, self.late = self._used, {}, []

    def copy(self, key: Any, tensor: Tensor) -> Tensor:
        """Return a copy."""
        room = self._room.get(key)
        if room is None or (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._used[key] = room
        is_moment = isinstance(key, tuple) and key[1] in _LATE_NAMES
        if is_moment and tensor.device.type == "cpu" and not tensor.is_inference():
            self.late.append(_LateCopy(key[1], room, tensor, tensor._version))
        else:
            room.copy_(tensor, non_blocking=True)
        return room


_stagings: weakref.WeakKeyDictionary[AdamW, _Staging] = weakref.WeakKeyDictionary()


def wait_for_save(optimizer: AdamW) -> None:
    """Block until no checkpoint is being written in the background, well or not; what went wrong comes up later."""
    staging = _stagings.get(optimizer)
    if staging is not None and staging.pending is not None:
        staging.pending.join()


def async_save(
    path: str | os.PathLike[str], module: nn.Module, optimizer: AdamW, *, keep: int | None = None, **extra: Any
) -> PendingSave:
    """Begin to `save`, and return as soon as everything is copied. All ranks must call.

    Later steps don't leak in. Costs one copy of the own shard in CPU memory, which the next call uses again; a call
    waits for the save before, so that there is never more than one. Call ``wait()`` before the process group goes.

    Args:
        path, module, optimizer, keep, extra: As for `save`; of extras the state at the call is kept.
    Returns:
        The pending save; ``wait()`` raises what went wrong, as does the next call.
    Raises:
        RuntimeError: A rank did not take part, or the save before failed.
    """
    ranks, label = optimizer.held.ranks, f"saving {os.fspath(path)}"
    ranks.roll_call(label)
    with ranks.errors_on_all_ranks(label):
        staging = _stagings.get(optimizer)
        if staging is None:
            staging = _stagings[optimizer] = _Staging(ranks)
        staging.begin()
        contents = prepare(path, module, optimizer, keep, extra, copy=staging.copy)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
    staging.pending = PendingSave(contents, Path(os.path.realpath(path)), staging.ranks, keep, staging.late)
    optimizer.held.before_change = staging.pending.wait_for_copies
    return staging.pending
