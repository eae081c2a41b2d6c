"""What a rank holds and sends, by the formulas of ZeRO (arXiv:1910.02054) and the bytes of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from zero_shard.buffers import Bucket
from zero_shard.config import ZeroConfig
from zero_shard.layout import BLOCK_NUMEL


class Usage(NamedTuple):
    """Bytes of one rank.

    Attributes:
        promised_nbytes: Model state (parameters, gradients, moments, master) by the formula. At stage 1 with the full
            gradients that backward leaves; after the step less is held.
        held_nbytes: Model state held right now.
        floor_sent_nbytes: The least that a step with one backward must send; with ``shard_size``, without what crosses
            replicas.
        sent_nbytes: What has been sent from the last step but one to the last step.
    """

    promised_nbytes: int
    held_nbytes: int
    floor_sent_nbytes: int
    sent_nbytes: int


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
    return round(total)


def _gradient_itemsize(bucket: Bucket, config: ZeroConfig, num_ranks: int) -> float:
    if config.stage == 1 or num_ranks == 1:
        return bucket.full.element_size()  # as autograd made them
    return bucket.math_dtype.itemsize / bucket.layout.num_shards


def _state_itemsize(bucket: Bucket) -> float:
    storage, has_maximum = bucket.storage, bucket.max_exp_avg_sq is not None
    scale = torch.float32.itemsize / BLOCK_NUMEL if bucket.has_codes else 0
    low = 0 if storage.low_dtype is None else storage.low_dtype.itemsize
    return (storage.moment_dtype.itemsize + scale) * (3 if has_maximum else 2) + low


def floor_sent_nbytes(buckets: Sequence[Bucket], config: ZeroConfig, num_ranks: int) -> int:
    """Return the least bytes that a rank sends per step with one backward: r P for each exchange and each gather."""
    total = 0.0
    for bucket in buckets:
        nbytes = sum(slot.numel for slot in bucket.layout.slots) * bucket.full.element_size()
        num_shards = bucket.layout.num_shards
        is_trained = any(param.requires_grad for param in bucket.params)
        wire_itemsize = bucket.full.element_size()
        if config.reduce_dtype is not None and bucket.dtype != torch.float64:
            wire_itemsize = config.reduce_dtype.itemsize
        if is_trained:
            total += nbytes * wire_itemsize / bucket.full.element_size() * (num_ranks - 1) / num_ranks
        if num_shards == 1:
            sum_nbytes = nbytes * bucket.math_dtype.itemsize / bucket.full.element_size()
            total += sum_nbytes * (num_ranks - 1) / num_ranks if is_trained else 0
        else:
            num_gathers = 1 if config.stage < 3 or not config.reshard_after_forward else 2
            total += num_gathers * nbytes * (num_shards - 1) / num_shards
    return round(total)
