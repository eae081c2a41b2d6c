"""adamw_: equal bits in all forms, whatever the threads, instruction sets, cuts and pieces."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
import torch
from op_cases import (
    BLOCK_NUMEL,
    GROUPS,
    LARGE,
    SCHEMES,
    SIZES,
    SPECIAL_VALUES,
    Step,
    assert_same_bits,
    assert_same_step,
    each_form,
    instruction_sets,
    make_single,
    make_step,
    native,
    needs_native,
    slice_step,
    threads,
    with_segments,
)

from zero_shard import ops, twins

# Rounded at random, or with state beside the weight: what could depend on where a shard is cut.
_KEYED = ["bf16_stochastic", "fp32_int8", "bf16_remainder_int8", "bf16_stochastic_int8"]


def _many_segments(step: Step, unit: int) -> Step:
    """Segments of 0 to 3 times ``unit`` elements, one parameter each, of differing steps, every seventh inactive."""
    count = step.param.numel() // (3 * unit)
    rows = [[3 * unit * i, unit * (i % 4), i, 0] for i in range(count)]
    step = with_segments(step, rows, steps=[float(i % 3 + 1) for i in range(count)])
    return replace(step, slot_is_active=(torch.arange(count) % 7 != 0).to(torch.uint8))


@needs_native
@pytest.mark.parametrize("scheme", SCHEMES)
def test_adamw_native_equals_twin(scheme: str) -> None:
    for numel, has_max, num_misaligned in itertools.product(SIZES, (True, False), (0, 1, 3)):
        before = make_step(
            numel,
            scheme,
            has_max=has_max,
            scale=None if num_misaligned == 0 else 0.3,
            seed=numel,
            has_param_grads=num_misaligned == 3,
        )
        expected = before.clone()
        for _ in range(2):
            twins.adamw_(*expected.arguments())
        for instruction_set in instruction_sets():
            assert native().cpu_instruction_set() == instruction_set
            actual = before.clone(num_misaligned)
            actual = actual.with_split_grads() if num_misaligned == 1 else actual
            for _ in range(2):
                native().adamw_(*actual.arguments())
            assert_same_step(actual, expected, f"{instruction_set} {numel}")


@needs_native
@pytest.mark.parametrize("scheme", SCHEMES)
def test_adamw_special_values_native_equals_twin(scheme: str) -> None:
    """Every special value as weight, gradient and moment, with every other one."""
    values = torch.tensor(SPECIAL_VALUES, dtype=torch.float64)
    param, grad, moment = (t.flatten() for t in torch.meshgrid(values, values, values.abs(), indexing="ij"))
    for has_param_grads in (False, True):
        step = make_step(param.numel(), scheme, has_param_grads=has_param_grads)
        step = with_segments(step, [[0, param.numel(), 0, 0]], GROUPS[3], [3.0])
        step.param.copy_(param)
        step.grad.copy_(grad)
        if SCHEMES[scheme].has_codes:  # any code beside any scale
            assert step.exp_avg_scale is not None and step.exp_avg_sq_scale is not None
            step.exp_avg.copy_(torch.arange(param.numel()) * 31 % 255 - 127)
            step.exp_avg_sq.copy_(torch.arange(param.numel()) * 31 % 256)
            scales = values.abs().repeat(len(step.exp_avg_scale) // len(values) + 1)[: len(step.exp_avg_scale)]
            step.exp_avg_scale.copy_(scales)
            step.exp_avg_sq_scale.copy_(scales.roll(1))
        else:
            step.exp_avg.copy_(moment.flip(0))
            step.exp_avg_sq.copy_(moment)
            assert step.max_exp_avg_sq is not None
            step.max_exp_avg_sq.copy_(moment.roll(1))
        if step.low is not None and step.low.dtype == torch.int16:  # also remainders that no split leaves behind
            step.low.copy_(torch.arange(param.numel()) * 40503)
        expected = step.clone()
        twins.adamw_(*expected.arguments())
        for instruction_set in instruction_sets():
            actual = step.clone()
            native().adamw_(*actual.arguments())
            assert_same_step(actual, expected, instruction_set)


@needs_native
@pytest.mark.parametrize("scheme", ["fp32", "bf16_remainder", "fp16_master_int8", "bf16_stochastic"])
def test_adamw_bits_do_not_depend_on_threads(scheme: str) -> None:
    """2^20 + 1 elements: the threads' ranges cut segments and vectors in odd places."""
    before = make_step(LARGE, scheme)
    expected = before.clone()
    twins.adamw_(*expected.arguments())
    for count in (1, 2, 5):
        with threads(count):
            actual = before.clone()
            native().adamw_(*actual.arguments())
        assert_same_step(actual, expected, f"{count} threads")


