"""A case: one call of one operator, what it should give, and what became of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_shard.ops import Kernels


class Expected(NamedTuple):
    """What a result should be.

    Attributes:
        values: float64.
        limit: Largest error allowed.
        is_relative: Whether the error is divided by the magnitude (but at least a tenth of the mean magnitude).
    """

    values: Tensor
    limit: float
    is_relative: bool = True

    def error(self, actual: Tensor) -> float:
        """Return the largest error, inf where something is no number that should be one."""
        if actual.shape != self.values.shape:
            return math.inf
        if not actual.numel():
            return 0.0
        difference = (actual.double() - self.values).abs()
        if self.is_relative:
            magnitude = self.values.abs()
            quotient = difference / (magnitude + 0.1 * magnitude.mean())
            difference = torch.where(difference == 0, difference, quotient)
        return float(difference.nan_to_num(nan=math.inf).max())


Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One call of one operator.

    Attributes:
        op: The operator.
        name: The case, in words.
        arguments: In the order of the operator's schema; on the CPU, never changed.
        outputs: Which arguments the operator changes: name and position.
        expected: By name; empty where only bits are compared.
        read: Makes float64 values, by the names of ``expected``, of the outputs.
    """

    op: str
    name: str
    arguments: tuple[Any, ...]
    outputs: dict[str, int]
    expected: dict[str, Expected] = field(default_factory=dict)
    read: Callable[[Results], Results] = dict

    def run(self, kernels: Kernels, device: torch.device | str, num_misaligned: int = 0) -> Results:
        """Call the operator on ``device`` and return what it changed, on the CPU.

        Args:
            kernels: The operators.
            device: Where its tensors lie.
            num_misaligned: 1-d tensors start that many elements into their memory.
        """
        arguments = [_copy(argument, torch.device(device), num_misaligned) for argument in self.arguments]
        getattr(kernels, self.op)(*arguments)
        results: Results = {}
        for name, position in self.outputs.items():
            changed = arguments[position]
            if isinstance(changed, list):
                results |= {f"{name}[{number}]": each.cpu() for number, each in enumerate(changed)}
            else:
                results[name] = changed.cpu()
        return results


class Check(NamedTuple):
    """What became of a case.

    Attributes:
        error: The largest error against the reference, where it is nearest to, or farthest beyond, its limit.
        limit: What is allowed there.
        has_equal_bits: Whether the other form of the operators gave the same bits; None: there is no other.
        message: What was raised, or else empty.
    """

    op: str
    case: str
    error: float
    limit: float
    has_equal_bits: bool | None
    message: str = ""

    @property
    def is_passed(self) -> bool:
        """Whether all was as it should be."""
        return not self.message and self.error <= self.limit and self.has_equal_bits is not False

    def line(self) -> str:
        """Return what went wrong, in words."""
        what = self.message or f"largest error {self.error:.1e}, allowed {self.limit:.1e}"
        bits = "; other bits than the other form" if self.has_equal_bits is False else ""
        return f"{self.op} ({self.case}): {what}{bits}"


def check(case: Case, kernels: Kernels, device: torch.device | str, other: Results | None, shift: int = 0) -> Check:
    """Run a case and compare.

    Args:
        case: The case.
        kernels: The operators under test.
        device: Where they run.
        other: What another form of the operators gave, whose bits are expected; None: nothing to compare with.
        shift: See ``Case.run``.
    """
    try:
        results = case.run(kernels, device, shift)
    except Exception as error:  # whatever it is, the report goes on
        return Check(case.op, case.name, math.inf, 0.0, None, f"{type(error).__name__}: {error}")
    values = case.read(results)
    errors = [(expected.error(values[name]), expected.limit) for name, expected in case.expected.items()]
    worst = max(errors, key=lambda pair: pair[0] / pair[1] if pair[1] else pair[0] * math.inf, default=(0.0, 0.0))
    return Check(case.op, case.name, *worst, None if other is None else have_equal_bits(results, other))


def have_equal_bits(actual: Results, expected: Results) -> bool:
    """Return whether all results are the same; a NaN equals every NaN, and of a pair only the rounded sum counts."""
    return actual.keys() == expected.keys() and all(
        torch.equal(_bits(name, actual[name]), _bits(name, expected[name])) for name in expected
    )


def _bits(name: str, tensor: Tensor) -> Tensor:
    if name in ("sums", "total"):
        tensor = tensor[..., 0]
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def _copy(argument: Any, device: torch.device, num_misaligned: int) -> Any:
    if isinstance(argument, list):
        return [_copy(each, device, num_misaligned) for each in argument]
    if not isinstance(argument, Tensor):
        return argument
    if argument.dim() == 1 and argument.is_contiguous():
        room = torch.empty(argument.numel() + num_misaligned, dtype=argument.dtype, device=device)
        return room[num_misaligned:].copy_(argument)
    strided = torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=device)
    return strided.copy_(argument)
