"""flatten_ and unflatten_: any shapes, strides and dtypes, and back."""

from __future__ import annotations

import itertools

import pytest
import torch
from op_cases import (
    FLOATS,
    LARGE,
    SIZES,
    SPECIAL_VALUES,
    assert_same_bits,
    each_form,
    instruction_sets,
    native,
    needs_native,
    threads,
)
from torch import Tensor

from zero_shard import ops, twins


def _strided(values: Tensor, kind: int) -> Tensor:
    """Return the values in a tensor of the same shape whose memory lies otherwise."""
    if values.dim() == 0 or kind == 0:
        return values
    if kind == 1:  # transposed
        order = list(range(values.dim()))[::-1]
        return values.permute(order).contiguous().permute(order)
    if kind == 2:  # every third element of each row
        wide = torch.full((*values.shape[:-1], values.shape[-1] * 3), float("nan"), dtype=values.dtype)
        wide[..., ::3] = values
        return wide[..., ::3]
    if kind == 3:  # rows of a wider matrix, whose first element is not the memory's first
        wide = torch.full((*values.shape[:-1], values.shape[-1] + 5), float("nan"), dtype=values.dtype)
        wide[..., 2:-3] = values
        return wide[..., 2:-3]
    if values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    return values.movedim(0, -1).contiguous().movedim(-1, 0)


_SHAPES = [
    (),
    (3,),
    (0,),
    (17, 5),
    (2, 3, 4, 5),
    (257,),
    (4099,),
    (0, 3),
    (1, 7, 1),
    (5, 1, 2, 1, 3),
    (2, 3, 2, 3, 2, 3),
]


