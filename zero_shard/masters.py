"""Float32 masters of 16-bit weights: the weight and what is kept beside it (``low``), through every way to change one.

# Note [Edited weights]
``low`` belongs to the weight that it was split off with. A float16 weight that the user has edited no longer is what
its float32 master rounds to, so the kernels see it. For bfloat16, whose remainder fits any weight, torch's count of
changes in place tells (``param._version``, which does not see ``param.data``): the remainder of an edited parameter is
dropped. A parameter that is edited between all steps (clamped, masked) would so never have one. Hence the weights of an
edited parameter are remembered over the next step, and if it is edited again, the remainder is dropped only where it
differs from them. What a stale remainder could do is small in any case: half a unit of the weight's last place.
"""

from __future__ import annotations

import weakref
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zero_shard.buffers import RELEASED_VERSIONS, Bucket, in_memory
from zero_shard.number_formats import join_masters, split_masters_

_version = attrgetter("_version")
_homes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # split parameter -> (its bucket, weakly; position)


def keep_own(bucket: Bucket) -> None:
    """Keep only the own range of ``low`` of a new bucket, and watch its parameters from now on. Local."""
    for param in bucket.params:
        _homes.pop(param, None)  # another optimizer's
    if not bucket.storage.is_split or bucket.low is None:
        return
    if bucket.layout.num_shards > 1:
        bucket.low = bucket.low[bucket.own_range].clone()
    watch(bucket)


def watch(bucket: Bucket) -> None:
    """Note that ``low`` belongs to the weights as they are now, and find the bucket by its parameters. Local."""
    bucket.seen.versions, bucket.seen.num_steps = _versions_of(bucket), 0
    for position, param in enumerate(bucket.params if bucket.storage.is_split else ()):
        _homes[param] = (weakref.ref(bucket), position)


def home_of(param: nn.Parameter) -> tuple[Bucket, int] | None:
    """Return bucket and position of a parameter that was float32 and is split; None for others."""
    reference, position = _homes.get(param, (lambda: None, 0))
    bucket: Bucket | None = reference()
    return None if bucket is None else (bucket, position)


def note_weights(bucket: Bucket, num_updated: int = 0) -> None:
    """Note that ``low`` belongs to the weights as they are now. Local.

    Args:
        num_updated: After a step: how many of the parameters it has updated, each of which counts as one change.
    """
    if bucket.low is None or bucket.low.dtype != torch.int16:
        return
    seen = bucket.seen
    if seen.versions is not None and num_updated == len(seen.versions):
        seen.num_steps += 1
    else:
        seen.versions, seen.num_steps = _versions_of(bucket), 0
    seen.watched, seen.edited = seen.edited, set()
    if not seen.watched or bucket.owns_shard:
        seen.last_shard = None
    elif seen.last_shard is None:
        seen.last_shard = bucket.shard.clone()
    else:
        seen.last_shard.copy_(bucket.shard)


def trust_next_weights(bucket: Bucket) -> None:
    """Note that ``low`` was loaded, and belongs to the weights that will be here at the next step. Local."""
    bucket.seen.versions, bucket.seen.num_steps = None, 0


def notice_edits(bucket: Bucket) -> None:
    """Drop the remainders of bfloat16 weights that the user has changed. Local. See Note [Edited weights]."""
    if not bucket.owns_shard:
        _drop_stale(bucket, bucket.seen.last_shard, bucket.shard)


def take_shard(bucket: Bucket) -> None:
    """Copy the own range of ``full``, which the user may have changed, into ``shard`` (stage 3). Local."""
    weights = bucket.full[bucket.own_range]
    for position, low in bucket.seen.loaded_low.items():
        assert bucket.low is not None
        bucket.local_part(bucket.low, position).copy_(low)
    bucket.seen.loaded_low.clear()
    _drop_stale(bucket, bucket.shard, weights)  # what was edited after loading, too
    bucket.shard.copy_(weights)


def _drop_stale(bucket: Bucket, last_shard: Tensor | None, shard: Tensor) -> None:
    if bucket.low is None or bucket.low.dtype != torch.int16:
        return
    seen, versions = bucket.seen, _versions_of(bucket)
    before = versions if seen.versions is None else seen.versions
    moved = [] if sum(versions) == sum(before) + seen.num_steps * len(before) else range(len(before))
    changed = [position for position in moved if versions[position] != before[position] + seen.num_steps]
    seen.versions, seen.num_steps = versions, 0
    for position in changed:
        seen.edited.add(position)
        low = bucket.local_part(bucket.low, position)
        if last_shard is None or position not in seen.watched:
            low.zero_()
        else:
            last, now = (bucket.local_part(flat, position).view(torch.int16) for flat in (last_shard, shard))
            low.masked_fill_(last != now, 0)


def _versions_of(bucket: Bucket) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():  # released parameters
        return [version % RELEASED_VERSIONS for version in map(_version, bucket.params)]


def master_part(bucket: Bucket, position: int) -> Tensor:
    """Return the own part of the float32 master of a parameter with one, 1-d in memory order."""
    assert bucket.low is not None
    return join_masters(bucket.local_part(bucket.shard, position), bucket.local_part(bucket.low, position))


def write_master(bucket: Bucket, position: int, values: Tensor) -> None:
    """Replace a whole parameter with a master, which must not be released. Local.

    At stage 3 the values are kept if and when other changes of the parameter are.

    Args:
        values: Of the parameter's shape, in any dtype.
    """
    assert bucket.low is not None
    offset, numel = bucket.layout.slots[position]
    flat = in_memory(values.to(device=bucket.device, dtype=torch.float32), bucket.views[position].stride())
    low = torch.empty(numel, dtype=bucket.low.dtype, device=bucket.device)
    split_masters_(flat, bucket.full[offset : offset + numel], low)
    segment = bucket.segment_of.get(position)
    if segment is not None:
        own = low[segment.param_start : segment.param_start + segment.numel]
        if bucket.owns_shard:
            bucket.seen.loaded_low[position] = own.clone()
        else:
            bucket.local_part(bucket.low, position).copy_(own)
    if bucket.seen.versions is not None:
        bucket.seen.versions[position] = bucket.params[position]._version - bucket.seen.num_steps
