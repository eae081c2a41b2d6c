"""What a rank holds and sends, by the formulas of ZeRO (arXiv:1910.02054) and the bytes of this package."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from zero_shard.buffers import Bucket
from zero_shard.config import ZeroConfig
from zero_shard.layout import BLOCK_NUMEL, WIRE_BLOCK_NBYTES


class Usage(NamedTuple):
    """Bytes of one rank.

    Attributes:
        promised_nbytes: Model state (parameters, gradients, moments, master) by the formula. At stage 1 with the full
            gradients that backward leaves; after the step less is held.
        held_nbytes: Model state held right now.
        floor_sent_nbytes: The least that a step with one backward must send.
        sent_nbytes: What has been sent from the last step but one to the last step.
        sent_across_nbytes: What of it has gone to ranks on other hosts.
    """

    promised_nbytes: int
    held_nbytes: int
    floor_sent_nbytes: int
    sent_nbytes: int
    sent_across_nbytes: int


def usage_of(
    buckets: Sequence[Bucket], config: ZeroConfig, hops: Sequence[int], beside_nbytes: int, sent: tuple[int, int]
) -> Usage:
    """Return what this rank holds and sends.

    Args:
        hops: Ranks in each hop of the reduction of a gradient, in order.
        beside_nbytes: Model state held beside the buckets.
        sent: What the last step has sent, and what of it to other hosts.
    """
    num_ranks = math.prod(hops)
    held = sum(bucket.held_nbytes() for bucket in buckets) + beside_nbytes
    return Usage(promised_nbytes(buckets, config, num_ranks), held, floor_sent_nbytes(buckets, config, hops), *sent)


def promised_nbytes(buckets: Sequence[Bucket], config: ZeroConfig, num_ranks: int) -> int:
    """Return the bytes of model state per rank: 4 + 4 + 8/N, 4 + 12/N and 16/N per fp32 parameter at stages 1 to 3."""
    total = 0.0
    for bucket in buckets:
        numel = sum(slot.numel for slot in bucket.layout.slots)
        num_shards = bucket.layout.num_shards
        itemsize = bucket.full.element_size()
        total += numel * itemsize / (num_shards if config.stage == 3 else 1)
        if any(param.requires_grad for param in bucket.params):
            total += numel * _gradient_itemsize(bucket, config, num_ranks)
            total += numel * _state_itemsize(bucket) / num_shards
        elif bucket.storage.is_split and bucket.low is not None:
            total += numel * bucket.low.itemsize / num_shards
    return round(total)


def _gradient_itemsize(bucket: Bucket, config: ZeroConfig, num_ranks: int) -> float:
    if config.stage == 1 or num_ranks == 1:
        return bucket.grad_dtype.itemsize  # as autograd made them
    return bucket.math_dtype.itemsize / bucket.layout.num_shards


def _state_itemsize(bucket: Bucket) -> float:
    storage, has_maximum = bucket.storage, bucket.max_exp_avg_sq is not None
    scale = torch.float32.itemsize / BLOCK_NUMEL if bucket.has_codes else 0
    low = 0 if storage.low_dtype is None else storage.low_dtype.itemsize
    return (storage.moment_dtype.itemsize + scale) * (3 if has_maximum else 2) + low


def floor_sent_nbytes(buckets: Sequence[Bucket], config: ZeroConfig, hops: Sequence[int]) -> int:
    """Return the least bytes that a rank sends per step with one backward: r P for each exchange and each gather.

    Args:
        hops: Ranks in each hop of the reduction of a gradient, in order. Slices travel in the wire's dtype on the
            first, sums in that of the arithmetic on the others and, where there are replicas, back between them. 8-bit
            slices travel so on every hop but the way back.
    """
    total = 0.0
    for bucket in buckets:
        numel = sum(slot.numel for slot in bucket.layout.slots)
        num_shards, num_ranks = bucket.layout.num_shards, math.prod(hops)
        is_trained = any(param.requires_grad for param in bucket.params)
        if is_trained:
            left, itemsize = float(numel), _wire_itemsize(bucket)
            for length in hops:
                total += left * (length - 1) / length * itemsize
                left, itemsize = left / length, itemsize if bucket.has_wire_blocks else bucket.math_dtype.itemsize
            total += (numel / num_shards - numel / num_ranks) * bucket.math_dtype.itemsize
        if num_shards > 1 and (is_trained or config.stage == 3):
            num_gathers = 1 if config.stage != 3 or not config.reshard_after_forward else 2
            total += num_gathers * numel * bucket.full.element_size() * (num_shards - 1) / num_shards
    return round(total)


def describe_storage(buckets: Sequence[Bucket], config: ZeroConfig, num_ranks: int) -> str:
    """Return in one line what is stored in what on each rank, and the bytes of model state per parameter. Local."""
    numels = [sum(slot.numel for slot in bucket.layout.slots) for bucket in buckets]
    trained = [bucket for bucket in buckets if any(param.requires_grad for param in bucket.params)]
    total = sum(numels)
    weights: dict[str, int] = {}
    for bucket, numel in zip(buckets, numels, strict=True):
        kind = _weight_in_words(bucket)
        weights[kind] = weights.get(kind, 0) + numel
    parts = [f"{kind} ({numel / total:.1%})" if numel < total else kind for kind, numel in weights.items()]
    own = _names({b.grad_dtype if num_ranks == 1 else b.math_dtype for b in trained})
    wire = _names({bucket.storage.wire_dtype for bucket in trained})
    gradients = f"{own} as autograd leaves them" if num_ranks == 1 else f"{own}, {wire} on the wire"
    nbytes = promised_nbytes(buckets, config, num_ranks) / max(total, 1)
    return (
        f"stage {config.stage} on {num_ranks} rank{'s' * (num_ranks > 1)}; parameters {', '.join(parts)}; gradients "
        f"{gradients}; moments {_names({b.storage.moment_dtype for b in trained})}; "
        f"{nbytes:.1f} bytes per parameter and rank"
    )


def _weight_in_words(bucket: Bucket) -> str:
    low_dtype = bucket.storage.low_dtype
    name = _names({bucket.dtype})
    if low_dtype == torch.int16:
        return f"{name} + 16-bit remainder (lossless float32 master)"
    if low_dtype is not None:
        return f"{name} + float32 master"
    return f"{name} rounded stochastically" if bucket.storage.is_stochastic else name


def _wire_itemsize(bucket: Bucket) -> float:
    return WIRE_BLOCK_NBYTES / BLOCK_NUMEL if bucket.has_wire_blocks else bucket.storage.wire_dtype.itemsize


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"