def make_copies(offset_of_first: int = 1) -> tuple[list[Tensor], list[int], int]:
    """Tensors of every dtype, shape and memory order and of special values, with gaps; the last is empty."""
    random = torch.Generator().manual_seed(1)
    tensors: list[Tensor] = []
    for number, (kind, shape) in enumerate(itertools.product(range(5), _SHAPES)):
        values = torch.randn(shape, generator=random).mul_(1000).to(FLOATS[(number + number // 4) % 4])
        tensors.append(_strided(values, kind))
    special = torch.tensor(SPECIAL_VALUES, dtype=torch.float64)
    tensors += [_strided(special.to(source), kind) for source in FLOATS for kind in (0, 2)]
    tensors.append(torch.zeros(0))
    offsets, end = [], offset_of_first
    for number, tensor in enumerate(tensors):
        end += number % 3
        offsets.append(end)
        end += tensor.numel()
    return tensors, offsets, end


def scaled(values: Tensor, scale: float | None, target: torch.dtype) -> Tensor:
    """The definition: the product in float32, or in float64 where one side is that, then one cast as by Tensor.to."""
    if scale is None:
        return values.to(target)
    wide = torch.float64 if torch.float64 in (values.dtype, target) else torch.float32
    return (values.to(wide) * torch.tensor(scale, dtype=torch.float32).to(wide)).to(target)


def scale_tensor(scale: float | None) -> Tensor | None:
    return None if scale is None else torch.tensor(scale, dtype=torch.float32)


SCALES = [None, 1.0, 0.3, -(2.0**-20)]
each_scale = pytest.mark.parametrize("scale", SCALES)


@each_form
@each_scale
@pytest.mark.parametrize("dtype", FLOATS)
def test_flatten_copies_in_row_major_order_and_zeroes_gaps(dtype: torch.dtype, scale: float | None, form: str) -> None:
    tensors, offsets, numel = make_copies()
    flat = torch.full((numel + 3,), float("nan"), dtype=dtype)
    ops.select(form).flatten_(flat, tensors, offsets, scale_tensor(scale))
    expected = torch.zeros(numel + 3, dtype=dtype)
    for tensor, offset in zip(tensors, offsets, strict=True):
        expected[offset : offset + tensor.numel()] = scaled(tensor.reshape(-1), scale, dtype)
    assert_same_bits(flat, expected)


@each_form
@each_scale
@pytest.mark.parametrize("dtype", FLOATS)
def test_unflatten_fills_the_tensors_and_nothing_else(dtype: torch.dtype, scale: float | None, form: str) -> None:
    tensors, offsets, numel = make_copies()
    random = torch.Generator().manual_seed(2)
    flat = torch.randn(numel + 3, generator=random).mul_(1000).to(dtype)
    flat[: len(SPECIAL_VALUES)] = torch.tensor(SPECIAL_VALUES, dtype=torch.float64).to(dtype)
    flat[numel - len(SPECIAL_VALUES) : numel] = torch.tensor(SPECIAL_VALUES, dtype=torch.float64).to(dtype)
    bases = [tensor._base if tensor._base is not None else tensor for tensor in tensors]
    before = [base.clone() for base in bases]
    source = flat.clone()
    ops.select(form).unflatten_(tensors, flat, offsets, scale_tensor(scale))
    assert_same_bits(flat, source)
    for tensor, offset, base, old in zip(tensors, offsets, bases, before, strict=True):
        part = flat[offset : offset + tensor.numel()].view(tensor.shape)
        assert_same_bits(tensor, scaled(part, scale, tensor.dtype))
        # What lies between a view's elements stays.
        tensor.zero_()
        old.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).zero_()
        assert_same_bits(base, old, "the memory around a tensor")


@needs_native
@each_scale
@pytest.mark.parametrize("dtype", FLOATS)
def test_copies_native_equal_twins(dtype: torch.dtype, scale: float | None) -> None:
    """Tensors that several threads share, on all instruction sets, with misaligned flat buffers."""
    tensors, offsets, numel = make_copies()
    random = torch.Generator().manual_seed(3)
    for kind, source in enumerate(FLOATS):
        tensors.append(_strided(torch.randn(7, 11, 911, generator=random).to(source), kind + 1))
        offsets.append(numel + 5)
        numel += tensors[-1].numel() + 5
    expected = torch.full((numel,), float("nan"), dtype=dtype)
    twins.flatten_(expected, tensors, offsets, scale_tensor(scale))
    outcome = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).fill_(7.0) for t in tensors]
    twins.unflatten_(outcome, expected, offsets, scale_tensor(scale))
    for instruction_set, (count, num_misaligned) in zip(instruction_sets(), ((1, 0), (2, 1), (5, 3)), strict=False):
        with threads(count):
            actual = torch.full((numel + num_misaligned,), float("nan"), dtype=dtype)[num_misaligned:]
            native().flatten_(actual, tensors, offsets, scale_tensor(scale))
            assert_same_bits(actual, expected, instruction_set)
            filled = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).fill_(7.0) for t in tensors]
            native().unflatten_(filled, actual, offsets, scale_tensor(scale))
        for index, (ours, theirs) in enumerate(zip(filled, outcome, strict=True)):
            assert_same_bits(ours, theirs, f"{instruction_set} tensor {index}")


@each_form
def test_copies_of_every_size(form: str) -> None:
    """Contiguous, misaligned and transposed; there and back; the largest spans several chunks and threads' ranges."""
    kernels = ops.select(form)
    for numel in (*SIZES, LARGE):
        values = torch.arange(numel, dtype=torch.float32)
        for tensor in (
            values,
            torch.cat([values[:1], values])[min(numel, 1) :],
            values.view(1, -1).t(),
            values.flip(0),
        ):
            flat = torch.full((numel + 2,), float("nan"))
            kernels.flatten_(flat, [tensor], [1], None)
            assert torch.equal(flat[1:-1], tensor.reshape(-1))
            assert flat[0] == 0 and flat[-1] == 0
            back = torch.empty_like(tensor)
            kernels.unflatten_([back], flat, [1], None)
            assert torch.equal(back, tensor)