@needs_native
@pytest.mark.parametrize("scheme", ["fp32", "bf16_remainder", "fp16_master", "bf16_stochastic"])
def test_adamw_vector_body_and_tail_give_equal_bits(scheme: str) -> None:
    """One element at a time, each alone in a segment, against all at once."""
    for instruction_set in instruction_sets():
        together = make_single(257, scheme)
        alone = with_segments(together.clone(), [[i, 1, 0, i] for i in range(257)], steps=[3.0])
        native().adamw_(*together.arguments())
        native().adamw_(*alone.arguments())
        assert_same_step(alone, together, instruction_set)


@each_form
@pytest.mark.parametrize("scheme", _KEYED)
def test_adamw_bits_do_not_depend_on_where_a_shard_is_cut(scheme: str, form: str) -> None:
    """One parameter of 4099 elements, whole and in shards that begin with a block."""
    whole = make_single(4099, scheme)
    parts = [slice_step(whole, start, stop) for start, stop in itertools.pairwise([0, 256, 1024, 3840, 4099])]
    adamw_ = ops.select(form).adamw_
    for _ in range(2):
        for step in (whole, *parts):
            adamw_(*step.arguments())
    for name, tensor in whole.mutated().items():
        assert_same_bits(torch.cat([part.mutated()[name] for part in parts]), tensor, name)


@each_form
@pytest.mark.parametrize("scheme", ["bf16_stochastic", "fp32_int8"])
def test_random_bits_depend_on_number_step_and_element_only(scheme: str, form: str) -> None:
    def after(number: int, step: float, param_start: int) -> Step:
        result = with_segments(make_step(2048, scheme), [[0, 2048, 0, param_start]], steps=[step])
        # The result of the arithmetic must not change with the step, so that only the rounding can.
        result.group_hyper[:, 1:3] = 0.0
        result = replace(result, slot_numbers=torch.tensor([number]))
        ops.select(form).adamw_(*result.arguments())
        return result

    def is_same(one: Step, other: Step) -> bool:
        return all(torch.equal(tensor, other.mutated()[name]) for name, tensor in one.mutated().items())

    first = after(3, 5.0, 256)
    assert is_same(first, after(3, 5.0, 256))
    for other in ((4, 5.0, 256), (3, 6.0, 256), (3, 5.0, 512), (3, 5.0, 256 + (1 << 32)), (3 + (1 << 32), 5.0, 256)):
        assert not is_same(first, after(*other)), f"number, step, start {other} gave the bits of (3, 5, 256)"


@needs_native
@pytest.mark.parametrize("scheme", ["fp32", "bf16_stochastic", "fp32_bf16_moments"])
def test_adamw_many_small_segments(scheme: str) -> None:
    """20,000 parameters of 0 to 3 elements, each with its gradient as a tensor of its own."""
    before = _many_segments(make_step(60_000, scheme), 1)
    assert len(before.segments) == 20_000
    expected, actual = before.clone(), before.clone().with_split_grads()
    start_s = time.process_time()
    twins.adamw_(*expected.arguments())
    assert time.process_time() - start_s < 5.0, "the twin must not take many small steps"
    with threads(2):
        native().adamw_(*actual.arguments())
    assert_same_step(actual, expected)
    assert not torch.equal(actual.param, before.param)


@needs_native
def test_adamw_many_small_segments_of_blocks() -> None:
    before = _many_segments(make_step(3 * 256 * 400, "bf16_remainder_int8"), BLOCK_NUMEL)
    expected, actual = before.clone(), before.clone().with_split_grads()
    twins.adamw_(*expected.arguments())
    with threads(2):
        native().adamw_(*actual.arguments())
    assert_same_step(actual, expected)


# --- the gradient -----------------------------------------------------------------------------------------


