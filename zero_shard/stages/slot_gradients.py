"""The gradients of all slots at once: what the user has done to them, and how they are dropped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_shard.buffers import Bucket
from zero_shard.stages.plain_gradients import PlainGradients
from zero_shard.stages.slots import GradSlot, refuse_sparse


class SlotGradients:
    """Every gradient that a reducer is in charge of.

    Args:
        buckets, slots: Those of the reducer, which adds to them.
        plain: The gradients of a world of one; None on several ranks.
    """

    def __init__(self, buckets: Sequence[Bucket], slots: Sequence[GradSlot], plain: PlainGradients | None) -> None:
        self._buckets, self._slots, self._plain = buckets, slots, plain

    def notice_drops(self) -> None:
        """Forget gradients that the user has taken away or replaced since they were handed out. Local."""
        if self._plain is not None:
            return
        for bucket in self._buckets:
            has_reduced, is_whole = False, bucket.layout.num_shards == 1
            slots = self._slots[bucket.slots.start : bucket.slots.stop]
            for slot in slots:
                if slot.handed is not None and slot.param.grad is not slot.handed:
                    slot.notice_replaced()
                elif is_whole and slot.handed is not None:
                    slot.notice_moved()
                has_reduced |= slot.has_reduced
            if not has_reduced:
                bucket.grad = None
            if bucket.partial is not None and not any(slot.has_partial for slot in slots):
                bucket.partial = None

    def take_new(self) -> bool:
        """Take gradients that the user or autograd has put into ``param.grad``; return whether any is local. Local."""
        has_local = False
        for slot in self._slots:
            grad = slot.param.grad
            if grad is not None and grad is not slot.handed:
                slot.take()
            has_local |= slot.local is not None
        return has_local

    def active_flags(self) -> Tensor:
        """Return one byte per slot: 1 if the parameter has a gradient. Once reduced, equal on all ranks."""
        flags = bytearray(len(self._slots))
        if self._plain is not None:
            self._plain.mark(flags, self._buckets)
            return _as_tensor(flags)
        for slot in self._slots:
            grad = slot.param.grad
            flags[slot.index] = grad is not None
            if grad is not None and grad.layout != torch.strided:
                refuse_sparse(slot.name, grad)
        return _as_tensor(flags)

    def zero(self, set_to_none: bool) -> None:
        """Drop all gradients, or set them to zero. Local."""
        if not set_to_none:
            self.notice_drops()
        for slot in self._slots:
            if set_to_none or slot.handed is None:
                slot.forget()
                slot.param.grad = None if set_to_none else slot.param.grad
            elif slot.local is not None:
                slot.local.zero_()
        for bucket in self._buckets:
            if set_to_none:
                bucket.grad = bucket.partial = None
                continue
            if bucket.grad is not None:
                bucket.grad.zero_()
                bucket.has_sums = False
            if bucket.partial is not None:
                bucket.partial.zero_()

    def scale_replaced(self, factor: Tensor) -> None:
        """Multiply gradients that the user has put in the place of what was handed out. Local."""
        self.notice_drops()
        for slot in self._slots:
            grad = slot.param.grad
            if grad is not None and grad is not slot.handed:
                grad.mul_(factor.to(device=grad.device, dtype=grad.dtype))

    def held_nbytes(self) -> int:
        """Bytes of gradients that are not in a bucket: local ones."""
        local = sum(slot.local.nbytes for slot in self._slots if slot.local is not None)
        if self._plain is not None:
            local += sum(slot.param.grad.nbytes for slot in self._slots if slot.param.grad is not None)
        return local


def _as_tensor(flags: bytearray) -> Tensor:
    return torch.frombuffer(flags, dtype=torch.uint8) if flags else torch.zeros(0, dtype=torch.uint8)
