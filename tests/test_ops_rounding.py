"""Rounding at random, and moments in 8 bits: the codec, its limits, and averages that stay right."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from op_cases import (
    KERNEL_FORMS,
    SIZES,
    SPECIAL_VALUES,
    Step,
    assert_same_bits,
    assert_same_step,
    decoded,
    each_form,
    instruction_sets,
    make_single,
    native,
    needs_native,
    with_segments,
)
from torch import Tensor

from zero_shard import ops, twins
from zero_shard.number_formats import round_to_bfloat16_by
from zero_shard.random_bits import make_random_key, random_bits

each_sign = pytest.mark.parametrize("is_signed", [True, False], ids=["first moment", "second moment"])


def moment_values(numel: int, is_signed: bool, spread: float = 1.0) -> Tensor:
    random = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=random) * torch.exp(torch.randn(numel, generator=random) * spread)
    return values if is_signed else values.square()


def all_levels(is_signed: bool) -> tuple[Tensor, Tensor]:
    """Every code, and in each block the top one, for scales from the smallest to the largest."""
    codes = torch.arange(-127, 128).to(torch.int8) if is_signed else torch.arange(256).to(torch.uint8)
    codes = torch.cat([codes, codes[-1:]])[:256]
    scales = torch.tensor([2.0**-100, 1e-20, 0.3, 1.0, 1.1, 3.0, 1e10, 3.4028235e38])
    return codes.repeat(len(scales)), scales


# --- random bits ------------------------------------------------------------------------------------------


def words(number: int, step: int, first: int, count: int) -> Tensor:
    key = make_random_key(number, step)
    index = torch.arange(first, first + count)
    return random_bits(torch.tensor(key.first), torch.tensor(key.second), index)


def test_random_bits_of_known_keys() -> None:
    """Fixed forever: a change would change the weights that a resumed run arrives at."""
    assert words(0, 1, 0, 3).tolist() == [4078507334, 805863299, 1822930527]
    assert words(7, 1000, (1 << 33) + 5, 2).tolist() == [3659564551, 2593000836]


def test_random_bits_are_uniform_and_differ_between_keys() -> None:
    """Each of 32 bits is set in half of 2^16 words; so is its exclusive or with any neighbour's or other key's bit."""
    count = 1 << 16
    base = words(3, 17, 0, count)
    limit = 5 * math.sqrt(count) / 2  # five standard deviations
    others = {
        "alone": torch.zeros_like(base),
        "next element": words(3, 17, 1, count),
        "next row": words(3, 17, 1024, count),
        "next step": words(3, 18, 0, count),
        "next parameter": words(4, 17, 0, count),
        "upper half of the index": words(3, 17, 1 << 32, count),
        "second half of the word": base >> 16,
    }
    for name, other in others.items():
        for bit in range(16 if name == "second half of the word" else 32):
            ones = int((((base ^ other) >> bit) & 1).sum())
            assert abs(ones - count / 2) < limit, f"{name}, bit {bit}: {ones} of {count}"
    buckets = torch.bincount(base & 0xFFFF, minlength=1 << 16).double()
    assert abs(((buckets - 1) ** 2).sum().item() / (1 << 16) - 1) < 0.05, "chi-square of the lower 16 bits"


# --- stochastic bfloat16 ----------------------------------------------------------------------------------


def test_stochastic_rounding_takes_every_16_bits_in_turn_and_keeps_the_mean() -> None:
    """Over all 2^16 random values the mean is the value itself, exactly."""
    chances = torch.arange(1 << 16)
    for value in (1.0, 1.0 + 2**-23, 1.00390625 - 2**-20, -3.14159, 1e-45, -1e-40, 65504.0, 3.38e38, 0.0):
        master = torch.full((1 << 16,), value)
        rounded = round_to_bfloat16_by(master, chances).double()
        assert rounded.mean().item() == master[0].double().item()
        assert len(rounded.unique()) <= 2


def test_stochastic_rounding_of_special_values() -> None:
    """Finite stays finite: what is next to inf is cut, not rounded up to it."""
    largest_bf16 = 3.3895313892515355e38
    for random in (0, 1, 0x7FFF, 0xFFFF, 0x1FFFF):
        values = torch.tensor([math.inf, -math.inf, 3.4028235e38, -3.4028235e38, largest_bf16, -0.0, 0.0])
        rounded = round_to_bfloat16_by(values, torch.tensor(random)).tolist()
        assert rounded == [math.inf, -math.inf, largest_bf16, -largest_bf16, largest_bf16, 0.0, 0.0]
        assert math.copysign(1.0, rounded[5]) == -1.0
        nans = torch.tensor([0x7F800001, -0x7FFFFF, 0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
        assert round_to_bfloat16_by(nans, torch.tensor(random)).isnan().all()


@each_form
def test_stochastic_bf16_weights_are_unbiased(form: str) -> None:
    """2^16 equal weights take one small step each; none moves further than one bfloat16, the mean moves as told."""
    count = 1 << 16
    for start, lr in ((1.0, 1e-4), (-0.75, 3e-5), (100.0, -2e-3)):
        step = make_single(count, "bf16_stochastic", [abs(lr), 0.0, 0.0, 0.0, 0.0, 0, float(lr < 0)], 1.0)
        step.param.fill_(start)
        step.grad.fill_(1.0)
        ops.select(form).adamw_(*step.arguments())
        moved = step.param.double() - start
        spacing = abs(start) * 2.0**-7
        assert moved.abs().max() <= spacing
        deviation = math.sqrt(abs(lr) * spacing / count)
        assert abs(moved.mean().item() + lr) < 5 * deviation, (start, moved.mean().item(), lr)


@each_form
def test_stochastic_finite_weights_stay_finite(form: str) -> None:
    step = make_single(4096, "bf16_stochastic", [0.0, 0.9, 0.999, 1e-8, 0.0, 0, 0])
    step.param.fill_(3.3895313892515355e38)
    ops.select(form).adamw_(*step.arguments())
    assert step.param.isfinite().all()


# --- the 8-bit codec --------------------------------------------------------------------------------------


@each_sign
def test_codec_decodes_the_levels_of_its_definition(is_signed: bool) -> None:
    codes, scales = all_levels(is_signed)
    exact = decoded(codes, scales)
    torch.testing.assert_close(twins.decode_blocks(codes, scales).double(), exact, rtol=3e-7, atol=0.0)
    assert (twins.decode_blocks(codes, scales) == 0).equal(codes == 0), "no level but 0 is zero"


@each_sign
def test_codec_round_trip_is_exact(is_signed: bool) -> None:
    codes, scales = all_levels(is_signed)
    again, same_scales = twins.encode_blocks(twins.decode_blocks(codes, scales), is_signed)
    assert_same_bits(same_scales, scales)
    assert_same_bits(again, codes)
    for numel in (*SIZES, (1 << 20) + 700):  # the last is more than one chunk of the twin
        values = moment_values(numel, is_signed, spread=3.0)
        codes, scales = twins.encode_blocks(values, is_signed)
        assert len(scales) == -(-numel // 256)
        again, same_scales = twins.encode_blocks(twins.decode_blocks(codes, scales), is_signed)
        assert_same_bits(again, codes)
        assert_same_bits(same_scales, scales)


@each_sign
def test_codec_takes_the_nearest_level(is_signed: bool) -> None:
    """Against a search in the table of all levels, in float64."""
    values = moment_values(4099, is_signed)
    codes, scales = twins.encode_blocks(values, is_signed)
    every, _ = all_levels(is_signed)
    levels = decoded(every[:256], torch.ones(1))
    spread = scales.double().repeat_interleave(256)[: values.numel()]
    assert torch.equal(scales[:-1], values[:4096].view(-1, 256).abs().amax(1))
    distances = (values.double()[:, None] / spread[:, None] - levels).abs()
    if not is_signed:
        distances[values > 0, 0] = math.inf  # a positive one never becomes zero
    error = (decoded(codes, scales) - values.double()).abs() / spread
    assert (error <= distances.amin(1) + 1e-6).all()


def test_second_moments_never_become_zero() -> None:
    """Nine orders of magnitude below the largest of the block, and denormals, also in a block of nothing else."""
    tiny = torch.tensor([1e-45, 1e-40, 1e-38, 1e-30, 1e-20, 1e-10, 2.0**-29, 0.0])
    for largest in (0.0, 1e-40, 1e-30, 1.0, 3e38):
        values = torch.cat([tiny.clamp(max=largest) if largest else tiny[:3], torch.tensor([largest])])
        codes, scales = twins.encode_blocks(values, False)
        restored = twins.decode_blocks(codes, scales)
        assert torch.equal(restored > 0, values > 0), (largest, restored)
    zeros = twins.encode_blocks(torch.zeros(300), False)
    assert not zeros[0].any() and not zeros[1].any()


@each_form
def test_second_moments_never_become_zero_in_a_step(form: str) -> None:
    """Where one did, the next update would divide by eps."""
    step = make_single(4096, "fp32_int8", [1e-3, 0.9, 0.999, 1e-8, 0.0, 0, 0])
    step.grad.fill_(1e-12)
    step.grad[::256] = 1.0
    for tensor in (step.exp_avg, step.exp_avg_sq, step.exp_avg_scale, step.exp_avg_sq_scale):
        assert tensor is not None
        tensor.zero_()
    for count in range(1, 21):
        step.slot_steps.fill_(count)
        ops.select(form).adamw_(*step.arguments())
        assert (step.moments()[1] > 0).all()


def test_codec_of_special_values() -> None:
    """A block with a NaN or inf is not finite as a whole; its neighbours are as they were."""
    for value in (math.nan, math.inf, -math.inf):
        for is_signed in (True, False):
            if value < 0 and not is_signed:
                continue
            values = moment_values(600, is_signed)
            clean = twins.decode_blocks(*twins.encode_blocks(values, is_signed))
            values[300] = value
            restored = twins.decode_blocks(*twins.encode_blocks(values, is_signed))
            assert not restored[256:512].isfinite().any()
            assert_same_bits(restored[:256], clean[:256])
            assert_same_bits(restored[512:], clean[512:])
    values = torch.tensor(SPECIAL_VALUES)
    values = values[values.isfinite()].repeat_interleave(256)
    codes, scales = twins.encode_blocks(values, True)
    assert (twins.decode_blocks(codes, scales) == values).logical_or(values.abs() < 2.0**-100).all()


# --- 8-bit moments in a step ------------------------------------------------------------------------------


def coded_step(values: Tensor, *, is_first: bool, numbers: int, beta1: float = 0.0) -> Step:
    """One parameter for each key whose fresh moment is ``values`` [256], up to the last bits."""
    count = numbers * 256
    step = make_single(count, "fp32_int8", [0.0, beta1, 0.0, 1e-8, 0.0, 0, 0])
    rows = [[256 * i, 256, i, 0] for i in range(numbers)]
    step = with_segments(step, rows, step.group_hyper[0].tolist(), [5.0] * numbers)
    step.exp_avg.zero_()
    grad = values / (1 - beta1) if is_first else values.sqrt()
    step.grad.copy_(grad.repeat(numbers))
    return replace(step, slot_numbers=torch.arange(numbers) * 3 + 1)


def levels_at(numel: int, lowest: float = 0.0, highest: float = 128.0) -> tuple[Tensor, Tensor]:
    """First moments evenly between two levels, but the first at the top: their levels [N], and they with a sign."""
    levels = lowest + (highest - lowest) * (torch.arange(numel, dtype=torch.float64) + 0.4) / numel
    levels[0] = 128.0
    signs = torch.arange(numel) % 3 - 1.5
    return levels, ((levels / 128) ** 2 * signs.sign()).float()


@each_form
@each_sign
def test_codes_of_moments_are_unbiased(is_signed: bool, form: str) -> None:
    """The mean of a fresh moment's codes over 4,096 keys approaches it; of a first one where beta1 is large enough."""
    numbers = 4096
    random = torch.Generator().manual_seed(5)
    values = torch.rand(256, generator=random) * 2 - 1
    values = values if is_signed else values.square() + 1e-3
    values[0] = 1.0
    step = coded_step(values, is_first=is_signed, numbers=numbers, beta1=0.99 if is_signed else 0.0)
    ops.select(form).adamw_(*step.arguments())
    moment = step.moments()[0 if is_signed else 1].view(numbers, 256)
    fresh = values.double() if is_signed else values.sqrt().double() ** 2
    share = fresh.abs()
    gap = 2 * share.sqrt() / 128 + 3 / 128**2 if is_signed else 4 * share**0.75 / 256 + 20 / 256**2
    assert ((moment - fresh).abs() <= gap).all()
    assert (moment.std(0)[1:] > 0).double().mean() > 0.95, "nearly all lie between two levels"
    # The deviation of a choice between two levels is at most half their distance; 2^-16 of it is the chances' grain.
    limit = gap * (5 * 0.5 / math.sqrt(numbers) + 2.0**-16)
    assert ((moment.mean(0) - fresh).abs() <= limit).all(), ((moment.mean(0) - fresh).abs() / limit).max()


