"""Norms over shards: the same number on every rank, whatever the sharding.

# Note [Norms that do not depend on the sharding]
A sum of squares depends on the order of its additions, and each stage adds in another order. The kernels therefore add
within fixed chunks of a parameter, and everything beyond is carried as an unevaluated pair (high, low) through
error-free additions (Knuth's TwoSum), which leaves about 100 correct bits before the one rounding at the end. Other
norms than the 2-norm take a pass of their own: in fp64, rounded to fp32, which hides the order; for fp64 as pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy
import torch
from torch import Tensor

from zero_shard.collectives import Communicator
from zero_shard.ops import Kernels

_CHUNK_NUMEL = 1 << 20
# Sums over ranks are taken in whole numbers of 2^-50 and 2^-100 of the largest one's power of two: exact, and with
# room in 63 bits for 4,096 ranks.
_LIMB_NBITS = 50
_SMALLEST_EXPONENT = -900


def total_of(pairs: Tensor, kernels: Kernels) -> Tensor:
    """Return the sum [2] of pairs [K, 2] as one pair. Local."""
    total = pairs.new_zeros(2)
    kernels.sum_pairs_(total, pairs)
    return total


def norm_of_totals(totals: Tensor, is_double: bool, kernels: Kernels) -> Tensor:
    """Return the 2-norm of a vector of whose squares each rank has the sum of a part, [W, 2]. Local.

    Reads nothing back to the host where the tensors are a GPU's; not yet run on one.

    Args:
        totals: fp64, high and low halves, of all ranks.
        is_double: Whether the vector has fp64 elements.
    Returns:
        0-dim tensor on the device of ``totals``, fp64 or fp32.
    """
    total = total_of(totals, kernels)
    # Not torch's vectorised square root on the CPU, which is not correctly rounded.
    root = torch.tensor(_root(float(total[0]), 2.0), dtype=torch.float64) if total.is_cpu else total[0].sqrt()
    return root.to(torch.float64 if is_double else torch.float32)


def global_norm(parts: Iterable[Tensor], order: float, communicator: Communicator) -> Tensor:
    """Return the norm of a vector of which each rank holds ``parts``. All ranks call; blocks.

    Args:
        parts: Tensors of this rank, fp32 or fp64, possibly empty; walked once.
        order: p of the p-norm, > 0; inf for the largest absolute value.
    Returns:
        0-dim CPU tensor, fp64 if any part is fp64 on any rank, else fp32. NaN and inf are agreed on.
    """
    if not order > 0:
        raise ValueError(f"norm_type must be positive, got {order!r}")
    if order == math.inf:
        return _largest(parts, communicator)
    high, low, is_double = _sum_of_powers(parts, order)
    sums = communicator.all_gather_small(
        torch.tensor([high, low, float(is_double)], dtype=torch.float64), "the gradient norm"
    )
    high, low = _combine((float(row[0]), float(row[1])) for row in sums)
    norm = torch.tensor(_root(high + low, order), dtype=torch.float64)
    return norm.to(torch.float64 if sums[:, 2].any() else torch.float32)


def norms_of_sums(pairs: Tensor, communicator: Communicator) -> Tensor:
    """Return the 2-norm of each of P vectors, of which each rank holds the sum of squares of a part. All ranks call.

    Args:
        pairs: [P, 2] fp64 on the CPU, high and low halves.
    Returns:
        [P] fp64 CPU tensor. What is sent grows with P, not with the number of ranks.
    """
    totals = _sum_over_ranks(pairs, communicator)
    with numpy.errstate(invalid="ignore"):
        return torch.from_numpy(numpy.sqrt(totals))


def norms_of_parts(parts: Sequence[Tensor | None], order: float, communicator: Communicator) -> Tensor:
    """Return the norm of each of P vectors, of which each rank holds a part (None: nothing). All ranks call; blocks.

    Returns:
        [P] fp64 CPU tensor.
    """
    if order == math.inf:
        peaks = [float(part.abs().max()) if part is not None and part.numel() else 0.0 for part in parts]
        largest = torch.tensor(peaks, dtype=torch.float64)
        sent = torch.stack([largest.nan_to_num(nan=0.0, posinf=math.inf), largest.isnan().double()])
        agreed = communicator.agree(sent, "max", "the gradient norms")
        return torch.where(agreed[1] > 0, torch.nan, agreed[0])
    found = [(0.0, 0.0) if part is None else _sum_of_powers_in(part.detach().reshape(-1), order) for part in parts]
    totals = _sum_over_ranks(torch.tensor(found, dtype=torch.float64).view(-1, 2), communicator)
    return torch.tensor([_root(total, order) for total in totals.tolist()], dtype=torch.float64)


def _sum_over_ranks(pairs: Tensor, communicator: Communicator) -> numpy.ndarray:
    """Return the sums [P] of pairs [P, 2] >= 0 over all ranks, however they are spread over them. All ranks call."""
    if communicator.num_ranks == 1:
        return pairs.sum(1).numpy()
    high, low = pairs[:, 0].numpy(), pairs[:, 1].numpy()
    is_finite = numpy.isfinite(high)
    high, low = numpy.where(is_finite, high, 0.0), numpy.where(is_finite, low, 0.0)
    # A rank that holds nothing, or zeros, must not raise the unit: frexp gives zero the exponent 0.
    own = numpy.where(high == 0, _SMALLEST_EXPONENT, numpy.maximum(numpy.frexp(high)[1], _SMALLEST_EXPONENT))
    exponents = torch.from_numpy(own.astype(numpy.int64))
    exponent = communicator.agree(exponents, "max", "the size of the gradient norms").numpy()
    first = numpy.rint(numpy.ldexp(high, _LIMB_NBITS - exponent))
    rest = (high - numpy.ldexp(first, exponent - _LIMB_NBITS)) + low
    second = numpy.rint(numpy.ldexp(rest, 2 * _LIMB_NBITS - exponent))
    is_nan = pairs[:, 0].isnan().numpy()
    odd = numpy.where(is_finite, 0, numpy.where(is_nan, 1 << 32, 1))
    limbs = torch.from_numpy(
        numpy.stack([first.astype(numpy.int64), second.astype(numpy.int64), odd.astype(numpy.int64)])
    )
    first, second, odd = communicator.agree(limbs, "sum", "the gradient norms").numpy()
    carry = (second + (1 << (_LIMB_NBITS - 1))) >> _LIMB_NBITS  # one form for one sum
    first, second = first + carry, second - (carry << _LIMB_NBITS)
    rounded = first.astype(numpy.float64)
    missing = (first - rounded.astype(numpy.int64)) + numpy.ldexp(second.astype(numpy.float64), -_LIMB_NBITS)
    totals = numpy.ldexp(rounded + missing, exponent - _LIMB_NBITS)
    return numpy.where(odd == 0, totals, numpy.where(odd < 1 << 32, numpy.inf, numpy.nan))


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
