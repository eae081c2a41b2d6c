"""Arguments for the operators, references to compare with, and comparisons bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from zero_shard import ops, twins

needs_native = pytest.mark.skipif(ops.missing_reason("cpu") is not None, reason=str(ops.missing_reason("cpu")))
KERNEL_FORMS = ["torch"] if ops.missing_reason("cpu") else ["torch", "native"]
each_form = pytest.mark.parametrize("form", KERNEL_FORMS)

SIZES = (0, 1, 3, 17, 255, 256, 257, 4099)
LARGE = (1 << 20) + 1
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BLOCK_NUMEL = 256


class Scheme(NamedTuple):
    """How a weight and its moments are stored."""

    param: torch.dtype
    low: torch.dtype | None = None
    moments: torch.dtype = torch.float32
    is_stochastic: bool = False

    @property
    def compute(self) -> torch.dtype:
        return torch.float64 if self.param == torch.float64 else torch.float32

    @property
    def has_codes(self) -> bool:
        return self.moments == torch.int8


_WEIGHTS = {
    "fp32": Scheme(torch.float32),
    "bf16": Scheme(torch.bfloat16),
    "bf16_remainder": Scheme(torch.bfloat16, torch.int16),
    "bf16_stochastic": Scheme(torch.bfloat16, is_stochastic=True),
    "fp16": Scheme(torch.float16),
    "fp16_master": Scheme(torch.float16, torch.float32),
}
SCHEMES = {
    **_WEIGHTS,
    "fp64": Scheme(torch.float64, moments=torch.float64),
    **{f"{name}_bf16_moments": scheme._replace(moments=torch.bfloat16) for name, scheme in _WEIGHTS.items()},
    **{f"{name}_int8": scheme._replace(moments=torch.int8) for name, scheme in _WEIGHTS.items()},
}
GROUPS = [
    # lr, beta1, beta2, eps, weight_decay, is_amsgrad, is_maximize
    [1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 0],
    [3e-3, 0.4, 0.95, 1e-6, 0.0, 0, 1],  # beta1 below one half takes the other branch of lerp
    [0.0, 0.99, 0.999, 1e-8, 0.1, 0, 0],  # random bits decide for all first moments of 8 bits
    [1e-2, 0.0, 0.0, 1e-8, 0.1, 1, 0],
]
_SPECIAL_TEXT = "0 -0 inf -inf nan 1e-45 -1e-40 1.1754942e-38 3.4028235e38 -3.39e38 1 -1"
SPECIAL_VALUES = [float(text) for text in _SPECIAL_TEXT.split()]
# Around the limits of float16, and halfway between two 16-bit numbers.
SPECIAL_VALUES += [65504.0, 65519.9, 65520.0, 65536.0, 2.0**-14, 2.0**-24, 2.0**-25, 2.98e-8, 6.09e-5]
SPECIAL_VALUES += [1.00390625, 1.01171875, 1.0 + 2**-11, 1.0 + 3 * 2**-11]


@dataclass(frozen=True)
class Step:
    """The arguments of one adamw_ call."""

    param: Tensor
    low: Tensor | None
    grads: list[Tensor]
    grad_offsets: list[int]
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    exp_avg_scale: Tensor | None
    exp_avg_sq_scale: Tensor | None
    segments: Tensor
    slot_steps: Tensor
    slot_is_active: Tensor
    slot_groups: Tensor
    slot_numbers: Tensor
    group_hyper: Tensor
    grad_scale: Tensor | None
    found_inf: Tensor | None
    stochastic: bool

    def arguments(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]

    @property
    def grad(self) -> Tensor:
        """The gradient of the whole shard, [N]; an alias where it is one tensor."""
        if len(self.grads) == 1:
            return self.grads[0]
        flat = torch.zeros(self.param.numel(), dtype=self.grads[0].dtype)
        for grad, offset in zip(self.grads, self.grad_offsets, strict=True):
            flat[offset : offset + grad.numel()] = grad.flatten()
        return flat

    def mutated(self) -> dict[str, Tensor]:
        names = ("param", "low", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def clone(self, num_misaligned: int = 0) -> Step:
        """Copy everything; flat tensors start ``num_misaligned`` elements into their storage."""

        def copy(value: Any) -> Any:
            if isinstance(value, list):
                return [copy(each) for each in value]
            if not isinstance(value, Tensor):
                return value
            if value.dim() != 1:
                return value.clone()
            return torch.cat([value.new_zeros(num_misaligned), value])[num_misaligned:]

        return Step(*(copy(value) for value in self.arguments()))

    def to(self, device: str) -> Step:
        """Copy everything to a device."""

        def move(value: Any) -> Any:
            if isinstance(value, list):
                return [move(each) for each in value]
            return value.to(device, copy=True) if isinstance(value, Tensor) else value

        return Step(*(move(value) for value in self.arguments()))

    def with_split_grads(self) -> Step:
        """The same gradient as one tensor for each segment, empty ones between, before and after them."""
        grad, grads, offsets = self.grad, [], []
        for start, numel, *_ in [(0, 0), *self.segments.tolist(), (self.param.numel(), 0)]:
            grads += [grad[start : start + numel].clone(), grad[:0]]
            offsets += [start, start + numel]
        return replace(self, grads=grads, grad_offsets=offsets)

    def master(self) -> Tensor:
        """The weight with all its digits, [N]."""
        if self.low is None:
            return self.param
        return self.low if self.low.is_floating_point() else twins.join_remainder(self.param, self.low)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Both moments as numbers."""
        if self.exp_avg_scale is None or self.exp_avg_sq_scale is None:
            return self.exp_avg, self.exp_avg_sq
        return decoded(self.exp_avg, self.exp_avg_scale), decoded(self.exp_avg_sq, self.exp_avg_sq_scale)