@each_form
@pytest.mark.parametrize(("beta1", "first_nearest"), [(0.0, 2), (0.9, 15), (0.95, 30), (0.98, 75), (0.99, 129)])
def test_first_moments_take_the_nearest_level_from_one_on(beta1: float, first_nearest: int, form: str) -> None:
    """From 1.5 / (1 - beta1) on it is the nearest whatever the key; below, the keys' mean is the moment."""
    numbers = 1024
    levels, values = levels_at(256)
    step = coded_step(values, is_first=True, numbers=numbers, beta1=beta1)
    ops.select(form).adamw_(*step.arguments())
    moment = step.moments()[0].view(numbers, 256)
    fresh = values.double()
    below = torch.where(levels < 2, 0.0, levels.floor())
    low, high = (below / 128) ** 2, (torch.where(below == 0, 2.0, below + 1) / 128) ** 2
    is_nearest = below >= first_nearest
    assert is_nearest.sum() == 1 + 2 * max(128 - first_nearest, 0) - (first_nearest > 128)
    nearest = torch.where(fresh.abs() - low < high - fresh.abs(), low, high) * fresh.sign()
    nearest[0] = fresh[0]
    error = (moment - nearest).abs().amax(0)
    assert (error[is_nearest] < 1e-6).all(), (error.max(), levels[error.argmax()])
    is_random = ~is_nearest & (below < 128)
    assert (moment.std(0)[is_random] > 0).all()
    limit = (high - low) * (5 * 0.5 / math.sqrt(numbers) + 2.0**-16) + 1e-6
    assert ((moment.mean(0) - fresh).abs() <= limit)[is_random].all()