@each_form
@pytest.mark.parametrize("scheme", ["fp32", "bf16_remainder", "fp16_int8"])
def test_adamw_gradient_in_several_tensors_equals_a_flat_one(scheme: str, form: str) -> None:
    for has_param_grads in (False, True):
        flat = make_step(4099, scheme, has_param_grads=has_param_grads)
        split = flat.clone().with_split_grads()
        ops.select(form).adamw_(*flat.arguments())
        ops.select(form).adamw_(*split.arguments())
        assert_same_step(split, flat)


@each_form
def test_adamw_trailing_empty_tensor_drops_nothing(form: str) -> None:
    """Source: NVIDIA apex drops the work gathered so far when the last tensor of a list is empty."""
    expected = make_single(17)
    before = expected.clone()
    ops.select(form).adamw_(*expected.arguments())
    assert not torch.equal(expected.param, before.param)
    empty = torch.zeros(0)
    for grads, offsets in (
        ([before.grad, empty], [0, 17]),
        ([empty, empty, before.grad, empty, empty], [0, 0, 0, 17, 17]),
    ):
        actual = replace(before.clone(), grads=grads, grad_offsets=offsets)
        actual = with_segments(actual, [[0, 0, 0, 0], [0, 17, 0, 0], [17, 0, 0, 17]], steps=[3.0])
        ops.select(form).adamw_(*actual.arguments())
        assert_same_step(actual, expected)


@each_form
def test_adamw_gradients_of_any_shape_are_taken_in_memory_order(form: str) -> None:
    expected = make_single(24)
    actual = replace(expected.clone(), grads=[expected.grad[:12].view(3, 4), expected.grad[12:].view(2, 3, 2)])
    actual = with_segments(replace(actual, grad_offsets=[0, 12]), [[0, 12, 0, 0], [12, 12, 0, 12]], steps=[3.0])
    ops.select(form).adamw_(*expected.arguments())
    ops.select(form).adamw_(*actual.arguments())
    assert_same_step(actual, expected)


@each_form
@pytest.mark.parametrize("scheme", ["bf16", "bf16_remainder", "bf16_stochastic_int8", "fp16", "fp16_master"])
def test_adamw_gradient_of_16_bits_equals_the_widened_one(scheme: str, form: str) -> None:
    narrow = make_step(1000, scheme, has_param_grads=True, scale=0.3)
    wide = replace(narrow.clone(), grads=[narrow.grad.float()])
    assert narrow.grad.dtype == SCHEMES[scheme].param
    ops.select(form).adamw_(*narrow.arguments())
    ops.select(form).adamw_(*wide.arguments())
    assert_same_step(narrow, wide)


@each_form
@pytest.mark.parametrize("scheme", ["fp32", "fp64", "bf16_remainder", "fp16_master_int8", "bf16_stochastic"])
def test_adamw_found_inf_leaves_everything_untouched(scheme: str, form: str) -> None:
    before = make_step(300, scheme)
    for value in (1.0, -1.0, float("nan"), float("inf"), 1e-45):
        step = replace(before.clone(), found_inf=torch.tensor(value))
        ops.select(form).adamw_(*step.arguments())
        assert_same_step(step, before, f"found_inf {value}")
    for none in (0.0, -0.0):
        expected, step = before.clone(), replace(before.clone(), found_inf=torch.tensor(none))
        ops.select(form).adamw_(*expected.arguments())
        ops.select(form).adamw_(*step.arguments())
        assert_same_step(step, expected)
        assert not torch.equal(step.param, before.param)


@each_form
@pytest.mark.parametrize("scheme", ["fp32", "fp64", "bf16"])
def test_adamw_takes_the_scale_in_either_precision(scheme: str, form: str) -> None:
    """0.3 as float64 is rounded to the compute dtype; as float32 it is another number for float64 weights."""
    double = make_step(300, scheme, scale=0.3)
    rounded = replace(double.clone(), grad_scale=torch.tensor(0.3))
    ops.select(form).adamw_(*double.arguments())
    ops.select(form).adamw_(*rounded.arguments())
    if scheme == "fp64":
        torch.testing.assert_close(rounded.exp_avg, double.exp_avg, rtol=1e-6, atol=1e-6)
        assert not torch.equal(rounded.exp_avg, double.exp_avg)
    else:
        assert_same_step(rounded, double)
