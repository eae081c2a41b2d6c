"""Norms over shards: the same number on every rank, whatever the sharding.

# Note [Norms that do not depend on the sharding]
A sum of squares depends on the order of its additions, and each stage adds in another order. For fp32 the sum is
taken in fp64 and the norm rounded to fp32, which hides the difference. For fp64 the sum is carried as an
unevaluated pair (high, low) through error-free additions (Knuth's TwoSum), which leaves about 100 correct bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zero_shard.collectives import Communicator

_CHUNK_NUMEL = 1 << 20


def global_norm(parts: Iterable[Tensor], order: float, communicator: Communicator) -> Tensor:
    """Return the norm of a vector of which each rank of a shard group holds ``parts``. All ranks call; blocks.

    Args:
        parts: Tensors of this rank, fp32 or fp64, possibly empty; walked once.
        order: p of the p-norm, > 0; inf for the largest absolute value.
    Returns:
        0-dim CPU tensor, fp64 if any part is fp64 on any rank, else fp32. NaN and inf are agreed on.
    """
    if not order > 0:
        raise ValueError(f"norm_type must be positive, got {order!r}")
    is_counted = communicator.replicas.rank == 0  # replicas hold the same; one of them speaks
    if order == math.inf:
        return _largest(parts, communicator)
    high, low, is_double = _sum_of_powers(parts, order)
    pair = (high, low) if is_counted else (0.0, 0.0)
    sums = communicator.all_gather_small(
        torch.tensor([*pair, float(is_double)], dtype=torch.float64), "the gradient norm"
    )
    high, low = _combine((float(row[0]), float(row[1])) for row in sums)
    norm = torch.tensor(_root(high + low, order), dtype=torch.float64)
    return norm.to(torch.float64 if sums[:, 2].any() else torch.float32)


def global_norms(parts: Sequence[Tensor], order: float, communicator: Communicator) -> Tensor:
    """Return the norm of each of P vectors, of which each rank of a shard group holds a part. All ranks call; blocks.

    Returns:
        [P] fp64 CPU tensor, by one message.
    """
    if order == math.inf:
        peaks = torch.tensor([float(part.abs().max()) if part.numel() else 0.0 for part in parts], dtype=torch.float64)
        sent = torch.stack([peaks.nan_to_num(nan=0.0, posinf=math.inf), peaks.isnan().double()])
        agreed = communicator.agree(sent, "max", "the gradient norms")
        return torch.where(agreed[1] > 0, torch.nan, agreed[0])
    is_counted = communicator.replicas.rank == 0
    found = [_sum_of_powers_in(part.detach().reshape(-1), order) if is_counted else (0.0, 0.0) for part in parts]
    pairs = torch.tensor(found, dtype=torch.float64).reshape(-1)
    rows = communicator.all_gather_small(pairs, "the gradient norms").view(communicator.num_ranks, -1, 2).tolist()
    totals = [sum(_combine(map(tuple, column))) for column in zip(*rows, strict=True)]
    return torch.tensor([_root(total, order) for total in totals], dtype=torch.float64)


def _root(total: float, order: float) -> float:
    # One at a time: torch's vectorised square root is not correctly rounded, so it depends on the place in the vector.
    if not math.isfinite(total):
        return total
    return math.sqrt(total) if order == 2 else total ** (1.0 / order)


def _largest(parts: Iterable[Tensor], communicator: Communicator) -> Tensor:
    peak, is_double = 0.0, False
    for part in parts:
        is_double |= part.dtype == torch.float64
        if part.numel():
            largest = float(part.detach().abs().max())
            peak = largest if math.isnan(largest) or largest > peak else peak
    # The maximum over ranks may drop a NaN, so it travels as a flag of its own.
    sent = torch.tensor([0.0 if math.isnan(peak) else peak, is_double, math.isnan(peak)], dtype=torch.float64)
    agreed = communicator.agree(sent, "max", "the gradient norm")
    norm = torch.tensor(math.nan, dtype=torch.float64) if agreed[2] else agreed[0]
    return norm.to(torch.float64 if agreed[1] else torch.float32)


def _sum_of_powers(parts: Iterable[Tensor], order: float) -> tuple[float, float, bool]:
    pairs: list[tuple[float, float]] = []
    is_double = False
    for part in parts:
        is_double |= part.dtype == torch.float64
        pairs.append(_sum_of_powers_in(part.detach().reshape(-1), order))
        del part  # before the next is made
    return (*_combine(pairs), is_double)


def _sum_of_powers_in(flat: Tensor, order: float) -> tuple[float, float]:
    if flat.numel() == 0:
        return 0.0, 0.0
    if flat.dtype != torch.float64:
        return float(torch.linalg.vector_norm(flat, order, dtype=torch.float64)) ** order, 0.0
    return _combine(_exact_sum(chunk.abs() ** order) for chunk in flat.split(_CHUNK_NUMEL))


def _exact_sum(values: Tensor) -> tuple[float, float]:
    """Add fp64 values pairwise, carrying each rounding error along."""
    errors = torch.zeros_like(values)
    while values.numel() > 1:
        half = values.numel() // 2
        left, right, rest = values[:half], values[half : 2 * half], values[2 * half :]
        total = left + right
        shadow = total - left
        error = (left - (total - shadow)) + (right - shadow)
        errors = torch.cat([errors[:half] + errors[half : 2 * half] + error, errors[2 * half :]])
        values = torch.cat([total, rest])
    return float(values[0]), float(errors[0])


def _combine(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    high = low = 0.0
    for value, error in pairs:
        total = high + value
        shadow = total - high
        low += (high - (total - shadow)) + (value - shadow) + error
        high = total
    if not math.isfinite(high):
        low = 0.0  # inf - inf above is no error term
    return high, low