@needs_native
def test_first_nearest_level_native_equals_twin() -> None:
    """Betas at and beside those where it changes, and ones that no optimizer takes."""
    betas = [0.0, 0.25, 0.3, 0.4, 0.5, 1.0, 1.5, -1.0, math.nan]
    for whole in range(2, 131):
        for beta1 in (1 - 1.5 / whole, 1 - 1.5 / (whole - 0.5)):
            betas += [math.nextafter(beta1, 0.0), beta1, math.nextafter(beta1, 1.0)]
    step = coded_step(levels_at(256)[1], is_first=True, numbers=len(betas))
    for i, beta1 in enumerate(betas):  # the levels around the first nearest one
        about = min(1.5 / abs(1 - beta1), 128.0) if beta1 != 1 and beta1 == beta1 else 128.0
        step.grad[256 * i : 256 * (i + 1)] = levels_at(256, max(about - 3, 0.0), min(about + 3, 128.0))[1]
        step.grad[256 * i : 256 * (i + 1)] /= 1 - beta1 if 0 < beta1 < 1 else 1.0
    hyper = step.group_hyper.repeat(len(betas), 1)
    hyper[:, 1] = torch.tensor(betas, dtype=torch.float64)
    groups = torch.arange(len(betas), dtype=torch.int32)
    step = replace(step, group_hyper=hyper, slot_groups=groups)
    expected = step.clone()
    twins.adamw_(*expected.arguments())
    for instruction_set in instruction_sets():
        actual = step.clone()
        native().adamw_(*actual.arguments())
        assert_same_step(actual, expected, instruction_set)


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.95), (0.95, 0.95), (0.99, 0.999)])
def test_first_moments_fade_without_a_gradient(beta1: float, beta2: float) -> None:
    """By the nearest level alone small ones would stay while their second moments fade, and the update would grow."""
    numel = 256 * 32
    step = make_single(numel, "fp32_int8", [0.0, beta1, beta2, 1e-8, 0.0, 0, 0])
    _, start = levels_at(numel)
    start[::256] = 1.0
    step.grad.zero_()
    step.grad[::256] = 1.0  # keeps both scales at 1
    assert step.exp_avg_scale is not None and step.exp_avg_sq_scale is not None
    for codes, scales, values, is_signed in (
        (step.exp_avg, step.exp_avg_scale, start, True),
        (step.exp_avg_sq, step.exp_avg_sq_scale, start.square(), False),
    ):
        for target, encoded in zip((codes, scales), twins.encode_blocks(values, is_signed), strict=True):
            target.copy_(encoded)
    is_fading = torch.arange(numel) % 256 != 0
    first = step.moments()[0][is_fading].abs().mean().item()
    form = ops.select(KERNEL_FORMS[-1])
    for count in range(1, 2001):
        step.slot_steps.fill_(count)
        form.adamw_(*step.arguments())
        if count % 10 == 0:
            mean, square = (moment[is_fading].abs() for moment in step.moments())
            if beta1**count > 1e-3:
                assert mean.mean().item() == pytest.approx(first * beta1**count, rel=0.15)
            update = mean / square.sqrt()
            assert update.mean() < 1.05, f"began at 1, is {update.mean()} after {count} steps"
            assert update.max() < 32, f"{update.max()} after {count} steps"  # for some steps, on the lowest levels
    assert not mean.any()


