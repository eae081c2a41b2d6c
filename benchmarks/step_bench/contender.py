"""What is timed: some state, and the ways to step it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from step_bench.workload import Workload

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_NORM = 1.0
SAMPLE_NUMEL = 100_000
"""How many of the first weights are compared."""


class Variant(NamedTuple):
    """One thing that is timed.

    Attributes:
        call: One step.
        nbytes: Bytes per parameter that it has to move; None: not known.
        clipping: How the gradient is clipped before, in words; empty: it is not.
        prepare: What comes before each call and is not timed.
    """

    call: Callable[[], object]
    nbytes: float | None
    clipping: str = ""
    prepare: Callable[[], object] = lambda: None


@dataclass
class Contender:
    """Some state and the ways to step it.

    Attributes:
        variants: The first is the first call of all, and its result is compared.
        sample: Returns the first weights, fp32; None: nothing to compare.
        moment_nbytes: Bytes of the moments, all together, after the first step.
    """

    variants: list[Variant]
    sample: Callable[[], Tensor] | None = None
    moment_nbytes: Callable[[], int] = lambda: 0

    @classmethod
    def of_optimizer(
        cls, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], variants: list[Variant]
    ) -> Contender:
        """Make one that is compared by its parameters, and whose moments the optimizer holds."""
        return cls(variants, lambda: _first_weights(params), lambda: _state_nbytes(optimizer))


class Entry(NamedTuple):
    """A line or more of the table: the name of a kernel, and what builds it."""

    name: str
    build: Callable[[Workload], Contender]


def _first_weights(params: Sequence[Tensor]) -> Tensor:
    parts, numel = [], 0
    for param in params:
        parts.append(param.detach().reshape(-1)[: SAMPLE_NUMEL - numel].float())
        numel += parts[-1].numel()
        if numel >= SAMPLE_NUMEL:
            break
    return torch.cat(parts)


def _state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state but for step counts and masters; of a tensor subclass, those of its parts."""
    total = 0
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and name != "param":
                attributes = getattr(type(value), "tensor_attrs", ())
                parts = [getattr(value, attribute) for attribute in attributes] if attributes else [value]
                total += sum(part.nbytes for part in parts)
    return total
