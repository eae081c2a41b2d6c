"""Small cases for every operator: against float64 references, and one form of the operators against another.

``zero-shard doctor`` runs them once, ``benchmarks/gpu_check.py`` over many sizes on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from zero_shard.selfcheck import adamw, copies, sums
from zero_shard.selfcheck.case import Case

NUMEL = 4099
"""Length of a case unless told: several threads, blocks and chunks, and a tail after each."""


def cases(numel: int = NUMEL, is_special: bool = False) -> Iterator[Case]:
    """Make the cases of all operators.

    Args:
        numel: Elements N of a shard.
        is_special: Put zeros, NaN, inf, and the largest and smallest numbers into the inputs; without references.
    """
    for operators in (copies, sums, adamw):
        yield from operators.cases(numel, is_special)
