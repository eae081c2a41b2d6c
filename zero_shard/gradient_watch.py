"""What the gradients of a step were, without another pass over them: for a monitor."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch import Tensor

from zero_shard.buffers import Bucket
from zero_shard.collectives import Communicator, Received
from zero_shard.stages.hooks import weakly
from zero_shard.stages.reduction import Reducer
from zero_shard.tables import SlotTables
from zero_shard.wire_codec import dequantize


class Squares(NamedTuple):
    """This rank's part of the square of the gradient norm.

    Attributes:
        total: [2] fp64, high and low half of the sum, before any clip.
        sums: [K, 2] fp64, the same for each segment, as the gradients are now.
        buckets: Whose segments these are, in order.
    """

    total: Tensor
    sums: Tensor
    buckets: Sequence[Bucket]

    def nonfinite(self) -> list[str]:
        """Return the parameters whose gradient is not finite in this rank's part."""
        names = [bucket.names[segment.slot] for bucket in self.buckets for segment in bucket.part_segments]
        is_bad = (~torch.isfinite(self.sums[:, 0])).tolist()
        return [name for name, is_one in zip(names, is_bad, strict=True) if is_one]


class Watcher(Protocol):
    """Who is told."""

    def before_zero_grad(self) -> None:
        """Gradients are about to be dropped."""


class GradientWatch:
    """Sums of squares of the gradients of an optimizer, and where non-finite ones came from.

    Attributes:
        origin: The lowest rank whose gradient was not finite in what was reduced first since it was cleared; only where
            slices of all ranks meet here (gloo, one host).
    """

    def __init__(self, reducer: Reducer, tables: SlotTables, communicator: Communicator) -> None:
        self._reducer, self._tables, self._communicator = reducer, tables, communicator
        self._watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
        self.origin: int | None = None

    def begin(self, watcher: Watcher) -> None:
        """Have squares summed while gradients are reduced, and tell the watcher, held weakly. All ranks call."""
        exchanges = self._reducer.exchanges
        exchanges.takes_squares, exchanges.at_reduced = True, weakly(self._look)
        self._watchers.add(watcher)
        self._reducer.before_zero_grad = weakly(self._before_zero_grad)

    def end(self, watcher: Watcher) -> None:
        """Tell this one no more."""
        self._watchers.discard(watcher)
        if not self._watchers:
            self._reducer.exchanges.at_reduced = self._reducer.before_zero_grad = None

    @property
    def has_reduced(self) -> bool:
        """Whether the present gradients are the mean ones."""
        return self._reducer.has_reduced

    def squares(self, groups: Sequence[dict[str, Any]]) -> Squares:
        """Return the sums of squares of the present gradients, as they were before any clip. Local; no GPU waits."""
        return Squares(*self._reducer.norms.first_squares(self._tables.owned_flags(self._reducer.slots, groups)))

    def forget(self) -> None:
        """Begin anew: the next norm is the first one, the next non-finite gradient too."""
        self._reducer.norms.forget()
        self.origin = None

    def _before_zero_grad(self) -> None:
        for watcher in list(self._watchers):
            watcher.before_zero_grad()

    def _look(self, bucket: Bucket, received: Received) -> None:
        """Find out which rank's slice is not finite, if the sum is not."""
        slices = received.in_order()
        if self.origin is not None or not received.slices.is_cpu or len(slices) != self._communicator.num_ranks:
            return
        if not numpy.isfinite(bucket.sums.numpy()[:, 0]).all():
            wide = (dequantize(piece) if piece.dtype == torch.uint8 else piece for piece in slices)
            is_bad = [not bool(torch.isfinite(piece).all()) for piece in wide]
            self.origin = is_bad.index(True) if any(is_bad) else None
