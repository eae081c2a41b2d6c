"""Where this rank's parts of a checkpoint go: live memory, 16-bit weights and their masters. Local."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_shard.averaging import ExponentialMovingAverage
from zero_shard.number_formats import split_masters_
from zero_shard.stages.slots import GradSlot


def there(tensor: Tensor | None) -> Tensor:
    """Return a tensor that must have been allocated."""
    assert tensor is not None
    return tensor


def live_part(slot: GradSlot, kind: str) -> Tensor:
    """Return this rank's part of a parameter's state of a kind (an alias)."""
    return slot.bucket.local_part(getattr(slot.bucket, kind), slot.position)


def average_part(average: ExponentialMovingAverage, slot: GradSlot) -> Tensor:
    """Return this rank's part of a parameter's average (an alias)."""
    return slot.bucket.local_part(average.room(slot.bucket), slot.position)


def reset_low(slot: GradSlot, weights: Tensor) -> None:
    """Let the master be the weights themselves."""
    bucket = slot.bucket
    if bucket.low is not None:
        low = bucket.local_part(bucket.low, slot.position)
        low.zero_() if low.dtype == torch.int16 else low.copy_(weights)


def change(slot: GradSlot, weights: Tensor) -> None:
    """Store weights, and let the masters of those that are not what they were be the weights themselves."""
    bucket = slot.bucket
    shard, low = (bucket.local_part(flat, slot.position) for flat in (bucket.shard, there(bucket.low)))
    has_changed = shard.view(torch.int16) != weights.view(torch.int16)
    low.copy_(torch.where(has_changed, 0 if low.dtype == torch.int16 else weights.float(), low))
    shard.copy_(weights)


def write_masters(slot: GradSlot, values: Tensor) -> None:
    """Store weights of another dtype, without loss where there are masters."""
    bucket, position = slot.bucket, slot.position
    shard = bucket.local_part(bucket.shard, position)
    if bucket.low is None:
        shard.copy_(values)
    else:
        split_masters_(values.float(), shard, bucket.local_part(bucket.low, position))
