"""Saving while training goes on: a copy of the own shard at the call, written by a thread."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_shard.adamw import AdamW
from zero_shard.checkpoint.contents import Contents
from zero_shard.checkpoint.saving import prepare, write
from zero_shard.collectives import Agreements

_LOG = logging.getLogger("zero_shard")


class PendingSave:
    """A checkpoint that is being written."""

    def __init__(self, contents: Contents, target: Path, ranks: Agreements, keep: int | None) -> None:
        self._error: BaseException | None = None
        self._job: tuple[Contents, Path, Agreements, int | None] | None = (contents, target, ranks, keep)
        self._thread = threading.Thread(target=self._run, name=f"zero_shard saves {target}")
        self._thread.start()

    def _run(self) -> None:
        assert self._job is not None
        try:
            write(*self._job)
        except BaseException as error:  # for whoever waits
            self._error = error
            _LOG.error("zero_shard: %s failed: %s", self._thread.name, error)
        self._job = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the checkpoint stands under its name. Local: every rank may wait when it likes.

        Raises:
            TimeoutError: It does not after so many seconds; it goes on.
            RuntimeError, OSError: What `save` would have raised; once.
        """
        self._thread.join(timeout_s)
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
        self._room: dict[Any, Tensor] = {}
        self._used: dict[Any, Tensor] = {}

    def begin(self) -> None:
        """Wait for the save before; forget room that it did not use."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait()
        self._room, self._used = self._used, {}

    def copy(self, key: Any, tensor: Tensor) -> Tensor:
        """Return a copy."""
        room = self._room.get(key)
        if room is None or (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._used[key] = room.copy_(tensor, non_blocking=True)
        return room


_stagings: weakref.WeakKeyDictionary[AdamW, _Staging] = weakref.WeakKeyDictionary()


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
    staging.pending = PendingSave(contents, Path(os.path.realpath(path)), staging.ranks, keep)
    return staging.pending
