"""Where everything lies: integer geometry of flat buckets. No tensors, no processes.

A bucket is a row of slots, one per parameter, each at an aligned offset, padded to a multiple of the number of
shards. Shard r is the half-open range [r * n, (r + 1) * n) of it, n = N / W.

    slot 0        slot 1     slot 2               padding
    |-------------|----------|--------------------|......|
    |        shard 0          |         shard 1          |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Slots and shards start at multiples of so many elements: whole vector loads in every dtype, and the lanes of the
# canonical sums (see docs/kernels.md).
ALIGNMENT_NUMEL = 16
BLOCK_NUMEL = 256  # elements that share a scale where moments or the wire have 8 bits; no shard cuts a block
SCALE_NBYTES = 4  # of a block on the wire: float32, and a byte for each element follows
WIRE_BLOCK_NBYTES = SCALE_NBYTES + BLOCK_NUMEL
_SMALLEST_CAP_NBYTES = 1 << 20
_SMALLEST_PIECE_NBYTES = 1 << 20
_LARGE_NBYTES = 1 << 20  # copying so much takes longer than another message
_PIECES_PER_BUCKET = 4
_BUCKETS_PER_MODEL = 8  # fewer would neither overlap with backward nor bound the extra memory


class Slot(NamedTuple):
    """The place of one parameter in a bucket, in elements."""

    offset: int
    numel: int


class Segment(NamedTuple):
    """The part of one parameter that lies in one shard, in elements."""

    slot: int  # position of the parameter in the bucket
    shard_start: int  # counted from the start of the shard
    param_start: int  # counted from the start of the parameter
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """Slots of one bucket and the equal ranges that its shards own.

    Attributes:
        slots: One per parameter, ascending and disjoint.
        numel: Padded length N, a multiple of ``num_shards``.
        num_shards: How many equal ranges the bucket is split into, W.
    """

    slots: tuple[Slot, ...]
    numel: int
    num_shards: int

    @property
    def shard_numel(self) -> int:
        """Elements of one shard, n = N / W."""
        return self.numel // self.num_shards

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the half-open range of the bucket that shard ``rank`` owns, in elements.

        Source: ZeRO (arXiv:1910.02054), section 5.1: equal contiguous ranges.
        """
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def segments(self, rank: int) -> list[Segment]:
        """Return what of each parameter lies in shard ``rank``, ascending, empty parts left out."""
        return self.segments_between(*self.shard_range(rank))

    def segments_between(self, start: int, stop: int) -> list[Segment]:
        """Return what of each parameter lies in the range [start, stop) of the bucket, as if it were a shard."""
        found = []
        for position, (offset, numel) in enumerate(self.slots):
            low, high = max(offset, start), min(offset + numel, stop)
            if low < high:
                found.append(Segment(position, low - start, low - offset, high - low))
        return found


def lay_out(
    numels: Iterable[int], num_shards: int, replicas: int = 1, alignment_numel: int = ALIGNMENT_NUMEL
) -> BucketLayout:
    """Place parameters one after the other, each aligned, the whole padded to equal aligned shards.

    Args:
        numels: Elements of each parameter; 0 is legal.
        num_shards: Number of equal ranges W, at least 1.
        replicas: Each shard also splits evenly into so many aligned parts (for reducing across replicas).
        alignment_numel: Of slots and shards, in elements.
    """
    slots, end = [], 0
    for numel in numels:
        slots.append(Slot(end, numel))
        end = _round_up(end + numel, alignment_numel)
    return BucketLayout(tuple(slots), _round_up(end, num_shards * replicas * alignment_numel), num_shards)


def split_into_buckets(nbytes: Sequence[int], bucket_nbytes: int, parts_large: bool = False) -> list[list[int]]:
    """Cut a row of parameters into consecutive buckets of at most ``bucket_nbytes``, one parameter at the least.

    Args:
        parts_large: A large parameter has a bucket of its own, so that its gradient needs no flattening, and the
            small ones beside it are consecutive.
    """
    large = [position for position, size in enumerate(nbytes) if parts_large and size >= _LARGE_NBYTES]
    alone = set(large)
    buckets: list[list[int]] = [[position] for position in large]
    bucket: list[int] = []
    total = 0
    for position, size in enumerate(nbytes):
        if position in alone:
            continue
        if bucket and total + size > bucket_nbytes:
            buckets.append(bucket)
            bucket, total = [], 0
        bucket.append(position)
        total += size
    return [*buckets, bucket] if bucket else buckets


def capped_bucket_nbytes(bucket_mib: float, model_nbytes: int) -> int:
    """Return the size of a bucket in bytes: as configured, but never larger than the model needs."""
    return int(min(bucket_mib * 2**20, max(_SMALLEST_CAP_NBYTES, -(-model_nbytes // _BUCKETS_PER_MODEL))))


def piece_nbytes(bucket_nbytes: int) -> int:
    """Return the size of what a bucket is exchanged in where several exchanges may be in flight at once."""
    return max(bucket_nbytes // _PIECES_PER_BUCKET, min(bucket_nbytes, _SMALLEST_PIECE_NBYTES))


def dense_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return ``stride`` if the tensor fills its memory without gaps or overlaps, else row-major strides."""
    expected = 1
    for length, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if length == 1:
            continue
        if step != expected:
            return _row_major(shape)
        expected *= length
    return tuple(stride)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