@each_form
def test_copies_cut_tensors_of_any_shape_where_threads_meet(form: str) -> None:
    """Rows longer than a chunk of the twin, and many short ones."""
    kernels = ops.select(form)
    with threads(2):
        for shape in ((3, LARGE // 2), (LARGE // 3, 3), (2, 2, LARGE // 4 + 1), (1, 1, 7, 150001)):
            tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
            for each in (tensor, tensor.transpose(-1, -2), torch.cat([tensor, tensor], -1)[..., 1::2]):
                flat = torch.empty(each.numel())
                kernels.flatten_(flat, [each], [0], None)
                assert torch.equal(flat, each.reshape(-1))
                back = torch.empty_strided(each.shape, each.stride()).zero_()
                kernels.unflatten_([back], flat, [0], None)
                assert torch.equal(back, each)


@each_form
def test_copies_between_equal_dtypes_keep_the_bits(form: str) -> None:
    """Also the payload of a NaN, which no arithmetic keeps for certain."""
    patterns = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC01234, 1, -(1 << 31)], dtype=torch.int32)
    for dtype, integer in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float16, torch.int16)):
        tensor = patterns.view(integer).view(dtype)
        for each in (tensor, tensor.view(2, -1).t()):
            flat = torch.zeros(each.numel(), dtype=dtype)
            ops.select(form).flatten_(flat, [each], [0], None)
            assert torch.equal(flat.view(integer), each.contiguous().view(integer).flatten())
            back = torch.empty_like(each)
            ops.select(form).unflatten_([back], flat, [0], None)
            assert torch.equal(back.contiguous().view(integer), each.contiguous().view(integer))


@needs_native
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_casts_to_16_bits_equal_torch_for_every_pattern(target: torch.dtype) -> None:
    """All 2^16 upper halves with lower halves around each rounding boundary, and all 2^16 numbers back."""
    pattern = torch.arange(1 << 16, dtype=torch.int64).repeat_interleave(8) << 16
    pattern += torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001]).repeat(1 << 16)
    source = torch.where(pattern >= 1 << 31, pattern - (1 << 32), pattern).to(torch.int32).view(torch.float32)
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(target)
    for instruction_set in instruction_sets():
        narrow = torch.empty(source.numel(), dtype=target)
        native().flatten_(narrow, [source], [0], None)
        assert_same_bits(narrow, source.to(target), instruction_set)
        wide = torch.empty(every.numel())
        native().flatten_(wide, [every], [0], None)
        assert_same_bits(wide, every.float(), instruction_set)


@each_form
def test_flatten_of_nothing_is_zero(form: str) -> None:
    for numel in (0, 5):
        flat = torch.full((numel,), 7.0)
        ops.select(form).flatten_(flat, [], [], None)
        assert torch.equal(flat, torch.zeros(numel))
        ops.select(form).unflatten_([], flat, [], None)


@each_form
def test_flatten_trailing_empty_tensor_drops_nothing(form: str) -> None:
    values, empty = torch.arange(5.0), torch.zeros(0, 3)
    for tensors, offsets in (([values, empty], [1, 6]), ([empty, values, empty, empty], [0, 1, 6, 7])):
        flat = torch.full((7,), 9.0)
        ops.select(form).flatten_(flat, tensors, offsets, None)
        assert flat.tolist() == [0, 0, 1, 2, 3, 4, 0]
        filled = [torch.empty_like(tensor) for tensor in tensors]
        ops.select(form).unflatten_(filled, flat, offsets, None)
        for actual, expected in zip(filled, tensors, strict=True):
            assert torch.equal(actual, expected)


@each_form
def test_many_small_tensors(form: str) -> None:
    """20,000 tensors in one call, some of them transposed."""
    flat = torch.arange(60_000.0)
    tensors = [flat[3 * i : 3 * i + i % 4 % 3].clone() for i in range(20_000)]
    offsets = [3 * i for i in range(20_000)]
    tensors[7::100] = [torch.full((2, 1), float(i)).t() for i in range(200)]
    joined = torch.full((60_000,), float("nan"))
    ops.select(form).flatten_(joined, tensors, offsets, None)
    expected = torch.zeros(60_000)
    for tensor, offset in zip(tensors, offsets, strict=True):
        expected[offset : offset + tensor.numel()] = tensor.reshape(-1)
    assert torch.equal(joined, expected)
