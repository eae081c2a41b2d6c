"""The gradients of all slots at once: what the user has done to them, and how they are dropped.

There may be tens of thousands of them, so each step looks for what has changed without a line of Python per slot, and
past the ``__torch_function__`` of released parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not

import torch
from torch import Tensor, nn

from zero_shard.buffers import Bucket
from zero_shard.stages.plain_gradients import PlainGradients
from zero_shard.stages.slots import GradSlot, refuse_sparse

_GRAD, _HANDED, _LOCAL = attrgetter("grad"), attrgetter("handed"), attrgetter("local")
_HAS_REDUCED, _HAS_PARTIAL = attrgetter("has_reduced"), attrgetter("has_partial")


class SlotGradients:
    """Every gradient that a reducer is in charge of.

    Args:
        buckets, slots: Those of the reducer, which adds to them.
        plain: The gradients of a world of one; None on several ranks.
    """

    def __init__(self, buckets: Sequence[Bucket], slots: Sequence[GradSlot], plain: PlainGradients | None) -> None:
        self._buckets, self._slots, self._plain = buckets, slots, plain
        self._params: list[nn.Parameter] = []  # of the slots

    def _grads(self) -> list[Tensor | None]:
        """Return ``param.grad`` of every slot."""
        if len(self._params) != len(self._slots):
            self._params = [slot.param for slot in self._slots]
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(_GRAD, self._params))

    def replaced(self, grads: Sequence[Tensor | None] | None = None) -> list[GradSlot]:
        """Return the slots whose ``param.grad`` is not what was handed out. Local."""
        grads = self._grads() if grads is None else grads
        return list(compress(self._slots, map(is_not, grads, list(map(_HANDED, self._slots)))))

    def notice_drops(self) -> list[GradSlot]:
        """Forget gradients that the user has taken away or replaced since they were handed out. Local.

        Returns:
            The slots whose ``param.grad`` was not what was handed out.
        """
        if self._plain is not None:
            return []
        changed = self.replaced()
        for slot in changed:
            if slot.handed is not None:
                slot.notice_replaced()
        for bucket in self._buckets:
            slots = self._slots[bucket.slots.start : bucket.slots.stop]
            if bucket.layout.num_shards == 1:
                changed += [slot for slot in slots if slot.handed is not None and slot.notice_moved()]
            if not any(map(_HAS_REDUCED, slots)):
                bucket.grad = None
            if bucket.partial is not None and not any(map(_HAS_PARTIAL, slots)):
                bucket.partial = None
        return changed

    def take_new(self, changed: Sequence[GradSlot]) -> bool:
        """Take what the user or autograd has put into ``param.grad``; return whether any gradient is local. Local.

        Args:
            changed: The slots that it may be in.
        """
        for slot in changed:
            grad = slot.param.grad
            if grad is not None and grad is not slot.handed:
                slot.take()
        return any(map(is_not, map(_LOCAL, self._slots), repeat(None)))

    def active_flags(self) -> Tensor:
        """Return one byte per slot: 1 if the parameter has a gradient. Once reduced, equal on all ranks."""
        if self._plain is not None:
            flags = bytearray(len(self._slots))
            self._plain.mark(flags, self._buckets)
            return _as_tensor(flags)
        grads = self._grads()
        for slot in self.replaced(grads):
            grad = slot.param.grad
            if grad is not None and grad.layout != torch.strided:
                refuse_sparse(slot.name, grad)
        return _as_tensor(bytearray(map(is_not, grads, repeat(None))))

    def zero(self, set_to_none: bool) -> None:
        """Drop all gradients, or set them to zero. Local."""
        if not set_to_none:
            self.notice_drops()
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self._slots:
                if set_to_none or slot.handed is None:
                    slot.forget()
                    if set_to_none:
                        slot.param.grad = None
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
