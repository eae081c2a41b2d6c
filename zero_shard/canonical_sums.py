"""Sums of squares that do not depend on who adds them, in pure PyTorch: the counterpart of ``csrc/pair_sum.h``.

See Note [Canonical chunks] there. The partials of a chunk's lanes are formed in the same order; what follows is exact
here (``math.fsum``) and error-free to about 106 bits there, so the rounded sums are equal.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NUM_LANES = 16
_CHUNK_NUMEL = 256  # float64: NUM_LANES
# Elements that are squared at once; bounds the temporaries, a multiple of both chunk lengths.
_WINDOW_NUMEL = 1 << 20

Pair = tuple[float, float]  # high + low, unevaluated


class _Span(NamedTuple):
    """A part of a segment that lies in one window."""

    segment: int
    start: int  # in the shard
    numel: int
    offset: int  # in the window


def add_pairs(values: Sequence[float]) -> Pair:
    """Return the rounded sum, and what the rounding lost; (inf or NaN, 0) where it is not finite."""
    try:
        high = math.fsum(values)
    except (OverflowError, ValueError):  # past the largest float64; inf - inf
        high = sum(values)
    return (high, math.fsum((*values, -high))) if math.isfinite(high) else (high, 0.0)


def sum_squares_by_segment(tensors: Sequence[Tensor], offsets: Sequence[int], table: list[list[int]]) -> list[Pair]:
    """Return the sum of squares of each segment.

    Args:
        tensors: 1-d parts of the shard, ascending and disjoint; what they do not cover counts as 0.
        offsets: Where each begins in the shard.
        table: Rows of start, numel, slot, param_start.
    """
    sums = [(0.0, 0.0)] * len(table)
    if not tensors:
        return sums
    chunk_numel = NUM_LANES if tensors[0].dtype == torch.float64 else _CHUNK_NUMEL
    for window, numel in _windows(table, chunk_numel):
        values = torch.zeros(numel, dtype=torch.float64, device=tensors[0].device)
        for span in window:
            _fill(values[span.offset : span.offset + span.numel], span.start, tensors, offsets)
        partials = _lane_sums(values.mul_(values), chunk_numel).tolist()
        for span in window:
            first = span.offset // chunk_numel * NUM_LANES
            last = -(-(span.offset + span.numel) // chunk_numel) * NUM_LANES
            sums[span.segment] = add_pairs((*sums[span.segment], *partials[first:last]))
    return sums


def _windows(table: list[list[int]], chunk_numel: int) -> Iterator[tuple[list[_Span], int]]:
    """Lay the segments out one after the other, each element at its place in its chunk; cut that into windows."""
    window: list[_Span] = []
    used = 0
    for segment, (start, numel, _, param_start) in enumerate(table):
        done = 0
        while done < numel:
            if used == _WINDOW_NUMEL:
                yield window, used
                window, used = [], 0
            offset = used + (param_start + done) % chunk_numel
            part = min(numel - done, _WINDOW_NUMEL - offset)
            window.append(_Span(segment, start + done, part, offset))
            done += part
            used = -(-(offset + part) // chunk_numel) * chunk_numel
    if window:
        yield window, used


def _fill(target: Tensor, start: int, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Copy what the tensors hold of the shard from ``start`` on."""
    stop = start + target.numel()
    for index in range(max(bisect_right(offsets, start) - 1, 0), len(tensors)):
        offset, tensor = offsets[index], tensors[index]
        if offset >= stop:
            break
        first, last = max(start, offset), min(stop, offset + tensor.numel())
        if first < last:
            target[first - start : last - start].copy_(tensor[first - offset : last - offset])


def _lane_sums(squares: Tensor, chunk_numel: int) -> Tensor:
    """Fold each chunk by halves until its lanes are left."""
    folded = squares.view(-1, chunk_numel)
    while folded.shape[1] > NUM_LANES:
        half = folded.shape[1] // 2
        folded = folded[:, :half] + folded[:, half:]
    return folded.flatten()
