"""What the operators refuse: before anything has changed, and in the same words in all forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from op_cases import BLOCK_NUMEL, Step, assert_same_step, each_form, make_step, native, needs_native, with_segments

from zero_shard import ops, twins

zeros, int8, fp64 = torch.zeros, torch.int8, torch.float64


def _with(**changes: Any) -> Callable[[Step], Step]:
    return lambda step: replace(step, **changes)


def _segments(*rows: list[int]) -> Callable[[Step], Step]:
    return _with(segments=torch.tensor(rows))


# scheme, what is changed in 17 elements of it, what is said
ADAMW: list[tuple[str, Callable[[Step], Step], str]] = [
    ("fp32", _with(param=zeros(17, dtype=torch.int32)), r"param must be float32 or .* on cpu, got int32\[17\] on cpu"),
    ("fp32", _with(param=zeros(34)[::2]), r"param must be contiguous, got strides \[2\]"),
    (
        "fp32",
        _with(grads=[zeros(17, dtype=fp64)]),
        r"grads\[0\] must be float32\[17\] on cpu, got float64\[17\] on cpu",
    ),
    ("fp64", _with(grads=[zeros(17)]), r"grads\[0\] must be float64\[17\] on cpu, got float32\[17\]"),
    (
        "bf16",
        _with(grads=[zeros(17, dtype=torch.float16)]),
        r"grads\[0\] must be float32 or bfloat16\[17\] on cpu, got float16\[17\]",
    ),
    (
        "bf16",
        _with(grads=[zeros(9), zeros(8, dtype=torch.bfloat16)], grad_offsets=[0, 9]),
        r"grads\[1\] must be float32\[8\] on cpu, got bfloat16\[8\]",
    ),
    ("fp32", _with(grads=[zeros(34)[::2]]), r"grads\[0\] must be contiguous, got strides \[2\]"),
    (
        "fp32",
        _with(grads=[zeros(17)], grad_offsets=[]),
        r"grad_offsets must have one entry for each of the 1 grads, got 0",
    ),
    ("fp32", _with(grads=[zeros(18)]), r"grad_offsets\[0\] must lie between 0 and -1 .*inside param.*, got 0"),
    (
        "fp32",
        _with(grads=[zeros(9), zeros(8)], grad_offsets=[0, 8]),
        r"grad_offsets\[1\] must lie between 9 and 9 \(ascending, disjoint, inside param\), got 8",
    ),
    ("fp32", _with(grad_offsets=[-1]), r"grad_offsets\[0\] must lie between 0 and 0 .*, got -1"),
    (
        "fp32",
        lambda step: with_segments(
            replace(step, grads=[zeros(9), zeros(8)], grad_offsets=[0, 9]), [[8, 2, 0, 0]], steps=[1.0]
        ),
        r"grads must hold each active segment within one tensor, got none for segments\[0\] with start 8, numel 2",
    ),
    (
        "fp32",
        lambda step: with_segments(replace(step, grads=[zeros(16)]), [[0, 16, 0, 0], [16, 1, 0, 16]], steps=[1.0]),
        r"grads must hold each active segment .* got none for segments\[1\] with start 16, numel 1",
    ),
    (
        "fp32",
        lambda step: with_segments(replace(step, grads=[], grad_offsets=[]), [[0, 17, 0, 0]], steps=[1.0]),
        r"grads must hold each active segment .* got none for segments\[0\] with start 0, numel 17",
    ),
    ("fp32", _with(low=zeros(17)), r"low must be None for a float32 param, got float32\[17\]"),
    ("bf16", _with(low=zeros(17)), r"low must be int16\[17\] on cpu, got float32\[17\]"),
    ("fp16", _with(low=zeros(17, dtype=torch.int16)), r"low must be float32\[17\] on cpu, got int16\[17\]"),
    ("fp32", _with(stochastic=True), r"stochastic must be False for a float32 param, got True"),
    ("fp16", _with(stochastic=True), r"stochastic must be False for a float16 param, got True"),
    ("bf16_remainder", _with(stochastic=True), r"low must be None where stochastic is True, got int16\[17\]"),
    (
        "fp32",
        _with(exp_avg=zeros(17, dtype=torch.float16)),
        r"exp_avg must be float32 or bfloat16 or int8\[17\] on cpu, got float16",
    ),
    ("fp64", _with(exp_avg=zeros(17, dtype=int8)), r"exp_avg must be float64\[17\] on cpu, got int8"),
    ("fp32", _with(exp_avg_sq=zeros(17, dtype=torch.bfloat16)), r"exp_avg_sq must be float32\[17\].*got bfloat16"),
    ("fp32_int8", _with(exp_avg_sq=zeros(17, dtype=int8)), r"exp_avg_sq must be uint8\[17\] on cpu, got int8\[17\]"),
    ("fp32_int8", _with(exp_avg_scale=None), r"exp_avg_scale must be given for int8 moments, got None"),
    ("fp32_int8", _with(exp_avg_sq_scale=None), r"exp_avg_sq_scale must be given for int8 moments, got None"),
    ("fp32_int8", _with(exp_avg_scale=zeros(2)), r"exp_avg_scale must be float32\[1\] on cpu, got float32\[2\]"),
    ("fp32_int8", _with(exp_avg_sq_scale=zeros(0)), r"exp_avg_sq_scale must be float32\[1\] on cpu, got float32\[0\]"),
    ("fp32_int8", _with(max_exp_avg_sq=zeros(17)), r"max_exp_avg_sq must be None for int8 moments, got float32\[17\]"),
    ("fp32", _with(exp_avg_scale=zeros(1)), r"exp_avg_scale must be None for float32 moments, got float32\[1\]"),
    ("bf16_bf16_moments", _with(exp_avg_sq_scale=zeros(1)), r"exp_avg_sq_scale must be None for bfloat16 moments"),
    ("fp32", _with(max_exp_avg_sq=zeros(3)), r"max_exp_avg_sq must be float32\[17\] on cpu, got float32\[3\]"),
    ("fp32", _with(max_exp_avg_sq=None), r"max_exp_avg_sq must be given for group 3, which asks for amsgrad, got None"),
    ("fp32", _segments([0, 18, 0, 0]), r"segments\[0\] must be .* within 17 elements.*numel 18"),
    ("fp32", _segments([0, 9, 0, 0], [8, 2, 1, 0]), r"segments\[1\] must be ascending.*start 8"),
    ("fp32", _segments([0, 9, 0, 0], [-1, 2, 1, 0]), r"segments\[1\] must be ascending.*start -1"),
    ("fp32", _segments([0, 9, 0, -1]), r"segments\[0\].* param_start of at least 0, .*param_start -1"),
    ("fp32", _segments([0, 9, 13, 0]), r"segments\[0\] must be within 13 slots, got slot 13"),
    ("fp32", _segments([0, -1, 1, 0]), r"segments\[0\].*numel -1"),
    ("fp32", _segments([0, 9, 1]), r"segments must be int64\[0, 4\].*got int64\[1, 3\]"),
    ("fp32_int8", _segments([16, 1, 0, 0]), r"segments\[0\] must start at multiples of 256 for int8 moments.*start 16"),
    ("fp32_int8", _segments([0, 1, 0, 16]), r"segments\[0\] must start at multiples of 256 .*param_start 16"),
    ("fp32", _with(slot_steps=zeros(13, dtype=torch.int64)), r"slot_steps must be float32\[13\].*got int64"),
    ("fp32", _with(slot_is_active=zeros(2, dtype=torch.uint8)), r"slot_is_active must be uint8\[13\].*uint8\[2\]"),
    (
        "fp32",
        _with(slot_groups=torch.full((13,), 4, dtype=torch.int32)),
        r"slot_groups\[0\] must be a row of the 4 in group_hyper, got 4",
    ),
    ("fp32", _with(slot_numbers=zeros(13, dtype=torch.int32)), r"slot_numbers must be int64\[13\].*got int32\[13\]"),
    ("fp32", _with(group_hyper=zeros(4, 6, dtype=fp64)), r"group_hyper must be float64\[3, 7\].*\[4, 6\]"),
    ("fp32", _with(grad_scale=torch.ones(1)), r"grad_scale must be float32 or float64\[\] on cpu, got float32\[1\]"),
    ("fp32", _with(found_inf=torch.ones((), dtype=fp64)), r"found_inf must be float32\[\] on cpu, got float64\[\]"),
]
_TABLE = torch.tensor([[0, 4, 0, 0]])
_SUMS = zeros(1, 2, dtype=fp64)
_HIGH = zeros(2, 2, 2, 2, 2, 2, 14)[..., ::2]  # every dimension but the last has a gap, so that none can be joined
OTHERS: list[tuple[str, list[Any], str]] = [
    ("quantize_", [zeros(260).byte(), zeros(2, 128)], r"values must be float32 or bfloat16 or float16\[256\]"),
    ("quantize_", [zeros(260).byte(), zeros(256).double()], r"values must be float32 or bfloat16 or float16\[256\]"),
    ("quantize_", [zeros(260).byte(), zeros(255)], r"values must have a multiple of 256 elements, got 255"),
    ("quantize_", [zeros(256).byte(), zeros(256)], r"wire must be uint8\[260\].*got uint8\[256\]"),
    ("quantize_", [zeros(260), zeros(256)], r"wire must be uint8\[260\].*got float32\[260\]"),
    (
        "reduce_slices_",
        [zeros(256), zeros(2, 256).byte(), 1, False, None, None],
        r"uint8 slices must be whole blocks of 260 bytes, got uint8\[2, 256\]",
    ),
    ("reduce_slices_", [zeros(260), zeros(2, 260).byte(), 1, False, None, None], r"out must be float32\[256\]"),
    ("reduce_slices_", [zeros(3), zeros(2, 4), 1, False, None, None], r"out must be float32\[4\].*got float32\[3\]"),
    (
        "reduce_slices_",
        [zeros(4), zeros(2, 4, dtype=fp64), 1, False, None, None],
        r"out must be float64\[4\] on cpu, got float32\[4\] on cpu",
    ),
    (
        "reduce_slices_",
        [zeros(4), zeros(0, 4), 1, False, None, None],
        r"slices must be contiguous floating or uint8 \[W, N\] with W >= 1, got float32\[0, 4\]",
    ),
    ("reduce_slices_", [zeros(4), zeros(2, 8)[:, ::2], 1, False, None, None], r"slices must be contiguous"),
    ("reduce_slices_", [zeros(4), zeros(2, 4), 0, False, None, None], r"divisor must be at least 1, got 0"),
    (
        "reduce_slices_",
        [zeros(4), zeros(2, 4), 1, False, None, None, zeros(3)],
        r"own must be float32\[4\] on cpu, got float32\[3\]",
    ),
    (
        "reduce_slices_",
        [zeros(4), zeros(2, 4), 1, False, None, None, zeros(4, dtype=fp64)],
        r"own must be float32\[4\] on cpu, got float64\[4\]",
    ),
    (
        "reduce_slices_",
        [zeros(4), zeros(2, 4), 1, False, None, None, zeros(4), 3],
        r"own_rank must be at least 0 and below 3, got 3",
    ),
    (
        "reduce_slices_",
        [zeros(4), zeros(2, 4), 1, False, None, None, zeros(4), -1],
        r"own_rank must be at least 0 and below 3, got -1",
    ),
    (
        "reduce_slices_",
        [zeros(4), zeros(2, 4), 1, False, None, _SUMS],
        r"segments must be given where sums are, got None",
    ),
    (
        "reduce_slices_",
        [zeros(4), zeros(2, 4), 1, False, _TABLE, None],
        r"segments must be None where sums are not given, got int64\[1, 4\]",
    ),
    (
        "reduce_slices_",
        [zeros(4), zeros(2, 4), 1, False, _TABLE, zeros(2, 2, dtype=fp64)],
        r"sums must be float64\[1, 2\] on cpu, got float64\[2, 2\]",
    ),
    (
        "reduce_slices_",
        [zeros(4), zeros(2, 4), 1, False, torch.tensor([[1, 4, 0, 0]]), _SUMS],
        r"segments\[0\] must be ascending, disjoint, within 4 elements.*start 1, numel 4",
    ),
    ("sum_squares_", [_SUMS, [zeros(4)], [0], -1, _TABLE], r"numel must be at least 0, got -1"),
    ("sum_squares_", [zeros(1, 2), [zeros(4)], [0], 4, _TABLE], r"sums must be float64\[1, 2\].*got float32\[1, 2\]"),
    ("sum_squares_", [_SUMS, [zeros(4)], [0], 4, _TABLE.int()], r"segments must be int64\[1, 4\].*got int32"),
    ("sum_squares_", [_SUMS, [zeros(3)], [0], 3, _TABLE], r"segments\[0\] must be ascending.* within 3 elements"),
    ("sum_squares_", [_SUMS, [zeros(4)], [0], 3, _TABLE], r"offsets\[0\] must lie between 0 and -1 .*, got 0"),
    (
        "sum_squares_",
        [_SUMS, [zeros(4)], [1], 4, _TABLE],
        r"offsets\[0\] must lie between 0 and 0 .*the shard\), got 1",
    ),
    (
        "sum_squares_",
        [_SUMS, [zeros(4)], [], 4, _TABLE],
        r"offsets must have one entry for each of the 1 tensors, got 0",
    ),
    (
        "sum_squares_",
        [_SUMS, [zeros(2), zeros(2, dtype=fp64)], [0, 2], 4, _TABLE],
        r"tensors\[1\] must be float32\[2\] on cpu, got float64\[2\]",
    ),
    (
        "sum_squares_",
        [_SUMS, [zeros(4, dtype=int8)], [0], 4, _TABLE],
        r"tensors\[0\] must be float32 or .*got int8\[4\]",
    ),
    ("sum_squares_", [_SUMS, [zeros(8)[::2]], [0], 4, _TABLE], r"tensors\[0\] must be contiguous, got strides \[2\]"),
    ("sum_pairs_", [zeros(2), zeros(1, 2, dtype=fp64)], r"total must be float64\[2\] on cpu, got float32\[2\]"),
    (
        "sum_pairs_",
        [zeros(2, dtype=fp64), zeros(4, dtype=fp64)],
        r"pairs must be float64\[2, 2\] on cpu, got float64\[4\]",
    ),
    ("sum_pairs_", [zeros(2, dtype=fp64), zeros(2, 4, dtype=fp64)[:, ::2]], r"pairs must be contiguous, got strides"),
    ("flatten_", [zeros(3), [zeros(3)], [], None], r"offsets must have one entry for each of the 1 tensors, got 0"),
    ("flatten_", [zeros(3, 1), [], [], None], r"flat must be .*\[3\] on cpu, got float32\[3, 1\]"),
    ("flatten_", [zeros(6)[::2], [], [], None], r"flat must be contiguous, got strides \[2\]"),
    ("flatten_", [zeros(3), [zeros(3, dtype=torch.int64)], [0], None], r"tensors\[0\] must be float32.*got int64\[3\]"),
    ("flatten_", [zeros(3), [zeros(3)], [0], torch.ones(1)], r"scale must be float32\[\] on cpu, got float32\[1\]"),
    ("flatten_", [zeros(3), [zeros(3)], [0], torch.ones((), dtype=fp64)], r"scale must be float32\[\].*got float64"),
    *(
        (
            "flatten_",
            [zeros(5), [zeros(3), zeros(3)], offsets, None],
            r"offsets\[[01]\] must lie between -?\d+ and -?\d+ \(ascending, disjoint, inside flat\), got -?\d",
        )
        for offsets in ([0, 2], [1, 0], [0, 3], [-1, 3])
    ),
    (
        "flatten_",
        [zeros(7 * 64), [_HIGH.transpose(0, 5).transpose(1, 4).transpose(2, 3)], [0], None],
        r"tensors\[0\] must have at most 6 dimensions that are not one run of memory.*got float32.* with strides",
    ),
    ("unflatten_", [[zeros(3)], zeros(3), [], None], r"offsets must have one entry for each of the 1 tensors, got 0"),
    ("unflatten_", [[zeros(3)], zeros(3), [1], None], r"offsets\[0\] must lie between 0 and 0"),
    (
        "unflatten_",
        [[zeros(1), zeros(1).expand(3)], zeros(4), [0, 1], None],
        r"tensors\[1\] must have no two elements in one place, got strides \[0\]",
    ),
    ("unflatten_", [[zeros(3, dtype=int8)], zeros(3), [0], None], r"tensors\[0\] must be float32.*got int8\[3\]"),
]


def _title(subject: str, message: str) -> str:
    return f"{subject}-{message.split(' must')[0]}".replace("\\", "")


@each_form
@pytest.mark.parametrize(("scheme", "change", "message"), ADAMW, ids=[_title(case[0], case[2]) for case in ADAMW])
def test_adamw_refuses(form: str, scheme: str, change: Callable[[Step], Step], message: str) -> None:
    step = change(make_step(17, scheme))
    before = step.clone()
    with pytest.raises(RuntimeError, match="adamw_: " + message):
        ops.select(form).adamw_(*step.arguments())
    assert_same_step(step, before)


@each_form
@pytest.mark.parametrize(("name", "arguments", "message"), OTHERS, ids=[_title(case[0], case[2]) for case in OTHERS])
def test_other_operators_refuse(form: str, name: str, arguments: list[Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name}: {message}"):
        getattr(ops.select(form), name)(*arguments)


@needs_native
def test_native_and_twin_say_the_same() -> None:
    calls = [("adamw_", change(make_step(17, scheme)).arguments()) for scheme, change, _ in ADAMW]
    calls += [(name, arguments) for name, arguments, _ in OTHERS]
    for name, arguments in calls:
        texts = []
        for operator in (getattr(native(), name), getattr(twins, name)):
            with pytest.raises(RuntimeError) as raised:
                operator(*arguments)
            text = str(raised.value)
            texts.append(text[text.index(f"{name}: ") :].splitlines()[0])
        assert texts[0] == texts[1]


@each_form
def test_unflatten_takes_stride_0_where_it_does_no_harm(form: str) -> None:
    tensors = [zeros(1).expand(1), zeros(1, 3).expand(1, 3), zeros(1).expand(0)]
    ops.select(form).unflatten_(tensors, torch.arange(4.0), [0, 1, 4], None)
    assert tensors[0].tolist() == [0.0] and tensors[1].tolist() == [[1.0, 2.0, 3.0]]


@each_form
def test_flatten_takes_an_expanded_tensor(form: str) -> None:
    flat = zeros(6)
    ops.select(form).flatten_(flat, [torch.tensor([[1.0], [2.0]]).expand(2, 3)], [0], None)
    assert flat.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


@each_form
def test_inactive_segments_need_no_gradient(form: str) -> None:
    step = with_segments(make_step(2 * BLOCK_NUMEL), [[0, 256, 0, 0], [256, 256, 1, 0]], steps=[1.0, 1.0])
    step = replace(step, slot_is_active=torch.tensor([1, 0], dtype=torch.uint8), grads=[step.grad[:256].clone()])
    before = step.clone()
    ops.select(form).adamw_(*step.arguments())
    assert not torch.equal(step.param[:256], before.param[:256])
    assert torch.equal(step.param[256:], before.param[256:])
