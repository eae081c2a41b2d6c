"""quantize_, and reduce_slices_ of what it writes: blocks of 260 bytes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from op_cases import assert_same_bits, each_form, instruction_sets, native, needs_native, threads
from torch import Tensor

from zero_shard import ops, twins

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_values(num_blocks: int, dtype: torch.dtype, is_special: bool = True) -> Tensor:
    """Blocks of differing magnitude; the first are zeros, tiny numbers, ties, and three that are not finite."""
    generator = torch.Generator().manual_seed(num_blocks)
    blocks = torch.randn(num_blocks, 256, generator=generator)
    blocks *= 10.0 ** torch.randint(-4, 4, (num_blocks, 1), generator=generator)
    special = [torch.zeros(256), torch.full((256,), 1e-42), torch.arange(256) / 2 - 63.5, *blocks[:3].clone()]
    for row, bad in zip(special[3:], (math.nan, math.inf, -math.inf), strict=False):
        row[100] = bad
    for index, row in enumerate(special[:num_blocks] if is_special else []):
        blocks[index] = row
    return blocks.view(-1).to(dtype)


def quantized(form: str, values: Tensor) -> Tensor:
    wire = torch.full((values.numel() // 256 * 260,), 99, dtype=torch.uint8)
    ops.select(form).quantize_(wire, values)
    return wire


def decoded(form: str, wire: Tensor) -> Tensor:
    out = torch.full((wire.numel() // 260 * 256,), 7.0)
    ops.select(form).reduce_slices_(out, wire.view(1, -1), 1, False, None, None)
    return out


@each_form
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_is_off_by_half_a_step_at_most(dtype: torch.dtype, form: str) -> None:
    values = make_values(40, dtype)
    exact, got = values.double().view(-1, 256), decoded(form, quantized(form, values)).double().view(-1, 256)
    is_finite = exact.isfinite().all(1)
    assert not is_finite[3:6].any() and is_finite.sum() == 37
    assert got[~is_finite].isnan().all(), "a block that is not finite is NaN as a whole"
    largest = exact.abs().amax(1, keepdim=True)
    # A product of up to 127 is rounded before it takes the nearest code; tiny blocks take a raised scale.
    limit = (largest.clamp(min=2.0**-100) / 254) * (1 + 2.0**-14)
    assert ((got - exact).abs() <= limit)[is_finite].all()
    assert (got[0] == 0).all() and (got[1] == 0).all()


@each_form
def test_ties_go_to_even_and_the_largest_stays(form: str) -> None:
    values = torch.arange(256) / 2 - 63.5
    values[0] = 127.0
    got = decoded(form, quantized(form, values))
    assert torch.equal(got, values.round())


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_equals_twin(dtype: torch.dtype) -> None:
    """Bytes and sums, on all instruction sets and thread counts, misaligned."""
    values = make_values(3 * 203, dtype)
    wire = torch.empty(3 * 203 * 260, dtype=torch.uint8)
    twins.quantize_(wire, values)
    numel = 203 * 256
    segments = torch.tensor([[0, 300, 0, 0], [512, 1, 1, 512], [768, numel - 1000, 2, 1 << 33]])
    expected, sums = torch.ones(numel), torch.empty(3, 2, dtype=torch.float64)
    twins.reduce_slices_(expected, wire.view(3, -1), 3, True, segments, sums)
    for instruction_set, count in itertools.product(instruction_sets(), (1, 3)):
        with threads(count):
            actual = torch.zeros(wire.numel() + 1, dtype=torch.uint8)[1:]
            native().quantize_(actual, torch.cat([values[:1], values])[1:])
            assert torch.equal(actual, wire), instruction_set
            out, out_sums = torch.ones(numel + 3)[3:], torch.empty_like(sums)
            native().reduce_slices_(out, actual.view(3, -1), 3, True, segments, out_sums)
        assert_same_bits(out, expected, instruction_set)
        assert_same_bits(out_sums[:, 0], sums[:, 0], instruction_set)


@each_form
def test_slices_add_up_in_rank_order(form: str) -> None:
    """The definition: decode, add one rank after the other in float32, divide."""
    values = make_values(3 * 8, torch.float32, is_special=False)
    wire = quantized(form, values)
    first, second, third = decoded(form, wire).view(3, -1)
    out = torch.empty(8 * 256)
    ops.select(form).reduce_slices_(out, wire.view(3, -1), 5, False, None, None)
    assert_same_bits(out, (first + second + third) / torch.tensor(5.0))