def make_step(
    numel: int,
    scheme: str = "fp32",
    *,
    has_max: bool = True,
    scale: float | None = None,
    seed: int = 0,
    has_param_grads: bool = False,
) -> Step:
    """A shard of ``numel`` elements in several segments, with gaps, an inactive slot and four groups.

    Args:
        scheme: A key of ``SCHEMES``.
        has_max: One of the groups asks for amsgrad (never beside 8-bit moments).
        scale: What the gradient is multiplied by.
        has_param_grads: The gradient has the dtype of the weight.
    """
    kind = SCHEMES[scheme]
    random = torch.Generator().manual_seed(seed)
    has_max = has_max and not kind.has_codes

    def normal(factor: float = 1.0) -> Tensor:
        values = torch.randn(numel, generator=random, dtype=torch.float64) * factor
        return values * torch.exp(torch.randn(numel, generator=random, dtype=torch.float64))

    master = normal().to(torch.float32)
    low = None
    param = normal().to(kind.param)
    if kind.low == torch.int16:
        param, low = twins.split_remainder(master)
    elif kind.low == torch.float32:
        param, low = master.half(), master
    grad = normal(0.1).to(kind.param if has_param_grads else kind.compute)
    exp_avg, exp_avg_sq, largest = normal(0.1), normal(0.1).square(), normal(0.1).square()
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if kind.has_codes:
        (exp_avg, first), (exp_avg_sq, second) = (
            twins.encode_blocks(exp_avg.float(), True),
            twins.encode_blocks(exp_avg_sq.float(), False),
        )
        scales = (first, second)
    else:
        exp_avg, exp_avg_sq = exp_avg.to(kind.moments), exp_avg_sq.to(kind.moments)
    segments, num_slots = _make_segments(numel, kind.has_codes, random)
    is_active = torch.ones(num_slots, dtype=torch.uint8)
    is_active[2] = 0
    hyper = torch.tensor(GROUPS, dtype=torch.float64)
    if not has_max:
        hyper[:, 5] = 0
    return Step(
        param=param,
        low=low,
        grads=[grad],
        grad_offsets=[0],
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        max_exp_avg_sq=largest.to(kind.moments) if has_max else None,
        exp_avg_scale=scales[0],
        exp_avg_sq_scale=scales[1],
        segments=segments,
        slot_steps=torch.tensor([1.0, 2.0, 3.0, 1e6, 7.0, 1000.0] * 3)[:num_slots],
        slot_is_active=is_active,
        slot_groups=torch.arange(num_slots, dtype=torch.int32) % len(GROUPS),
        slot_numbers=torch.arange(num_slots) * 1000003,
        group_hyper=hyper,
        grad_scale=None if scale is None else torch.tensor(scale, dtype=torch.float64),
        found_inf=None,
        stochastic=kind.is_stochastic,
    )


