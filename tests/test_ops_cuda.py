"""The operators on CUDA, compiled and twins, against the CPU bit for bit. Needs a GPU."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_cases import FLOATS, LARGE, SCHEMES, SIZES, SPECIAL_VALUES, assert_same_bits, assert_same_step, make_step
from torch import Tensor

from zero_shard import ops

# "cpu" tries the tests themselves where there is no GPU.
DEVICE = os.environ.get("ZERO_SHARD_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU")
each_form = pytest.mark.parametrize("form", ["native", "torch"])


def kernels(form: str) -> ops.Kernels:
    if form == "native" and ops.missing_reason(DEVICE) is not None:
        pytest.skip(f"no compiled kernels: {ops.missing_reason(DEVICE)}")
    return ops.select(form, DEVICE)


def on_device(value: Any) -> Any:
    if isinstance(value, list):
        return [on_device(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE).copy_(value)


def compare(operator: Callable[..., None], reference: Callable[..., None], arguments: list[Any]) -> None:
    """Call both, and compare every tensor afterwards; of sums only the high halves."""
    moved = [on_device(value) for value in arguments]
    operator(*moved)
    reference(*arguments)
    ours = [each for value in moved for each in (value if isinstance(value, list) else [value])]
    theirs = [each for value in arguments for each in (value if isinstance(value, list) else [value])]
    for index, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(expected, Tensor):
            is_sum = expected.dtype == torch.float64 and expected.shape[1:] == (2,)
            actual, expected = (actual[:, 0], expected[:, 0]) if is_sum else (actual, expected)
            assert_same_bits(actual.cpu(), expected, f"argument {index}")


@each_form
@pytest.mark.parametrize("scheme", SCHEMES)
def test_adamw_on_cuda_equals_cpu(scheme: str, form: str) -> None:
    for numel, has_max in ((size, has_max) for size in (*SIZES, 70_001) for has_max in (True, False)):
        expected = make_step(numel, scheme, has_max=has_max, scale=0.3, seed=numel, has_param_grads=not has_max)
        actual = expected.to(DEVICE)
        actual = actual.with_split_grads() if numel == 4099 else actual
        for _ in range(2):
            ops.select("auto").adamw_(*expected.arguments())
            kernels(form).adamw_(*actual.arguments())
        assert_same_step(actual.to("cpu"), expected, f"{numel}")


@each_form
@pytest.mark.parametrize("scheme", ["fp32", "bf16_remainder", "bf16_stochastic_int8"])
def test_adamw_on_cuda_equals_cpu_large(scheme: str, form: str) -> None:
    expected = make_step(LARGE, scheme)
    actual = expected.to(DEVICE)
    ops.select("auto").adamw_(*expected.arguments())
    kernels(form).adamw_(*actual.arguments())
    assert_same_step(actual.to("cpu"), expected)


@each_form
@pytest.mark.parametrize("dtype", FLOATS)
def test_copies_on_cuda_equal_cpu(dtype: torch.dtype, form: str) -> None:
    random = torch.Generator().manual_seed(0)
    tensors, offsets, end = [], [], 1
    for number, source in enumerate((*FLOATS, *FLOATS)):
        values = torch.randn(7, 11, 91, generator=random).to(source)
        special = torch.tensor(SPECIAL_VALUES, dtype=torch.float64).to(source)
        for each in (values.permute(2, 0, 1), values[:, ::2, 1:], special, values[:0]):
            tensors.append(each)
            offsets.append(end)
            end += each.numel() + number % 3
    for scale in (None, torch.tensor(0.3)):
        flat = torch.full((end + 2,), 7.0, dtype=dtype)
        compare(kernels(form).flatten_, ops.select("auto").flatten_, [flat, tensors, offsets, scale])
        compare(kernels(form).unflatten_, ops.select("auto").unflatten_, [tensors, flat, offsets, scale])


@each_form
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_on_cuda_equal_cpu(dtype: torch.dtype, form: str) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for numel in (*SIZES, 70_001, LARGE):
        random = torch.Generator().manual_seed(numel)
        slices = torch.randn(3, numel, generator=random).to(dtype)
        cuts = itertools.pairwise([0, numel // 7, numel // 7, numel // 3, numel])
        rows = [[start, stop - start, slot, 16 * slot] for slot, (start, stop) in enumerate(cuts)]
        segments, sums = torch.tensor(rows), torch.empty(len(rows), 2, dtype=torch.float64)
        reference = ops.select("auto")
        for accumulate in (False, True):
            arguments = [torch.ones(numel, dtype=wide), slices, 3, accumulate, segments, sums]
            compare(kernels(form).reduce_slices_, reference.reduce_slices_, arguments)
        tensors, offsets = [slices[0][: numel // 2], slices[0][numel // 2 + 1 :]], [0, numel // 2 + 1]
        if numel == 0:
            tensors, offsets = [], []
        compare(kernels(form).sum_squares_, reference.sum_squares_, [sums, tensors, offsets, numel, segments])
        total = torch.empty(2, dtype=torch.float64)
        reference.sum_pairs_(total, sums)
        actual = torch.empty(2, dtype=torch.float64, device=DEVICE)
        kernels(form).sum_pairs_(actual, on_device(sums))
        assert_same_bits(actual[0].cpu(), total[0])


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_wire_on_cuda_equals_cpu(dtype: torch.dtype, form: str) -> None:
    for num_blocks in (1, 5, 1024):
        values = torch.randn(3 * 256 * num_blocks, generator=torch.Generator().manual_seed(num_blocks)).to(dtype)
        values[7] = float("nan")
        wire = torch.zeros(3 * 260 * num_blocks, dtype=torch.uint8)
        compare(kernels(form).quantize_, ops.select("auto").quantize_, [wire, values])
        ops.select("auto").quantize_(wire, values)
        arguments = [torch.ones(256 * num_blocks), wire.view(3, -1), 3, True, None, None]
        compare(kernels(form).reduce_slices_, ops.select("auto").reduce_slices_, arguments)


@each_form
def test_found_inf_and_scale_are_read_on_cuda(form: str) -> None:
    """The step waits for nothing, so a flag that is set by the work before it is seen."""
    before = make_step(4099, "bf16_remainder")
    for value in (0.0, 1.0, float("nan")):
        step = before.to(DEVICE)
        flag = torch.tensor(value, device=DEVICE) * 1.0
        values = step.arguments()
        values[-2] = flag
        kernels(form).adamw_(*values)
        if value == 0.0:
            assert not torch.equal(step.to("cpu").param, before.param)
        else:
            assert_same_step(step.to("cpu"), before)
