"""Cases of ``reduce_slices_``, ``sum_squares_`` and ``sum_pairs_``."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from zero_shard.selfcheck.case import Case, Expected, Results
from zero_shard.selfcheck.inputs import FLOATS, WEIGHT_STEP, dtype_name, normal, segments

_SUM_LIMIT = 1e-15


def cases(numel: int, is_special: bool) -> Iterator[Case]:
    """Sum every dtype; only ``sum_pairs_`` has no special numbers."""
    for dtype in FLOATS:
        for accumulate in (False, True):
            yield _reduce_case(numel, dtype, accumulate, is_special)
        yield _sum_squares_case(numel, dtype, is_special)
    yield _sum_pairs_case(numel)


def _with_sums(results: Results, out: Tensor, table: list[list[int]]) -> Results:
    """Divide each sum by the exact one of what was written."""
    exact = [math.fsum((out[start : start + numel].double() ** 2).tolist()) for start, numel, _, _ in table]
    sums = results["sums"].sum(1)
    ratios = []
    for have, want in zip(sums.tolist(), exact, strict=True):
        ratios.append(1.0 if have == want else have / want if want else math.inf)
    return {**results, "sums": torch.tensor(ratios, dtype=torch.float64)}


def _reduce_case(numel: int, dtype: torch.dtype, accumulate: bool, is_special: bool) -> Case:
    wide, divisor = torch.float64 if dtype == torch.float64 else torch.float32, 3
    slices = torch.stack([normal(numel, dtype, seed, is_special) for seed in range(4)])
    before, table = normal(numel, wide, 4), segments(numel)
    total = slices.double().sum(0) / divisor + (before.double() if accumulate else 0.0)
    # Each of five additions may be off by half a step of a sum that is larger than the result.
    limit = 64 * WEIGHT_STEP[wide]
    ones = torch.ones(len(table), dtype=torch.float64)
    return Case(
        op="reduce_slices_",
        name=dtype_name(dtype) + (", added" if accumulate else ""),
        arguments=(
            *(before, slices, divisor, accumulate),
            *(torch.tensor(table), torch.full((len(table), 2), math.nan, dtype=torch.float64)),
        ),
        outputs={"out": 0, "sums": 5},
        expected={} if is_special else {"out": Expected(total, limit), "sums": Expected(ones, _SUM_LIMIT)},
        read=lambda results: results if is_special else _with_sums(results, results["out"], table),
    )


def _sum_squares_case(numel: int, dtype: torch.dtype, is_special: bool) -> Case:
    values, table = normal(numel, dtype, 1, is_special), segments(numel)
    cut = table[1][0]
    held = values.clone()
    held[cut : cut + 1] = 0  # in no tensor
    return Case(
        op="sum_squares_",
        name=dtype_name(dtype),
        arguments=(
            torch.full((len(table), 2), math.nan, dtype=torch.float64),
            *([values[:cut], values[cut + 1 :], values[:0]], [0, min(cut + 1, numel), numel]),
            *(numel, torch.tensor(table)),
        ),
        outputs={"sums": 0},
        expected={} if is_special else {"sums": Expected(torch.ones(len(table), dtype=torch.float64), _SUM_LIMIT)},
        read=lambda results: results if is_special else _with_sums(results, held, table),
    )


def _sum_pairs_case(numel: int) -> Case:
    pairs = torch.stack([normal(numel, torch.float64, 1), normal(numel, torch.float64, 2) * 1e-17], 1)
    exact = torch.tensor([math.fsum(pairs.flatten().tolist())], dtype=torch.float64)
    return Case(
        op="sum_pairs_",
        name="float64",
        arguments=(torch.full((2,), math.nan, dtype=torch.float64), pairs),
        outputs={"total": 0},
        expected={"total": Expected(exact, _SUM_LIMIT)},
        read=lambda results: {"total": results["total"].sum(0, keepdim=True)},
    )