def _make_segments(numel: int, is_aligned: bool, random: torch.Generator) -> tuple[Tensor, int]:
    """Segments of which some are empty, one is missing, and one counts past 2^32 elements of its parameter."""
    unit = BLOCK_NUMEL if is_aligned else 1
    cuts = sorted((torch.randint(0, numel // unit + 1, (12,), generator=random) * unit).tolist())
    bounds = list(itertools.pairwise([0, *cuts, numel]))
    rows = []
    for slot, (start, stop) in enumerate(bounds):
        length = max(stop - start - 3, 0) if slot % 5 == 1 else stop - start  # a gap; the last block is not full
        param_start = {0: (1 << 32) - unit, 1: (1 << 33) + 16 * unit}.get(slot % 3, 1000 * unit)
        if slot != 4:
            rows.append([start, length, slot, param_start])
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4), len(bounds)


def make_single(numel: int, scheme: str = "fp32", hyper: list[float] | None = None, step: float = 3.0) -> Step:
    """The same with one segment that covers the shard, the start of parameter 0."""
    return with_segments(make_step(numel, scheme), [[0, numel, 0, 0]], hyper, [step])


def with_segments(
    step: Step, rows: list[list[int]], hyper: list[float] | None = None, steps: Sequence[float] = ()
) -> Step:
    """The same shard, all of one group, in other segments; one slot for each entry of ``steps``."""
    num_slots = len(steps)
    row = list(hyper or GROUPS[0])
    if step.max_exp_avg_sq is None:
        row[5] = 0
    return replace(
        step,
        segments=torch.tensor(rows, dtype=torch.int64).view(-1, 4),
        slot_steps=torch.tensor(steps, dtype=torch.float32),
        slot_is_active=torch.ones(num_slots, dtype=torch.uint8),
        slot_groups=torch.zeros(num_slots, dtype=torch.int32),
        slot_numbers=torch.arange(num_slots),
        group_hyper=torch.tensor([row], dtype=torch.float64),
    )


def slice_step(step: Step, start: int, stop: int) -> Step:
    """Elements start to stop of a shard that is the start of one parameter, as a shard of its own."""
    blocks = slice(start // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))
    values: dict[str, Any] = {
        name: tensor[blocks if name.endswith("_scale") else slice(start, stop)].clone()
        for name, tensor in step.mutated().items()
    }
    segments = torch.tensor([[0, stop - start, 0, start]])
    return replace(step, **values, grads=[step.grad[start:stop].clone()], grad_offsets=[0], segments=segments)


# --- references -------------------------------------------------------------------------------------------


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """8-bit moments in float64, from the definition: level L of 128 is (L / 128)^2, of 256 (L / 256)^4."""
    magnitude = codes.double().abs()
    level = torch.where(magnitude == 0, 0.0, magnitude + 1)
    value = (level / 128) ** 2 if codes.dtype == torch.int8 else (level / 256) ** 4
    spread = scales.double().repeat_interleave(BLOCK_NUMEL)[: codes.numel()]
    return torch.where(codes.double() < 0, -value, value) * spread


def reference_adamw(step: Step) -> dict[str, Tensor]:
    """The textbook update in float64, written from the paper and not from the code under test."""
    mean, square = step.moments()
    result = {"param": step.master().double(), "exp_avg": mean.double(), "exp_avg_sq": square.double()}
    result = {name: tensor.clone() for name, tensor in result.items()}
    if step.max_exp_avg_sq is not None:
        result["max_exp_avg_sq"] = step.max_exp_avg_sq.double()
    for start, numel, slot, _ in step.segments.tolist():
        if not step.slot_is_active[slot]:
            continue
        lr, beta1, beta2, eps, decay, amsgrad, maximize = step.group_hyper[step.slot_groups[slot]].tolist()
        at, count = slice(start, start + numel), step.slot_steps[slot].item()
        grad = step.grad[at].double() * (1.0 if step.grad_scale is None else step.grad_scale.item())
        grad = -grad if maximize else grad
        result["exp_avg"][at] = beta1 * result["exp_avg"][at] + (1 - beta1) * grad
        result["exp_avg_sq"][at] = beta2 * result["exp_avg_sq"][at] + (1 - beta2) * grad**2
        square = result["exp_avg_sq"][at]
        if amsgrad:
            square = result["max_exp_avg_sq"][at] = torch.maximum(result["max_exp_avg_sq"][at], square)
        update = (result["exp_avg"][at] / (1 - beta1**count)) / ((square / (1 - beta2**count)).sqrt() + eps)
        result["param"][at] = result["param"][at] * (1 - lr * decay) - lr * update
    return result


# --- bits -------------------------------------------------------------------------------------------------


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, with one pattern for every NaN: its payload is no part of the promise."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return tensor.contiguous().view(integer)


def assert_same_bits(actual: Tensor, expected: Tensor, name: str = "tensor") -> None:
    assert actual.dtype == expected.dtype
    different = (bits(actual) != bits(expected)).nonzero()
    if len(different):
        first = tuple(different[0].tolist())
        raise AssertionError(f"{name}: {len(different)} differ, first at {first}: {actual[first]} {expected[first]}")


def assert_same_step(actual: Step, expected: Step, name: str = "") -> None:
    for each, tensor in actual.mutated().items():
        assert_same_bits(tensor, expected.mutated()[each], f"{name} {each}".strip())


# --- the compiled operators -------------------------------------------------------------------------------


def native() -> Any:
    return torch.ops.zero_shard


def instruction_sets() -> Iterator[str]:
    """Go through the instruction sets that this machine and build have, each forced while it is the present one."""
    try:
        for name in ("avx512", "avx2", "scalar"):
            try:
                native().force_cpu_instruction_set(name)
            except RuntimeError:
                continue
            yield name
    finally:
        native().force_cpu_instruction_set("")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
