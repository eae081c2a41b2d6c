"""The operators: against float64 references, and the compiled ones against their twins bit for bit."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_shard import ops, twins

needs_native = pytest.mark.skipif(ops.missing_reason("cpu") is not None, reason=str(ops.missing_reason("cpu")))

SIZES = (0, 1, 3, 17, 255, 256, 257, 4099)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# (dtype of the weight, dtype of what is stored beside it, dtype of the moments)
SCHEMES = {
    "fp32": (torch.float32, None, torch.float32),
    "fp32_bf16_moments": (torch.float32, None, torch.bfloat16),
    "fp64": (torch.float64, None, torch.float64),
    "bf16": (torch.bfloat16, None, torch.float32),
    "bf16_bf16_moments": (torch.bfloat16, None, torch.bfloat16),
    "bf16_remainder": (torch.bfloat16, torch.int16, torch.float32),
    "bf16_remainder_bf16_moments": (torch.bfloat16, torch.int16, torch.bfloat16),
    "fp16": (torch.float16, None, torch.float32),
    "fp16_bf16_moments": (torch.float16, None, torch.bfloat16),
    "fp16_master": (torch.float16, torch.float32, torch.float32),
    "fp16_master_bf16_moments": (torch.float16, torch.float32, torch.bfloat16),
}
GROUPS = [
    # lr, beta1, beta2, eps, weight_decay, is_amsgrad, is_maximize
    [1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 0],
    [3e-3, 0.4, 0.95, 1e-6, 0.0, 0, 1],  # beta1 below one half takes the other branch of lerp
    [0.0, 0.9, 0.999, 1e-8, 0.1, 0, 0],
    [1e-2, 0.0, 0.0, 1e-8, 0.1, 1, 0],
]
SPECIAL_TEXT = "0 -0 inf -inf nan 1e-45 -1e-40 1.1754942e-38 3.4028235e38 -3.39e38 1 -1"
SPECIAL_VALUES = [float(text) for text in SPECIAL_TEXT.split()]
# Around the limits of float16, and halfway between two 16-bit numbers.
SPECIAL_VALUES += [65504.0, 65519.9, 65520.0, 65536.0, 2.0**-14, 2.0**-24, 2.0**-25, 2.98e-8, 6.09e-5]
SPECIAL_VALUES += [1.00390625, 1.01171875, 1.0 + 2**-11, 1.0 + 3 * 2**-11]


@dataclass(frozen=True)
class Step:
    """The arguments of one adamw_ call."""

    param: Tensor
    low: Tensor | None
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    segments: Tensor
    slot_steps: Tensor
    slot_is_active: Tensor
    slot_groups: Tensor
    group_hyper: Tensor
    grad_scale: Tensor | None

    def arguments(self) -> list[Tensor | None]:
        return list(self.__dict__.values())

    def mutated(self) -> dict[str, Tensor]:
        names = ("param", "low", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def clone(self, num_misaligned: int = 0) -> Step:
        """Copy everything; the shard's tensors start ``num_misaligned`` elements into their storage."""

        def copy(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or tensor.dim() != 1:
                return None if tensor is None else tensor.clone()
            return torch.cat([tensor.new_zeros(num_misaligned), tensor])[num_misaligned:]

        return Step(*(copy(tensor) for tensor in self.arguments()))  # type: ignore[arg-type]


def make_step(
    numel: int, scheme: str = "fp32", *, has_max: bool = True, scale: float | None = None, seed: int = 0
) -> Step:
    """A shard of ``numel`` elements in several segments, with a gap, an inactive slot and four groups."""
    dtype, low_dtype, moment_dtype = SCHEMES[scheme]
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    random = torch.Generator().manual_seed(seed)

    def normal(factor: float = 1.0) -> Tensor:
        values = torch.randn(numel, generator=random, dtype=torch.float64) * factor
        return values * torch.exp(torch.randn(numel, generator=random, dtype=torch.float64))

    master = normal().to(torch.float32)
    low = None
    param = normal().to(dtype)
    if low_dtype == torch.int16:
        param, low = twins.split_remainder(master)
    elif low_dtype == torch.float32:
        param, low = master.half(), master
    cuts = sorted(torch.randint(0, numel + 1, (12,), generator=random).tolist())
    bounds = list(itertools.pairwise([0, *cuts, numel]))
    segments = [[start, stop - start, slot] for slot, (start, stop) in enumerate(bounds) if slot != 4]
    num_slots = len(bounds)
    is_active = torch.ones(num_slots, dtype=torch.uint8)
    is_active[2] = 0
    hyper = torch.tensor(GROUPS, dtype=torch.float64)
    if not has_max:
        hyper[:, 5] = 0
    return Step(
        param=param,
        low=low,
        grad=normal(0.1).to(compute),
        exp_avg=normal(0.1).to(moment_dtype),
        exp_avg_sq=normal(0.1).square().to(moment_dtype),
        max_exp_avg_sq=normal(0.1).square().to(moment_dtype) if has_max else None,
        segments=torch.tensor(segments, dtype=torch.int64).reshape(-1, 3),
        slot_steps=torch.tensor([1.0, 2.0, 3.0, 1e6, 7.0, 1000.0] * 3)[:num_slots],
        slot_is_active=is_active,
        slot_groups=torch.arange(num_slots, dtype=torch.int32) % len(GROUPS),
        group_hyper=hyper,
        grad_scale=None if scale is None else torch.tensor(scale, dtype=torch.float64),
    )


def make_single(numel: int, scheme: str = "fp32", hyper: list[float] | None = None, step: float = 3.0) -> Step:
    """The same with one segment that covers the shard."""
    return replace(
        make_step(numel, scheme),
        segments=torch.tensor([[0, numel, 0]]),
        slot_steps=torch.tensor([step]),
        slot_is_active=torch.ones(1, dtype=torch.uint8),
        slot_groups=torch.zeros(1, dtype=torch.int32),
        group_hyper=torch.tensor([hyper or GROUPS[0]], dtype=torch.float64),
    )


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, with one pattern for every NaN: its payload is no part of the promise."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return tensor.contiguous().view(integer)


def assert_same_bits(actual: Tensor, expected: Tensor, name: str = "tensor") -> None:
    assert actual.dtype == expected.dtype
    different = (bits(actual) != bits(expected)).nonzero()
    if len(different):
        first = tuple(different[0].tolist())
        raise AssertionError(f"{name}: {len(different)} differ, first at {first}: {actual[first]} {expected[first]}")


def assert_same_step(actual: Step, expected: Step) -> None:
    for name, tensor in actual.mutated().items():
        assert_same_bits(tensor, expected.mutated()[name], name)


def native() -> Any:
    return torch.ops.zero_shard


@pytest.fixture(params=["avx512", "avx2", "scalar"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        native().force_cpu_instruction_set(request.param)
    except RuntimeError:
        pytest.skip(f"this machine or build has no {request.param}")
    yield request.param
    native().force_cpu_instruction_set("")


@pytest.fixture
def num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# --- adamw_: equal bits -----------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("scheme", SCHEMES)
def test_adamw_native_equals_twin(scheme: str, instruction_set: str) -> None:
    assert native().cpu_instruction_set() == instruction_set
    for numel, has_max, misaligned in itertools.product(SIZES, (True, False), (0, 1, 3)):
        scale = None if misaligned == 0 else 0.3
        expected = make_step(numel, scheme, has_max=has_max, scale=scale, seed=numel)
        actual = expected.clone(misaligned)
        for _ in range(2):
            twins.adamw_(*expected.arguments())  # type: ignore[arg-type]
            native().adamw_(*actual.arguments())
        assert_same_step(actual, expected)


@needs_native
@pytest.mark.parametrize("scheme", SCHEMES)
def test_adamw_special_values_native_equals_twin(scheme: str, instruction_set: str) -> None:
    """Every special value as weight, gradient and moment, with every other one."""
    values = torch.tensor(SPECIAL_VALUES, dtype=torch.float64)
    param, grad, moment = (t.flatten() for t in torch.meshgrid(values, values, values.abs(), indexing="ij"))
    step = make_single(param.numel(), scheme, GROUPS[3])
    for tensor, source in (
        (step.param, param),
        (step.grad, grad),
        (step.exp_avg, moment.flip(0)),
        (step.exp_avg_sq, moment),
        (step.max_exp_avg_sq, moment.roll(1)),
    ):
        assert tensor is not None
        tensor.copy_(source)
    if step.low is not None and step.low.dtype == torch.int16:  # also remainders that no split leaves behind
        step.low.copy_(torch.arange(param.numel()) * 40503)
    actual = step.clone()
    twins.adamw_(*step.arguments())  # type: ignore[arg-type]
    native().adamw_(*actual.arguments())
    assert_same_step(actual, step)


@needs_native
@pytest.mark.parametrize("scheme", ["fp32", "bf16_remainder", "fp16_master"])
def test_adamw_bits_do_not_depend_on_threads(scheme: str, num_threads: None) -> None:
    """2^20 + 1 elements: the threads' ranges cut segments and vectors in odd places."""
    expected = make_step((1 << 20) + 1, scheme)
    ones = expected.clone()
    twins.adamw_(*expected.arguments())  # type: ignore[arg-type]
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        actual = ones.clone()
        native().adamw_(*actual.arguments())
        assert_same_step(actual, expected)


@needs_native
def test_adamw_vector_body_and_tail_give_equal_bits(instruction_set: str) -> None:
    """One element at a time, each alone in a segment, against all at once."""
    together = make_single(257)
    alone = together.clone()
    alone = replace(alone, segments=torch.tensor([[i, 1, 0] for i in range(257)]))
    native().adamw_(*together.arguments())
    native().adamw_(*alone.arguments())
    assert_same_step(alone, together)


@needs_native
def test_adamw_many_small_segments(num_threads: None) -> None:
    torch.set_num_threads(2)
    expected = make_single(60_000)
    count = 20_000
    expected = replace(
        expected,
        segments=torch.tensor([[3 * i, i % 4, i] for i in range(count)]),
        slot_steps=(torch.arange(count) % 3 + 1).float(),
        slot_is_active=(torch.arange(count) % 7 != 0).to(torch.uint8),
        slot_groups=torch.zeros(count, dtype=torch.int32),
    )
    actual = expected.clone()
    twins.adamw_(*expected.arguments())  # type: ignore[arg-type]
    native().adamw_(*actual.arguments())
    assert_same_step(actual, expected)


# --- adamw_: right numbers --------------------------------------------------------------------------------


def kernel_forms() -> list[str]:
    return ["torch"] if ops.missing_reason("cpu") else ["torch", "native"]


def reference_adamw(step: Step) -> dict[str, Tensor]:
    """The textbook update in float64, written from the paper and not from the code under test."""
    param = step.param.double()
    if step.low is not None:
        param = (step.low if step.low.is_floating_point() else twins.join_remainder(step.param, step.low)).double()
    result = {"param": param, "exp_avg": step.exp_avg.double(), "exp_avg_sq": step.exp_avg_sq.double()}
    if step.max_exp_avg_sq is not None:
        result["max_exp_avg_sq"] = step.max_exp_avg_sq.double()
    for start, numel, slot in step.segments.tolist():
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


# Unit roundoff of the stored type, times the handful of roundings on the way.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11 + 1e-6}


@pytest.mark.parametrize("form", kernel_forms())
@pytest.mark.parametrize("scheme", SCHEMES)
def test_adamw_against_float64(scheme: str, form: str) -> None:
    for numel, scale in itertools.product(SIZES, (None, 0.25)):
        step = make_step(numel, scheme, scale=scale)
        expected = reference_adamw(step)
        before = step.clone()
        ops.select(form).adamw_(*step.arguments())
        for name, full in expected.items():
            actual = getattr(step, name)
            tolerance = TOLERANCE[actual.dtype]
            if name == "param" and step.low is not None:  # the master must hold float32 accuracy
                actual = step.low if step.low.is_floating_point() else twins.join_remainder(step.param, step.low)
                tolerance = TOLERANCE[torch.float32]
            torch.testing.assert_close(actual.double(), full, rtol=tolerance, atol=tolerance * 1e-1)
        is_touched = torch.zeros(numel, dtype=torch.bool)
        for start, length, slot in step.segments.tolist():
            is_touched[start : start + length] = bool(step.slot_is_active[slot])
        for name, tensor in step.mutated().items():
            assert_same_bits(tensor[~is_touched], before.mutated()[name][~is_touched], f"untouched {name}")


@pytest.mark.parametrize("form", kernel_forms())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_amsgrad", [False, True])
@pytest.mark.parametrize("is_maximize", [False, True])
def test_adamw_against_torch(form: str, dtype: torch.dtype, is_amsgrad: bool, is_maximize: bool) -> None:
    numel, rounds = 1000, 20
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(numel, dtype=dtype))
    optimizer = torch.optim.AdamW(
        [weight], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, amsgrad=is_amsgrad, maximize=is_maximize
    )
    hyper = [1e-2, 0.9, 0.99, 1e-8, 0.1, float(is_amsgrad), float(is_maximize)]
    scheme = "fp64" if dtype == torch.float64 else "fp32"
    step = make_single(numel, scheme, hyper)
    step.param.copy_(weight.detach())
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        getattr(step, name).zero_()
    for count in range(1, rounds + 1):
        gradient = torch.randn(numel, dtype=dtype)
        weight.grad = gradient.clone()
        step.grad.copy_(gradient)
        step.slot_steps.fill_(count)
        if dtype == torch.float32:  # one step at a time: no drift
            step.param.copy_(weight.detach())
        optimizer.step()
        ops.select(form).adamw_(*step.arguments())
        state = optimizer.state[weight]
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * is_amsgrad
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        for name, ours, theirs in [("param", step.param, weight.detach())] + [
            (name, getattr(step, name), state[name]) for name in names
        ]:
            torch.testing.assert_close(
                ours,
                theirs,
                rtol=tolerance,
                atol=tolerance * 1e-1,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.parametrize("form", kernel_forms())
def test_adamw_late_steps_and_zero_lr(form: str) -> None:
    for count, lr in itertools.product((1.0, 1e4, 1e6, 2.0**24), (0.0, 1e-2)):
        step = make_single(17, "fp64", [lr, 0.9, 0.999999, 1e-8, 0.1, 0, 0], count)
        expected = reference_adamw(step)
        ops.select(form).adamw_(*step.arguments())
        torch.testing.assert_close(step.param, expected["param"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", kernel_forms())
def test_remainder_keeps_updates_that_bf16_rounds_away(form: str) -> None:
    """1000 steps of 1e-5 on a weight of 1.0: bf16 alone never moves, its spacing is 4e-3."""
    moved = {}
    for scheme in ("bf16_remainder", "bf16"):
        step = make_single(4, scheme, [1e-5, 0.9, 0.999, 0.0, 0.0, 0, 0])
        step.param.fill_(1.0)
        step.grad.fill_(1.0)
        for tensor in (step.low, step.exp_avg, step.exp_avg_sq, step.max_exp_avg_sq):
            if tensor is not None:
                tensor.zero_()
        for count in range(1, 1001):
            step.slot_steps.fill_(count)
            ops.select(form).adamw_(*step.arguments())
        moved[scheme] = 1.0 - step.param.double().mean().item()
    assert moved["bf16"] == 0.0
    assert moved["bf16_remainder"] == pytest.approx(1e-2, abs=2e-3)


@pytest.mark.parametrize("form", kernel_forms())
def test_edited_weights_win_over_what_is_stored_beside_them(form: str) -> None:
    """With lr 0 a step must leave an edited weight alone, whatever the stale remainder or master says."""
    for scheme in ("bf16_remainder", "fp16_master"):
        step = make_single(6, scheme, [0.0, 0.9, 0.999, 1e-8, 0.0, 0, 0])
        assert step.low is not None
        step.low.fill_(-5)
        step.param.copy_(torch.tensor([0.0, -0.0, float("nan"), 2.0, -3.0, float("inf")]))
        before = step.param.clone()
        ops.select(form).adamw_(*step.arguments())
        assert torch.equal(step.param.nan_to_num(nan=77.0), before.nan_to_num(nan=77.0)), (scheme, step.param)


def test_split_and_join_lose_nothing() -> None:
    """Over every upper half and a spread of lower halves of the 32 bits."""
    upper = torch.arange(1 << 16, dtype=torch.int64)
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        pattern = (upper << 16) + lower
        master = torch.where(pattern >= 1 << 31, pattern - (1 << 32), pattern).to(torch.int32).view(torch.float32)
        high, remainder = twins.split_remainder(master)
        assert_same_bits(twins.join_remainder(high, remainder), master)
        assert torch.equal(high.isnan(), master.isnan())
        finite = master.isfinite() & high.isfinite()
        assert ((high.float() - master).abs()[finite] <= (master.abs() * 2.0**-8 + 1e-40)[finite]).all()


# --- reduce_slices_ ---------------------------------------------------------------------------------------


def make_slices(world_size: int, numel: int, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(numel)
    slices = torch.randn(world_size, numel, generator=random).mul_(100).to(dtype)
    if numel >= len(SPECIAL_VALUES):
        slices[0, : len(SPECIAL_VALUES)] = torch.tensor(SPECIAL_VALUES).to(dtype)
        slices[-1, : len(SPECIAL_VALUES)] = torch.tensor(SPECIAL_VALUES).to(dtype).flip(0)
    return slices


@pytest.mark.parametrize("form", kernel_forms())
@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_slices_adds_in_rank_order(dtype: torch.dtype, form: str) -> None:
    """The definition, one IEEE operation after the other; exact, so no tolerance."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for numel, world_size, divisor in itertools.product((*SIZES, 1025), (1, 2, 3, 8), (1, 3)):
        slices = make_slices(world_size, numel, dtype)
        quotient = slices[0].to(wide)
        for rank in range(1, world_size):
            quotient = quotient + slices[rank].to(wide)
        quotient = quotient / torch.tensor(divisor, dtype=wide)
        out = torch.full((numel,), float("nan"), dtype=wide)
        ops.select(form).reduce_slices_(out, slices, divisor, False)
        assert_same_bits(out, quotient)
        ops.select(form).reduce_slices_(out, slices, divisor, True)
        assert_same_bits(out, quotient + quotient)


@pytest.mark.parametrize("form", kernel_forms())
def test_reduce_slices_sums_in_float32(form: str) -> None:
    """256 slices of bf16: a running sum in bf16 would stop growing at 256 of the 2560."""
    slices = torch.full((256, 5), 10.0, dtype=torch.bfloat16)
    slices[0] = 10.0625
    out = torch.zeros(5)
    ops.select(form).reduce_slices_(out, slices, 256, False)
    torch.testing.assert_close(out, torch.full((5,), (10.0 * 255 + 10.0625) / 256), rtol=1e-7, atol=0)


@needs_native
@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_slices_native_equals_twin(dtype: torch.dtype, instruction_set: str, num_threads: None) -> None:
    slices = make_slices(3, (1 << 17) + 1, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = torch.ones(slices.shape[1], dtype=wide)
    twins.reduce_slices_(expected, slices, 3, True)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        actual = torch.ones(slices.shape[1], dtype=wide)
        native().reduce_slices_(actual, slices, 3, True)
        assert_same_bits(actual, expected)


# --- flatten_ ---------------------------------------------------------------------------------------------


def make_flatten(dtype: torch.dtype) -> tuple[list[Tensor], list[int], int]:
    """Tensors of every dtype, shape and memory order, with gaps between them and one as the last element."""
    random = torch.Generator().manual_seed(1)
    shapes = [(), (3,), (0,), (17, 5), (2, 3, 4, 5), (257,), (4099,), (0, 3)]
    tensors: list[Tensor] = []
    for number, shape in enumerate(shapes * 4):
        values = torch.randn(shape, generator=random).mul_(1000).to(FLOATS[(number + number // 8) % 4])
        if number % 3 == 1 and values.dim() == 2:
            values = values.t()
        if number % 2 == 1 and values.dim() == 4:
            values = values.contiguous(memory_format=torch.channels_last)
        tensors.append(values)
    special = torch.tensor(SPECIAL_VALUES, dtype=torch.float64)
    tensors += [special.to(source) for source in FLOATS]
    offsets, end = [], 1
    for number, tensor in enumerate(tensors):
        end += number % 3
        offsets.append(end)
        end += tensor.numel()
    return tensors, offsets, end + 2


@pytest.mark.parametrize("form", kernel_forms())
@pytest.mark.parametrize("dtype", FLOATS)
def test_flatten_copies_in_memory_order_and_zeroes_gaps(dtype: torch.dtype, form: str) -> None:
    tensors, offsets, numel = make_flatten(dtype)
    out = torch.full((numel,), float("nan"), dtype=dtype)
    ops.select(form).flatten_(out, tensors, offsets)
    expected = torch.zeros(numel, dtype=dtype)
    for tensor, offset in zip(tensors, offsets, strict=True):
        in_memory_order = tensor.as_strided((tensor.numel(),), (1,))
        expected[offset : offset + tensor.numel()] = in_memory_order.to(dtype)
    assert_same_bits(out, expected)


@needs_native
@pytest.mark.parametrize("dtype", FLOATS)
def test_flatten_native_equals_twin(dtype: torch.dtype, instruction_set: str, num_threads: None) -> None:
    tensors, offsets, numel = make_flatten(dtype)
    for source in FLOATS:
        tensors.append(torch.randn(70_001).to(source))
        offsets.append(numel + 5)
        numel += tensors[-1].numel() + 5
    expected = torch.full((numel,), float("nan"), dtype=dtype)
    twins.flatten_(expected, tensors, offsets)
    for count, misaligned in ((1, 0), (2, 1), (3, 3)):
        torch.set_num_threads(count)
        actual = torch.full((numel + misaligned,), float("nan"), dtype=dtype)[misaligned:]
        native().flatten_(actual, tensors, offsets)
        assert_same_bits(actual, expected)


@needs_native
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_casts_to_16_bits_equal_torch_for_every_pattern(target: torch.dtype, instruction_set: str) -> None:
    """All 2^16 upper halves with lower halves around each rounding boundary, and all 2^16 numbers back."""
    pattern = torch.arange(1 << 16, dtype=torch.int64).repeat_interleave(8) << 16
    pattern += torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001]).repeat(1 << 16)
    source = torch.where(pattern >= 1 << 31, pattern - (1 << 32), pattern).to(torch.int32).view(torch.float32)
    narrow = torch.empty(source.numel(), dtype=target)
    native().flatten_(narrow, [source], [0])
    assert_same_bits(narrow, source.to(target))
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(target)
    wide = torch.empty(every.numel())
    native().flatten_(wide, [every], [0])
    assert_same_bits(wide, every.float())


@pytest.mark.parametrize("form", kernel_forms())
def test_flatten_of_nothing_is_zero(form: str) -> None:
    for numel in (0, 5):
        out = torch.full((numel,), 7.0)
        ops.select(form).flatten_(out, [], [])
        assert torch.equal(out, torch.zeros(numel))


# --- checks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", kernel_forms())
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"grad": torch.zeros(17, dtype=torch.float64)},
            r"adamw_: grad must be float32\[17\].*got float64\[17\]",
        ),
        ({"grad": torch.zeros(16)}, r"adamw_: grad must be float32\[17\] on cpu, got float32\[16\] on cpu"),
        (
            {"param": torch.zeros(17, dtype=torch.int32)},
            r"adamw_: param must be float32 or .* got int32\[17\]",
        ),
        ({"param": torch.zeros(34)[::2]}, r"adamw_: param must be contiguous, got strides \[2\]"),
        ({"low": torch.zeros(17)}, r"adamw_: low must be None for a .*float32 param"),
        (
            {"exp_avg": torch.zeros(17, dtype=torch.float16)},
            r"exp_avg must be float32 or bfloat16\[17\].*got float16",
        ),
        (
            {"exp_avg_sq": torch.zeros(17, dtype=torch.bfloat16)},
            r"exp_avg_sq must be float32\[17\].*got bfloat16",
        ),
        (
            {"max_exp_avg_sq": torch.zeros(3)},
            r"max_exp_avg_sq must be float32\[17\] on cpu, got float32\[3\]",
        ),
        (
            {"max_exp_avg_sq": None},
            r"max_exp_avg_sq must be given for group 3, which asks for amsgrad, got None",
        ),
        ({"segments": torch.tensor([[0, 18, 0]])}, r"segments\[0\] must be .* within 17 elements.*numel 18"),
        ({"segments": torch.tensor([[0, 9, 0], [8, 2, 1]])}, r"segments\[1\] must be ascending.*start 8"),
        ({"segments": torch.tensor([[0, 9, 13]])}, r"segments\[0\].* 13 slots.*slot 13"),
        ({"segments": torch.tensor([[0, -1, 1]])}, r"segments\[0\].*numel -1"),
        ({"segments": torch.tensor([[0, 9]])}, r"segments must be int64\[0, 3\].*got int64\[1, 2\]"),
        ({"slot_steps": torch.zeros(13, dtype=torch.int64)}, r"slot_steps must be float32\[13\].*got int64"),
        (
            {"slot_is_active": torch.zeros(2, dtype=torch.uint8)},
            r"slot_is_active must be uint8\[13\].*uint8\[2\]",
        ),
        (
            {"slot_groups": torch.full((13,), 4, dtype=torch.int32)},
            r"slot_groups\[0\] must be a row of the 4.*got 4",
        ),
        (
            {"group_hyper": torch.zeros(4, 6, dtype=torch.float64)},
            r"group_hyper must be float64\[3, 7\].*\[4, 6\]",
        ),
        (
            {"grad_scale": torch.ones(1)},
            r"grad_scale must be float32 or float64\[\] on cpu, got float32\[1\]",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_adamw_refuses(form: str, change: dict[str, Tensor | None], message: str) -> None:
    step = replace(make_step(17), **change)  # type: ignore[arg-type]
    before = step.clone()
    with pytest.raises(RuntimeError, match=message):
        ops.select(form).adamw_(*step.arguments())
    assert_same_step(step, before)


@pytest.mark.parametrize("form", kernel_forms())
def test_reduce_slices_refuses(form: str) -> None:
    reduce_slices_ = ops.select(form).reduce_slices_
    with pytest.raises(RuntimeError, match=r"out must be float32\[4\] on cpu, got float32\[3\] on cpu"):
        reduce_slices_(torch.zeros(3), torch.zeros(2, 4), 1, False)
    with pytest.raises(RuntimeError, match=r"out must be float64\[4\] on cpu, got float32\[4\] on cpu"):
        reduce_slices_(torch.zeros(4), torch.zeros(2, 4, dtype=torch.float64), 1, False)
    with pytest.raises(RuntimeError, match=r"slices must be contiguous floating \[W, N\].*got float32\[0, 4\]"):
        reduce_slices_(torch.zeros(4), torch.zeros(0, 4), 1, False)
    with pytest.raises(RuntimeError, match="divisor must be at least 1, got 0"):
        reduce_slices_(torch.zeros(4), torch.zeros(2, 4), 0, False)


@pytest.mark.parametrize("form", kernel_forms())
def test_flatten_refuses(form: str) -> None:
    flatten_ = ops.select(form).flatten_
    with pytest.raises(RuntimeError, match="one entry for each of the 1 tensors, got 0"):
        flatten_(torch.zeros(3), [torch.zeros(3)], [])
    with pytest.raises(RuntimeError, match=r"tensors\[0\] must be dense, got strides \[2\]"):
        flatten_(torch.zeros(3), [torch.zeros(6)[::2]], [0])
    with pytest.raises(RuntimeError, match=r"tensors\[0\] must be dense, got strides \[0\]"):
        flatten_(torch.zeros(3), [torch.zeros(1).expand(3)], [0])
    with pytest.raises(RuntimeError, match=r"tensors\[0\] must be float32.*got int64\[3\]"):
        flatten_(torch.zeros(3), [torch.zeros(3, dtype=torch.int64)], [0])
    for offsets in ([0, 2], [1, 0], [0, 3], [-1, 3]):
        with pytest.raises(RuntimeError, match=r"offsets\[[01]\] must lie between -?\d+ and -?\d+ .*got -?\d"):
            flatten_(torch.zeros(5), [torch.zeros(3), torch.zeros(3)], offsets)


# --- registration and choice ------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("scheme", ["fp32", "bf16_remainder"])
def test_opcheck_adamw(scheme: str) -> None:
    for has_max, scale in ((True, 0.5), (False, None)):
        step = make_step(17, scheme, has_max=has_max, scale=scale)
        torch.library.opcheck(native().adamw_.default, tuple(step.arguments()))


@needs_native
def test_opcheck_copies() -> None:
    torch.library.opcheck(native().reduce_slices_.default, (torch.ones(3), torch.ones(2, 3), 2, True))
    torch.library.opcheck(
        native().flatten_.default, (torch.ones(9), [torch.ones(2, 2), torch.ones(3).bfloat16()], [0, 5])
    )


def test_select_and_describe(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.select("torch").name == "torch"
    with pytest.raises(ValueError, match=r"kernels must be .*got 'fast'"):
        ops.select("fast")
    monkeypatch.setattr(ops, "_MISSING", {"cpu": "no compiler found", "cuda": "no nvcc found"})
    monkeypatch.setattr(ops, "_warned", set())
    with pytest.raises(RuntimeError, match=r"kernels='native' needs compiled cpu kernels.*no compiler found"):
        ops.select("native")
    assert [ops.select("auto").name for _ in range(3)] == ["torch"] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "zero_shard: no compiled cpu kernels (no compiler found); the slower PyTorch path is used."
    ]
    assert "cpu: PyTorch twins (no compiler found)" in ops.describe()
    assert "\n" not in ops.describe()


@needs_native
def test_native_is_chosen_where_present() -> None:
    assert ops.select("auto").name == "native"
    assert f"cpu: native ({native().cpu_instruction_set()})" in ops.describe()
    with pytest.raises(RuntimeError, match=r"name must be avx512, avx2 or scalar.*got 'sse9'"):
        native().force_cpu_instruction_set("sse9")


@needs_native
def test_the_environment_narrows_the_instruction_set() -> None:
    code = "from zero_shard import ops; print(ops.instruction_set())"
    root = Path(__file__).parent.parent
    environment = {**os.environ, "ZERO_SHARD_CPU_CAPABILITY": "scalar"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "scalar", result.stderr


@needs_native
def test_cuda_tensors_are_served_without_a_cuda_build() -> None:
    for name in ("flatten_", "reduce_slices_", "adamw_"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"zero_shard::{name}", "CUDA")
