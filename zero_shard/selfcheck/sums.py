"""Cases of ``quantize_``, ``reduce_slices_``, ``sum_squares_`` and ``sum_pairs_``."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from zero_shard.layout import BLOCK_NUMEL, SCALE_NBYTES, WIRE_BLOCK_NBYTES
from zero_shard.selfcheck.case import Case, Expected, Results
from zero_shard.selfcheck.inputs import FLOATS, WEIGHT_STEP, dtype_name, normal, segments
from zero_shard.wire_codec import dequantize, quantize

_SUM_LIMIT = 1e-15


def cases(numel: int, is_special: bool) -> Iterator[Case]:
    """Sum every dtype; only ``sum_pairs_`` has no special numbers."""
    for dtype in FLOATS:
        for accumulate in (False, True):
            yield _reduce_case(numel, dtype, accumulate, is_special)
        yield _sum_squares_case(numel, dtype, is_special)
        if dtype != torch.float64:
            yield _quantize_case(numel, dtype, is_special)
    yield _sum_pairs_case(numel)
    yield _reduce_wire_case(numel)


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


def _blocks(numel: int, dtype: torch.dtype, is_special: bool) -> Tensor:
    return normal(-(-numel // BLOCK_NUMEL) * BLOCK_NUMEL, dtype, 5, is_special)


def _quantize_case(numel: int, dtype: torch.dtype, is_special: bool) -> Case:
    """Decode what was written: an element is off by half a step of its block, one in 254 of the largest."""
    values = _blocks(numel, dtype, is_special)
    largest = values.double().abs().view(-1, BLOCK_NUMEL).amax(1, keepdim=True)
    ratio = (values.double().view(-1, BLOCK_NUMEL) / largest).view(-1)

    def read(results: Results) -> Results:
        return {"wire": (dequantize(results["wire"]).double().view(-1, BLOCK_NUMEL) / largest).view(-1)}

    return Case(
        op="quantize_",
        name=dtype_name(dtype),
        arguments=(torch.zeros(values.numel() // BLOCK_NUMEL * WIRE_BLOCK_NBYTES, dtype=torch.uint8), values),
        outputs={"wire": 0},
        expected={} if is_special else {"wire": Expected(ratio, 1.001 / 254, is_relative=False)},
        read=lambda results: results if is_special else read(results),
    )


def _reduce_wire_case(numel: int) -> Case:
    """Reduce one slice, which decodes it."""
    values = _blocks(numel, torch.float32, False)
    wire = torch.empty(values.numel() // BLOCK_NUMEL * WIRE_BLOCK_NBYTES, dtype=torch.uint8)
    blocks = wire.view(-1, WIRE_BLOCK_NBYTES)
    scales, codes = quantize(values)
    blocks[:, :SCALE_NBYTES], blocks[:, SCALE_NBYTES:] = scales[:, None].view(torch.uint8), codes.view(torch.uint8)
    exact = (scales.double()[:, None] * codes).view(-1)
    return Case(
        op="reduce_slices_",
        name="blocks of 8 bits",
        arguments=(torch.full_like(values, math.nan), wire.view(1, -1), 1, False, None, None),
        outputs={"out": 0},
        expected={"out": Expected(exact, WEIGHT_STEP[torch.float32])},
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
