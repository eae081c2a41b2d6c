"""reduce_slices_, sum_squares_ and sum_pairs_: sums in one order, and sums that do not depend on the order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

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

# --- reduce_slices_ ---------------------------------------------------------------------------------------


def make_slices(world_size: int, numel: int, dtype: torch.dtype, is_special: bool = True) -> Tensor:
    random = torch.Generator().manual_seed(numel)
    slices = torch.randn(world_size, numel, generator=random).mul_(100).to(dtype)
    if is_special and numel >= len(SPECIAL_VALUES):
        slices[0, : len(SPECIAL_VALUES)] = torch.tensor(SPECIAL_VALUES).to(dtype)
        slices[-1, : len(SPECIAL_VALUES)] = torch.tensor(SPECIAL_VALUES).to(dtype).flip(0)
    return slices


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@each_form
@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_slices_adds_in_rank_order(dtype: torch.dtype, form: str) -> None:
    """The definition, one IEEE operation after the other; exact, so no tolerance."""
    wide = wide_dtype(dtype)
    for numel, world_size, divisor in itertools.product((*SIZES, 1025), (1, 2, 3, 8), (1, 3)):
        slices = make_slices(world_size, numel, dtype)
        quotient = slices[0].to(wide)
        for rank in range(1, world_size):
            quotient = quotient + slices[rank].to(wide)
        quotient = quotient / torch.tensor(divisor, dtype=wide)
        out = torch.full((numel,), float("nan"), dtype=wide)
        ops.select(form).reduce_slices_(out, slices, divisor, False, None, None)
        assert_same_bits(out, quotient)
        ops.select(form).reduce_slices_(out, slices, divisor, True, None, None)
        assert_same_bits(out, quotient + quotient)


@each_form
@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_slices_takes_the_own_slice_from_elsewhere(dtype: torch.dtype, form: str) -> None:
    wide, kernels = wide_dtype(dtype), ops.select(form)
    for numel, world_size in itertools.product((*SIZES, 1025), (2, 3, 8)):
        slices, segments = make_slices(world_size, numel, dtype), make_segments(numel)
        expected, expected_sums = torch.ones(numel, dtype=wide), torch.empty(len(segments), 2, dtype=torch.float64)
        kernels.reduce_slices_(expected, slices, 3, True, segments, expected_sums)
        for own_rank in range(world_size):
            others = torch.cat([slices[:own_rank], slices[own_rank + 1 :]])
            own = torch.cat([slices[own_rank, :1], slices[own_rank]])[slices[own_rank, :1].numel() :]  # misaligned
            out, sums = torch.ones(numel, dtype=wide), torch.empty_like(expected_sums)
            kernels.reduce_slices_(out, others, 3, True, segments, sums, own, own_rank)
            assert_same_bits(out, expected, f"{numel} {world_size} {own_rank}")
            assert_same_bits(sums, expected_sums, f"{numel} {world_size} {own_rank}")


@each_form
def test_reduce_slices_sums_in_float32(form: str) -> None:
    """256 slices of bf16: a running sum in bf16 would stop growing at 256 of the 2560."""
    slices = torch.full((256, 5), 10.0, dtype=torch.bfloat16)
    slices[0] = 10.0625
    out = torch.zeros(5)
    ops.select(form).reduce_slices_(out, slices, 256, False, None, None)
    torch.testing.assert_close(out, torch.full((5,), (10.0 * 255 + 10.0625) / 256), rtol=1e-7, atol=0)


@needs_native
@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_slices_native_equals_twin(dtype: torch.dtype) -> None:
    """With and without sums, on all instruction sets and thread counts, misaligned."""
    numel = (1 << 17) + 1
    slices, wide = make_slices(3, numel, dtype, is_special=False), wide_dtype(dtype)
    segments = make_segments(numel)
    expected, sums = torch.ones(numel, dtype=wide), torch.empty(len(segments), 2, dtype=torch.float64)
    twins.reduce_slices_(expected, slices, 3, True, segments, sums)
    low = None
    for instruction_set, count in itertools.product(instruction_sets(), (1, 2, 5)):
        with threads(count):
            plain = torch.ones(numel + 3, dtype=wide)[3:]
            native().reduce_slices_(plain, slices, 3, True, None, None)
            actual, actual_sums = torch.ones(numel + 1, dtype=wide)[1:], torch.empty_like(sums)
            native().reduce_slices_(actual, slices[:2], 3, True, segments, actual_sums, slices[2], 2)
        assert_same_bits(plain, expected, instruction_set)
        assert_same_bits(actual, expected, instruction_set)
        assert_same_bits(actual_sums[:, 0], sums[:, 0], f"{instruction_set} {count} sums")
        low = actual_sums[:, 1] if low is None else low
        assert_same_bits(actual_sums[:, 1], low, f"{instruction_set} {count} low")


@each_form
@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_slices_sums_are_those_of_its_result(dtype: torch.dtype, form: str) -> None:
    """After writing and after accumulating, for every size: what sum_squares_ says of the finished gradient."""
    kernels, wide = ops.select(form), wide_dtype(dtype)
    for numel, is_special, accumulate in itertools.product(SIZES, (False, True), (False, True)):
        slices, segments = make_slices(2, numel, dtype, is_special), make_segments(numel)
        out, sums = torch.ones(numel, dtype=wide), torch.full((len(segments), 2), 7.0, dtype=torch.float64)
        kernels.reduce_slices_(out, slices, 2, accumulate, segments, sums)
        expected = sum_squares(form, [out], [0], numel, segments)
        assert_same_bits(sums[:, 0], expected[:, 0])
        torch.testing.assert_close(sums[:, 1], expected[:, 1], rtol=2.0**-40, atol=0.0, equal_nan=True)


# --- sum_squares_ -----------------------------------------------------------------------------------------


def make_segments(numel: int, num_cuts: int = 6) -> Tensor:
    """Segments with gaps, empty ones, and starts anywhere in their parameters."""
    random = torch.Generator().manual_seed(numel + 1)
    cuts = sorted(torch.randint(0, numel + 1, (num_cuts,), generator=random).tolist())
    rows = []
    for slot, (start, stop) in enumerate(itertools.pairwise([0, *cuts, numel])):
        length = max(stop - start - 2, 0) if slot % 3 == 1 else stop - start
        rows.append([start, length, slot, (0, 16 * slot, 256 * slot, 5 * slot + (1 << 33))[slot % 4]])
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4)


def sum_squares(form: str, tensors: Sequence[Tensor], offsets: Sequence[int], numel: int, segments: Tensor) -> Tensor:
    sums = torch.full((len(segments), 2), float("nan"), dtype=torch.float64)
    ops.select(form).sum_squares_(sums, list(tensors), list(offsets), numel, segments)
    return sums


def lane_partials(values: list[float], param_start: int, chunk_numel: int) -> list[float]:
    """The definition in plain Python: squares folded by halves within chunks, until 16 lanes are left."""
    chunks: dict[int, list[float]] = {}
    for i, value in enumerate(values):
        chunk = chunks.setdefault((param_start + i) // chunk_numel, [0.0] * chunk_numel)
        chunk[(param_start + i) % chunk_numel] = value * value
    partials = []
    for chunk in chunks.values():
        while len(chunk) > 16:
            half = len(chunk) // 2
            chunk = [chunk[i] + chunk[i + half] for i in range(half)]
        partials += chunk
    return partials


def exact(values: Sequence[float]) -> Fraction:
    return sum((Fraction(value) for value in values), Fraction(0))


def values_of(numel: int, dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    random = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=random, dtype=torch.float64)
    return (values * torch.exp(torch.randn(numel, generator=random, dtype=torch.float64) * spread)).to(dtype)


@each_form
@pytest.mark.parametrize("dtype", FLOATS)
def test_sum_squares_is_the_rounded_sum_of_the_canonical_partials(dtype: torch.dtype, form: str) -> None:
    for numel, spread in itertools.product(SIZES, (1.0, 10.0)):
        values, segments = values_of(numel, dtype, spread if dtype == torch.float64 else 1.0), make_segments(numel)
        sums = sum_squares(form, [values], [0], numel, segments).tolist()
        for (start, length, _, param_start), (high, low) in zip(segments.tolist(), sums, strict=True):
            part = values[start : start + length].double().tolist()
            partials = lane_partials(part, param_start, 16 if dtype == torch.float64 else 256)
            assert high == math.fsum(partials), (numel, start, length)
            # As a pair it holds about 100 bits of what the partials sum to, and 48 bits or more of the squares.
            total, squares = exact(partials), exact([]) + sum((Fraction(v) ** 2 for v in part), Fraction(0))
            error = abs(Fraction(high) + Fraction(low) - total)
            assert error <= total / 2**95, (numel, start, length)
            assert abs(low) <= math.ulp(high) / 2
            assert abs(total - squares) <= squares / 2**49


@each_form
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_do_not_depend_on_the_shards(dtype: torch.dtype, form: str) -> None:
    """One parameter in 1 to 9 shards cut at multiples of 16 or of 256 elements, each of which adds its pairs."""
    numel = 9000
    values = values_of(numel, dtype)
    whole = sum_squares(form, [values], [0], numel, torch.tensor([[0, numel, 0, 0]]))[0]
    for unit, num_shards, seed in itertools.product((16, 256), (1, 2, 3, 9), range(3)):
        random = torch.Generator().manual_seed(seed)
        cuts = (torch.randperm(numel // unit, generator=random)[: num_shards - 1] * unit).sort().values.tolist()
        pairs = []
        for start, stop in itertools.pairwise([0, *cuts, numel]):
            # In the shard it lies behind something else.
            shard = torch.cat([torch.full((32,), 9.0, dtype=dtype), values[start:stop]])
            segments = torch.tensor([[32, stop - start, 0, start]])
            pairs.append(sum_squares(form, [shard], [0], shard.numel(), segments)[0])
        total = torch.empty(2, dtype=torch.float64)
        ops.select(form).sum_pairs_(total, torch.stack(pairs))
        if dtype == torch.float64 or unit == 256:
            assert total[0].item() == whole[0].item(), (unit, num_shards)
        else:  # a chunk that is cut is rounded otherwise, far below float32
            assert total[0].float().item() == whole[0].float().item(), (unit, num_shards)
            assert abs(total[0] - whole[0]) <= whole[0] * 2.0**-50


@needs_native
@pytest.mark.parametrize("dtype", FLOATS)
def test_sum_squares_native_equals_twin(dtype: torch.dtype) -> None:
    """2^18 + 1 elements in several tensors that cover them in part, on all instruction sets and thread counts."""
    numel = (1 << 18) + 1
    values, segments = values_of(numel, dtype), make_segments(numel, 40)
    bounds = [0, 1, 1, 17, 5000, 16384, 20001, 100_000, 100_000, 262_000, numel]
    places = [pair for i, pair in enumerate(itertools.pairwise(bounds)) if i not in (4, 6)]
    tensors, offsets = [values[start:stop] for start, stop in places], [start for start, _ in places]
    expected = sum_squares("torch", tensors, offsets, numel, segments)
    covered = torch.zeros(numel, dtype=dtype)
    for start, stop in places:
        covered[start:stop] = values[start:stop]
    assert_same_bits(sum_squares("torch", [covered], [0], numel, segments), expected, "what is not covered is 0")
    low = None
    for instruction_set, count in itertools.product(instruction_sets(), (1, 2, 5)):
        with threads(count):
            actual = sum_squares("native", tensors, offsets, numel, segments)
        assert_same_bits(actual[:, 0], expected[:, 0], f"{instruction_set} {count}")
        torch.testing.assert_close(actual[:, 1], expected[:, 1], rtol=2.0**-40, atol=0.0)
        low = actual[:, 1] if low is None else low
        assert_same_bits(actual[:, 1], low, f"{instruction_set} {count} low")


@each_form
def test_sum_squares_large(form: str) -> None:
    """2^20 + 1 elements in one segment, which the twin does in several windows: against exact integers."""
    random = torch.Generator().manual_seed(0)
    whole = torch.randint(-(1 << 23), 1 << 23, (LARGE,), generator=random)
    total = sum(value * value for value in whole.tolist())
    high, low = sum_squares(form, [whole.float()], [0], LARGE, torch.tensor([[0, LARGE, 0, 48]])).tolist()[0]
    assert total > 2**60
    assert (high, low) == (float(total), float(total - int(float(total)))), "integers of 24 bits lose nothing"


@each_form
@pytest.mark.parametrize("dtype", FLOATS)
def test_sum_squares_of_inf_and_nan_is_not_finite(dtype: torch.dtype, form: str) -> None:
    for numel, place in ((1, 0), (300, 299), (300, 17), (4099, 2048)):
        segments = torch.tensor([[0, numel, 0, 0], [numel, 5, 1, 0]])
        for value in (math.inf, -math.inf, math.nan):
            values = torch.ones(numel + 5, dtype=dtype)
            values[place] = value
            (high, _), second = sum_squares(form, [values], [0], numel + 5, segments).tolist()
            assert math.isnan(high) if math.isnan(value) else high == math.inf
            assert second == [5.0, 0.0], "another segment is not touched by it"
            pairs, total = sum_squares(form, [values], [0], numel + 5, segments), torch.zeros(2, dtype=torch.float64)
            ops.select(form).sum_pairs_(total, pairs)
            assert math.isnan(total[0]) if math.isnan(value) else total[0] == math.inf
    if dtype == torch.float64:
        values = torch.full((20,), 1e160, dtype=dtype)
        assert sum_squares(form, [values], [0], 20, torch.tensor([[0, 20, 0, 0]])).tolist() == [[math.inf, 0.0]]


@each_form
def test_sum_squares_of_denormals_and_large_values_loses_nothing(form: str) -> None:
    """Float values whose squares float32 holds as 0 or inf."""
    for value in (1e-45, 1e-40, 3e38):
        values = torch.full((512,), value)
        expected = float(values[0].double() ** 2 * 512)
        assert 0 < expected < math.inf
        assert sum_squares(form, [values], [0], 512, torch.tensor([[0, 512, 0, 0]])).tolist() == [[expected, 0.0]]


@each_form
def test_sum_squares_keeps_what_lies_far_below_the_sum(form: str) -> None:
    """A million small squares beside a large one: plain float64 would drop each of them."""
    values = torch.full((1 << 16,), 2.0**-30)
    values[0] = 1.0
    (high, low) = sum_squares(form, [values], [0], 1 << 16, torch.tensor([[0, 1 << 16, 0, 0]])).tolist()[0]
    assert Fraction(high) + Fraction(low) == 1 + Fraction(2**16 - 1, 2**60) - Fraction(15, 2**60), (
        "16 share a lane of 1"
    )


@each_form
def test_sum_squares_trailing_empty_tensor_drops_nothing(form: str) -> None:
    values, empty = torch.full((40,), 2.0), torch.zeros(0)
    segments = torch.tensor([[0, 0, 0, 0], [0, 40, 1, 0], [40, 0, 2, 0], [40, 3, 3, 0]])
    for tensors, offsets in (([values, empty], [0, 40]), ([empty, values, empty, empty], [0, 0, 40, 43])):
        assert sum_squares(form, tensors, offsets, 43, segments).tolist() == [[0, 0], [160, 0], [0, 0], [0, 0]]
    assert sum_squares(form, [], [], 43, segments).tolist() == [[0, 0]] * 4
    assert sum_squares(form, [empty], [0], 0, segments[:0]).tolist() == []


@each_form
def test_sum_squares_takes_tensors_of_any_shape(form: str) -> None:
    values = values_of(60, torch.float32)
    segments = torch.tensor([[0, 60, 0, 0]])
    expected = sum_squares(form, [values], [0], 60, segments)
    assert torch.equal(
        sum_squares(form, [values[:24].view(2, 3, 4), values[24:].view(6, 6)], [0, 24], 60, segments), expected
    )


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sum_squares_of_many_small_segments(dtype: torch.dtype, form: str) -> None:
    count = 20_000
    segments = torch.tensor([[3 * i, i % 4, i, 16 * (i % 50)] for i in range(count)])
    values = values_of(3 * count, dtype)
    sums = sum_squares(form, [values], [0], 3 * count, segments)
    squares = values.double() ** 2
    expected = [math.fsum(squares[3 * i : 3 * i + i % 4].tolist()) for i in range(count)]
    assert sums[:, 0].tolist() == expected


# --- sum_pairs_ -------------------------------------------------------------------------------------------


@each_form
def test_sum_pairs_is_the_rounded_exact_sum(form: str) -> None:
    random = torch.Generator().manual_seed(0)
    for count in (0, 1, 2, 3, 17, 1000):
        high = torch.rand(count, generator=random, dtype=torch.float64) * torch.exp(
            torch.randn(count, generator=random, dtype=torch.float64) * 10
        )
        low = high * (torch.rand(count, generator=random, dtype=torch.float64) - 0.5) * 2.0**-53
        pairs, total = torch.stack([high, low], 1), torch.full((2,), float("nan"), dtype=torch.float64)
        ops.select(form).sum_pairs_(total, pairs)
        everything = exact(pairs.flatten().tolist())
        assert total[0].item() == float(everything)
        assert abs(Fraction(total[0].item()) + Fraction(total[1].item()) - everything) <= everything / 2**95
        shuffled, again = pairs[torch.randperm(count, generator=random)], torch.empty(2, dtype=torch.float64)
        ops.select(form).sum_pairs_(again, shuffled)
        assert again[0].item() == total[0].item(), "the order leaves no trace"


@needs_native
def test_sum_pairs_native_equals_twin() -> None:
    random = torch.Generator().manual_seed(0)
    specials = [0.0, -0.0, math.inf, math.nan, 5e-324, 1e308, 2.0**-1074]
    for values in [*itertools.product(specials, specials), torch.rand(500, generator=random).tolist()]:
        pairs = torch.tensor([[value, value * 2.0**-55 if math.isfinite(value) else 0.0] for value in values])
        pairs = pairs.double()
        expected = torch.empty(2, dtype=torch.float64)
        twins.sum_pairs_(expected, pairs)
        for _ in instruction_sets():
            actual = torch.empty(2, dtype=torch.float64)
            native().sum_pairs_(actual, pairs)
            assert_same_bits(actual[0], expected[0], str(values))