@each_form
def test_moments_move_by_less_than_a_level(form: str) -> None:
    """A second moment of beta2 = 0.999 that falls to half its value: rounded to the nearest level it would not move."""
    step = make_single(256 * 64, "fp32_int8", [0.0, 0.9, 0.999, 1e-8, 0.0, 0, 0])
    start = torch.full((step.param.numel(),), 0.5)
    start[::256] = 1.0
    codes, scales = twins.encode_blocks(start, False)
    assert step.exp_avg_sq_scale is not None and step.exp_avg_scale is not None
    step.exp_avg_sq.copy_(codes)
    step.exp_avg_sq_scale.copy_(scales)
    step.grad.zero_()
    step.grad[::256] = 1.0  # keeps the scale at 1
    first = twins.decode_blocks(codes, scales)[1].item()
    nearest = twins.encode_blocks(torch.tensor([1.0, first * 0.999]), False)[0][1]
    assert nearest == codes[1], "to the nearest it would stay"
    for count in range(1, 401):
        step.slot_steps.fill_(count)
        ops.select(form).adamw_(*step.arguments())
    square = step.moments()[1].view(-1, 256)[:, 1:]
    assert square.mean().item() == pytest.approx(first * 0.999**400, rel=0.01)


@each_form
def test_a_partly_filled_block_does_not_look_beyond_its_segment(form: str) -> None:
    """What lies in the gap after a segment neither changes nor counts for the scale."""
    step = with_segments(make_single(1024, "fp32_int8"), [[0, 300, 0, 0], [512, 512, 1, 0]], steps=[3.0, 3.0])
    for tensor in (step.exp_avg, step.exp_avg_sq):
        tensor[300:512] = 100
    step.grad[300:512] = 1e6
    before = step.clone()
    other = step.clone()
    other.grad[300:512] = 0.0
    for each in (step, other):
        ops.select(form).adamw_(*each.arguments())
    for name, tensor in step.mutated().items():
        assert_same_bits(tensor, other.mutated()[name], name)
        if not name.endswith("_scale"):
            assert_same_bits(tensor[300:512], before.mutated()[name][300:512], name)
    assert step.exp_avg_scale is not None
    fresh = decoded(before.exp_avg, before.exp_avg_scale)[256:300] * 0.9 + before.grad[256:300].double() * 0.1
    assert step.exp_avg_scale[1].item() == pytest.approx(fresh.abs().max().item(), rel=1e-6)


@each_form
def test_parameters_are_updated_with_the_fresh_moments(form: str) -> None:
    """The first step equals that of float32 moments bit for bit: what is rounded is only what is kept."""
    coded, plain = make_single(4099, "fp32_int8"), make_single(4099, "fp32")
    for tensor in coded.mutated().values():
        tensor.zero_()
    for tensor in plain.mutated().values():
        tensor.zero_()
    plain = replace(plain, grads=coded.grads, max_exp_avg_sq=None)
    for step in (coded, plain):
        ops.select(form).adamw_(*step.arguments())
    assert_same_bits(coded.param, plain.param)
    assert not torch.equal(coded.moments()[0].float(), plain.exp_avg)


@needs_native
def test_8_bit_moments_are_a_quarter_of_the_memory() -> None:
    coded, plain = make_single(1 << 16, "fp32_int8"), make_single(1 << 16, "fp32")
    names = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
    nbytes = [sum(step.mutated()[name].nbytes for name in names if name in step.mutated()) for step in (coded, plain)]
    assert nbytes[0] / nbytes[1] == pytest.approx(0.25, abs=0.005)
    native().adamw_(*coded.arguments())
