"""Cases of ``flatten_`` and ``unflatten_``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero_shard.selfcheck.case import Case, Expected
from zero_shard.selfcheck.inputs import FLOATS, WEIGHT_STEP, dtype_name, normal


def cases(numel: int, is_special: bool) -> Iterator[Case]:
    """Copy and cast between every dtype, with a factor and without."""
    for dtype in FLOATS:
        for scale in (None, 0.3):
            yield _flatten_case(numel, dtype, scale, is_special)
            yield _unflatten_case(numel, dtype, scale, is_special)


def _tensors(numel: int, is_special: bool) -> tuple[list[Tensor], list[int], int]:
    """Return tensors of every dtype and many strides with about N elements in all, their offsets, and the end."""
    count = -(-numel // 24)
    tensors: list[Tensor] = []
    for seed, dtype in enumerate(FLOATS if numel else ()):
        values = normal(6 * count, dtype, seed, is_special)
        tensors += [values.view(2, 3, count).permute(1, 2, 0), values.view(-1, 3)[:, ::2], values.view(3, -1).t()]
        tensors += [values[:0], values[: numel % 24], values[-1]]
    tensors.append(torch.zeros(0))
    offsets, end = [], 0
    for number, each in enumerate(tensors):
        end += number % 3  # gaps
        offsets.append(end)
        end += each.numel()
    return tensors, offsets, end + 2


def _cast_limit(sources: Sequence[torch.dtype], target: torch.dtype, scale: float | None) -> float:
    """Return the relative error of a cast: half a step of the target's, and of the product's, last place."""
    wide = torch.float64 if torch.float64 in (*sources, target) else torch.float32
    return 0.51 * (WEIGHT_STEP[target] + (0.0 if scale is None else 2 * WEIGHT_STEP[wide])) + 2.0**-24


def _flatten_case(numel: int, dtype: torch.dtype, scale: float | None, is_special: bool) -> Case:
    tensors, offsets, end = _tensors(numel, is_special)
    expected = torch.zeros(end, dtype=torch.float64)
    factor = None if scale is None else torch.tensor(scale)
    for each, offset in zip(tensors, offsets, strict=True):
        product = each.double() * (1.0 if factor is None else factor.double())
        expected[offset : offset + each.numel()] = product.reshape(-1)
    return Case(
        op="flatten_",
        name=f"into {dtype_name(dtype)}" + ("" if scale is None else ", scaled"),
        arguments=(torch.full((end,), math.nan, dtype=dtype), tensors, offsets, factor),
        outputs={"flat": 0},
        expected={} if is_special else {"flat": Expected(expected, _cast_limit(FLOATS, dtype, scale))},
    )


def _unflatten_case(numel: int, dtype: torch.dtype, scale: float | None, is_special: bool) -> Case:
    tensors, offsets, end = _tensors(numel, False)
    flat = normal(end, dtype, 7, is_special)
    factor = None if scale is None else torch.tensor(scale)
    expected: dict[str, Expected] = {}
    for number, (each, offset) in enumerate(() if is_special else zip(tensors, offsets, strict=True)):
        product = flat[offset : offset + each.numel()].double() * (1.0 if factor is None else factor.double())
        expected[f"tensors[{number}]"] = Expected(product.view(each.shape), _cast_limit([dtype], each.dtype, scale))
    return Case(
        op="unflatten_",
        name=f"from {dtype_name(dtype)}" + ("" if scale is None else ", scaled"),
        arguments=(tensors, flat, offsets, factor),
        outputs={"tensors": 0},
        expected=expected,
    )
