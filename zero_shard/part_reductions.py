"""Tensors of which each rank holds a part, reduced to one number: what each rank says of its part, and of all that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]


def _sum(values: Tensor) -> Tensor:
    return values.sum(0, dtype=torch.float64)


def _amax(values: Tensor) -> Tensor:
    return values.amax(0)


def _amin(values: Tensor) -> Tensor:
    return values.amin(0)


def _or_least(reduce: Reduce, least: float) -> Reduce:
    return lambda part: reduce(part) if part.numel() else torch.tensor(least, device=part.device)


# By the name of torch's operator: of a part [n], possibly empty, and of what the W ranks say [W, k] in fp64.
REDUCTIONS: dict[str, tuple[Reduce, Reduce]] = {
    "sum": (_sum, _sum),
    "mean": (_sum, _sum),  # to be divided by the number of elements
    "nansum": (lambda part: part.nansum(dtype=torch.float64), _sum),
    "prod": (lambda part: part.prod(dtype=torch.float64), lambda values: values.prod(0)),
    "count_nonzero": (torch.count_nonzero, _sum),
    "any": (torch.any, _amax),
    "all": (torch.all, _amin),
    "max": (_or_least(_amax, -math.inf), _amax),
    "amax": (_or_least(_amax, -math.inf), _amax),
    "min": (_or_least(_amin, math.inf), _amin),
    "amin": (_or_least(_amin, math.inf), _amin),
}


def reduce_parts(kind: str, parts: Sequence[Tensor], from_all_ranks: Reduce) -> Tensor:
    """Return [k] fp64: k tensors, each reduced to one number. All ranks call.

    Args:
        kind: A key of ``REDUCTIONS``.
        parts: k parts of this rank, no element of which another rank counts too.
        from_all_ranks: Takes [k] of each rank to [W, k]; communicates.
    """
    of_part, of_ranks = REDUCTIONS[kind]
    return of_ranks(from_all_ranks(torch.stack([of_part(part).double() for part in parts])))
