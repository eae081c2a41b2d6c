"""The present round: which buckets have started to be reduced, which come next, what all ranks have.

# Note [Rounds]
A round reduces every bucket once, in the same order on all ranks. Buckets start as they fill during backward; the
end of backward starts the rest, with zeros for what this rank has no gradient for. Then all ranks combine one byte
per parameter ("somebody has a gradient") and per bucket ("more came after it started", as reentrant checkpointing
does), reduce the late ones, and know which parameters to update. A bucket that nobody used in the last round waits
for that byte, so that a part of the model which is not trained at the moment sends nothing. Two bytes more say which
step a rank is in: one that has made fewer backward passes, or left out a step, must not be met by the next one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from zero_shard.buffers import Bucket
from zero_shard.collectives import Communicator
from zero_shard.stages.slots import GradSlot

_REQUIRES_GRAD = attrgetter("requires_grad")


class Rounds:
    """Counts the gradients of each bucket in the present round, and says which bucket starts next.

    Args:
        buckets, slots: Those of the reducer, which adds to them.
        communicator: The ranks.

    Attributes:
        is_started: Per bucket: its exchange has started in the present round.
        num_missing: Per bucket: how many of its gradients have not arrived yet; 0 once the backward has ended.
        has_learned_order: The order is settled, or is of no interest.
    """

    def __init__(self, buckets: Sequence[Bucket], slots: Sequence[GradSlot], communicator: Communicator) -> None:
        self._buckets, self._slots, self._communicator = buckets, slots, communicator
        self.is_started: list[bool] = []
        self.num_missing: list[int] = []
        self.has_learned_order = False
        self._order: list[int] = []  # buckets in the order in which they start, the same on all ranks
        self._next = 0  # place in the order
        self._ready_order: list[int] = []  # buckets as they filled here
        self._is_idle: list[bool] = []  # nobody had a gradient in the last round

    def add_bucket(self, bucket: Bucket) -> None:
        """Make room for a bucket."""
        self._order.insert(0, bucket.index)  # backward meets the last parameters first
        self.is_started.append(False)
        self.num_missing.append(0)
        self._is_idle.append(False)
        self.has_learned_order = False

    def begin(self) -> None:
        """Begin a round with no gradient."""
        self._next, self._ready_order = 0, []
        with torch._C.DisableTorchFunctionSubclass():
            for bucket in self._buckets:
                self.num_missing[bucket.index] = sum(map(_REQUIRES_GRAD, bucket.params))
                self.is_started[bucket.index] = False
        for slot in self._slots:
            slot.is_ready = slot.is_sent = False

    def note_ready(self, bucket: Bucket) -> None:
        """Note that all gradients of a bucket have arrived."""
        self._ready_order.append(bucket.index)

    def end_backward(self) -> None:
        """Note that no more gradients come."""
        self.num_missing[:] = [0] * len(self._buckets)

    def next_bucket(self) -> Bucket | None:
        """Return the bucket whose turn it is to start, None if it still waits for gradients or all have started."""
        while self._next < len(self._order):
            index = self._order[self._next]
            bucket = self._buckets[index]
            if self._is_idle[index] or not any(map(_REQUIRES_GRAD, bucket.params)):
                self._next += 1
                continue
            if self.num_missing[index] > 0:
                return None
            self._next += 1
            return bucket
        return None

    def agree(self) -> tuple[list[Bucket], list[int]]:
        """Combine with all ranks what each has, and remember which buckets nobody uses. All ranks call; blocks.

        Returns:
            The buckets that are yet to be reduced, for the first time or again; and per slot whether somebody has a
            gradient.
        Raises:
            RuntimeError: Ranks are in different steps; on all of them.
        """
        num_slots = len(self._slots)
        flags = torch.zeros(num_slots + len(self._buckets) + 2, dtype=torch.uint8)
        mine = flags.numpy()
        step = self._communicator.num_steps % 256
        mine[-2:] = step, 255 - step  # the largest of both are the last and the first step that a rank is in
        for slot in self._slots:
            if slot.is_sent or slot.local is not None:
                mine[slot.index] = 1
                if slot.local is not None and self.is_started[slot.bucket.index]:
                    mine[num_slots + slot.bucket.index] = 1
        union = self._communicator.agree(flags, "max", "the list of gradients present").numpy()
        if int(union[-2]) + int(union[-1]) != 255:
            raise RuntimeError(
                f"gradients of different steps have met: this rank has called step() {self._communicator.num_steps} "
                "times, another one more or less often. Call step() equally often on all ranks, and backward, too: put "
                "all but the last before a step into optimizer.no_sync(), and ranks that run out of data into "
                "torch.distributed.algorithms.Join"
            )
        waiting = []
        for bucket in self._buckets:
            is_used = bool(union[bucket.slots.start : bucket.slots.stop].any())
            is_late = bool(union[num_slots + bucket.index])
            if is_late or (is_used and not self.is_started[bucket.index]):
                waiting.append(bucket)
            self._is_idle[bucket.index] = not is_used
        return waiting, union[:num_slots].tolist()

    def learn_order(self) -> None:
        """Take the order in which rank 0's buckets filled as everybody's order from now on, once it had a backward."""
        if self.has_learned_order:
            return
        rest = [index for index in self._order if index not in set(self._ready_order)]
        message = torch.tensor([bool(self._ready_order), *self._ready_order, *rest], dtype=torch.int64)
        if self._communicator.rank != 0:
            message.zero_()
        is_known, *order = self._communicator.agree(message, "sum", "the order of buckets").tolist()
        if is_known:
            self._order, self.has_learned_order = order, True
