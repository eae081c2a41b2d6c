"""Rectangles: a range of a tensor's memory as boxes of its true shape. Integer geometry only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Rectangle(NamedTuple):
    """A box of an n-d tensor that is one run of its memory."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # of the run, in elements from the start of the tensor's memory


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    """Cut the elements [start, stop) of a row-major tensor into boxes: part of a first row, whole rows, part of a last.

    For n dimensions at most 2 n - 1 boxes.
    """
    if start >= stop:
        return
    if not shape:
        yield Rectangle((), (), start)
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # all within one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, min(first * inner, stop))
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Rectangle((first, *zeros), (last - first, *shape[1:]), first * inner)
    yield from _in_row(shape, last, max(last * inner, start), stop)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Rectangle]:
    base = row * math.prod(shape[1:])
    for box in rectangles(shape[1:], start - base, stop - base):
        yield Rectangle((row, *box.offsets), (1, *box.sizes), base + box.start)
