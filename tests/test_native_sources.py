"""The C++ and CUDA sources themselves: kernels run on the host, sanitizers, guard pages, more than 2^32 elements.

The bodies of the CUDA kernels are compiled as C++ (see ``native/cuda_runtime.h``) and must give the bits of the CPU
path. So a machine without a GPU tests them, not only that they compile.
"""

from __future__ import annotations

import itertools
import os
import platform
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from native.shim import CUDA_SOURCES, KERNEL_FLAGS, NATIVE, ROOT, Shim, build_setting, compile_all, run
from op_cases import (
    FLOATS,
    GROUPS,
    SCHEMES,
    SIZES,
    SPECIAL_VALUES,
    Step,
    assert_same_bits,
    assert_same_step,
    make_single,
    make_step,
    needs_native,
    with_segments,
)
from torch import Tensor

from zero_shard import ops, twins

CXX = os.environ.get("CXX", "g++")
pytestmark = pytest.mark.skipif(shutil.which(CXX) is None, reason=f"there is no C++ compiler {CXX}")

LARGE = (1 << 16) + 1
CPU = ops.select("torch" if ops.missing_reason("cpu") else "native")
SANITIZER_FLAGS = ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
NO_ADDRESS_SPACE = 77


@pytest.fixture(scope="module")
def built_shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return Shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def shim(built_shim: Shim) -> Iterator[Shim]:
    built_shim.configure()
    yield built_shim


# --- adamw_ -----------------------------------------------------------------------------------------------


def assert_same_as_cpu(shim: Shim, step: Step, name: str, num_misaligned: int = 0) -> None:
    """One step by the kernels, the same by the CPU path; every tensor bit for bit."""
    actual = step.clone(num_misaligned)
    CPU.adamw_(*step.arguments())
    shim.adamw_(*actual.arguments())
    assert_same_step(actual, step, name)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_adamw_kernels_equal_cpu(scheme: str, shim: Shim) -> None:
    """Gaps, inactive slots, amsgrad, param_start past 2^32; gradients of both dtypes, in one tensor or many."""
    cases = list(itertools.product(SIZES, (False, True), (False, True), (False, True), (0, 1, 4)))
    cases += [(LARGE, True, False, False, 0), (LARGE, False, True, True, 0)]
    for numel, has_max, has_param_grads, is_split, num_misaligned in cases:
        scale = 0.3 if is_split else None
        step = make_step(numel, scheme, has_max=has_max, scale=scale, seed=numel, has_param_grads=has_param_grads)
        shim.configure(num_processors=1 + numel % 3, is_descending=has_param_grads)
        name = f"{numel} {has_max} {has_param_grads} {is_split} {num_misaligned}"
        assert_same_as_cpu(shim, step.with_split_grads() if is_split else step, name, num_misaligned)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_adamw_kernels_equal_cpu_for_special_values(scheme: str, shim: Shim) -> None:
    """Every special value as weight, gradient and moment, with every other one."""
    values = torch.tensor(SPECIAL_VALUES, dtype=torch.float64)
    param, grad, moment = (t.flatten() for t in torch.meshgrid(values, values, values.abs(), indexing="ij"))
    step = make_single(param.numel(), scheme, GROUPS[3] if not SCHEMES[scheme].has_codes else None)
    step.param.copy_(param)
    step.grads[0].copy_(grad)
    if step.exp_avg_scale is None or step.exp_avg_sq_scale is None:
        step.exp_avg.copy_(moment.flip(0))
        step.exp_avg_sq.copy_(moment)
    else:  # every code, with every special value as the scale of some blocks
        step.exp_avg.copy_(torch.arange(param.numel()) * 7 % 255 - 127)
        step.exp_avg_sq.copy_(torch.arange(param.numel()) * 11 % 256)
        step.exp_avg_scale.copy_(values.abs().repeat(100)[: step.exp_avg_scale.numel()])
        step.exp_avg_sq_scale.copy_(values.abs().flip(0).repeat(100)[: step.exp_avg_sq_scale.numel()])
    if step.low is not None and step.low.dtype == torch.int16:  # also remainders that no split leaves behind
        step.low.copy_(torch.arange(param.numel()) * 40503)
    assert_same_as_cpu(shim, step, scheme)


@pytest.mark.parametrize("scheme", ["fp32", "bf16_remainder_int8"])
def test_adamw_kernels_equal_cpu_for_an_infinite_grad_scale(scheme: str, shim: Shim) -> None:
    """Zero times it is NaN, also where a block of 8-bit moments is not full."""
    for numel in (257, 300, 4099):
        step = make_step(numel, scheme, has_max=False, scale=float("inf"))
        step.grads[0].copy_(step.grads[0].sign() + 2)
        assert_same_as_cpu(shim, step, f"{numel}")


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("scheme", ["fp32", "bf16_remainder_int8"])
def test_adamw_kernels_leave_everything_when_found_inf(scheme: str, value: float, shim: Shim) -> None:
    step = replace(make_step(4099, scheme), found_inf=torch.tensor(value))
    before = step.clone()
    shim.adamw_(*step.arguments())
    assert_same_step(step, before)
    assert_same_as_cpu(shim, replace(step, found_inf=torch.tensor(0.0)), scheme)


def test_adamw_kernels_take_many_tensors_in_few_launches(shim: Shim) -> None:
    """20,000 gradients, some of them empty, first, last and in between; one alone takes one launch."""
    lengths = [0, *(number % 7 for number in range(20_000)), 0]
    starts = [0, *itertools.accumulate(lengths)]
    numel = starts.pop()
    step = make_step(numel, "fp32", has_max=False)
    rows = [[start, length, slot % 3, 0] for slot, (start, length) in enumerate(zip(starts, lengths, strict=True))]
    step = with_segments(step, rows, steps=[1.0, 2.0, 3.0])
    split = replace(
        step,
        grads=[step.grads[0][start : start + length].clone() for start, length in zip(starts, lengths, strict=True)],
        grad_offsets=starts,
    )
    before = shim.num_launches()
    assert_same_as_cpu(shim, split.clone(), "many")
    assert 0 < shim.num_launches() - before <= 200
    before = shim.num_launches()
    assert_same_as_cpu(shim, step, "one")
    assert shim.num_launches() - before == 1


def test_adamw_kernels_trap_where_the_update_is_not_defined(shim: Shim) -> None:
    """Amsgrad without its tensor, and active segments that no gradient holds as a whole."""
    step = make_step(4099, "fp32", has_max=False)
    with pytest.raises(RuntimeError, match="trap"):
        shim.adamw_(*replace(step, group_hyper=torch.tensor(GROUPS[3:] * 4, dtype=torch.float64)).arguments())
    single = make_single(4099)
    for grads, offsets in (([0], [0]), ([4098], [0]), ([4098], [1]), ([2000, 2099], [0, 2000])):
        wrong = replace(single, grads=[torch.zeros(numel) for numel in grads], grad_offsets=offsets)
        with pytest.raises(RuntimeError, match="trap"):
            shim.adamw_(*wrong.arguments())
    wrong = replace(wrong, slot_is_active=torch.zeros(1, dtype=torch.uint8))
    before = wrong.clone()
    shim.adamw_(*wrong.arguments())
    assert_same_step(wrong, before)


# --- reduce_slices_, sum_squares_, sum_pairs_ --------------------------------------------------------------


def make_segments(numel: int, num_cuts: int = 6) -> Tensor:
    """Segments with gaps, empty ones, and starts anywhere in their parameters, also in the middle of a chunk."""
    numbers = random.Random(numel)
    cuts = sorted(numbers.randrange(numel + 1) for _ in range(num_cuts))
    rows = []
    for slot, (start, stop) in enumerate(itertools.pairwise([0, *cuts, numel])):
        length = max(stop - start - 2, 0) if slot % 3 == 1 else stop - start
        rows.append([start, length, slot, (0, 16 * slot, 256 * slot, 5 * slot + (1 << 33))[slot % 4]])
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4)


def make_values(numel: int, dtype: torch.dtype, is_special: bool) -> Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).mul_(100).to(dtype)
    if is_special:
        special = torch.tensor(SPECIAL_VALUES)[:numel]
        values[: len(special)] = special.to(dtype)
    return values


def misaligned(tensor: Tensor, num_misaligned: int) -> Tensor:
    """Copy a flat tensor to so many elements into its storage."""
    return torch.cat([tensor.new_zeros(num_misaligned), tensor])[num_misaligned:]


def empty_sums(segments: Tensor) -> Tensor:
    return torch.full((len(segments), 2), 7.0, dtype=torch.float64)


def assert_same_sums(actual: Tensor, expected: Tensor, name: str) -> None:
    """The rounded sums bit for bit; what is missing in them to some 45 digits more."""
    assert_same_bits(actual[:, 0], expected[:, 0], name)
    is_close = (actual[:, 1] - expected[:, 1]).abs() <= expected[:, 0].abs() * 2.0**-98
    assert (is_close | ~expected[:, 0].isfinite()).all(), f"{name}: {actual} {expected}"
    assert (actual[:, 1][~expected[:, 0].isfinite()] == 0).all(), name


@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_kernels_equal_cpu(dtype: torch.dtype, shim: Shim) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    cases = itertools.product((*SIZES, 16, 1024, LARGE), (1, 3), (False, True), (0, 1), (False, True))
    for numel, world_size, accumulate, num_misaligned, is_special in cases:
        slices = make_values(world_size * numel, dtype, is_special).view(world_size, numel)
        segments = make_segments(numel)
        shim.configure(num_processors=1 + num_misaligned, is_descending=accumulate)
        expected, expected_sums = torch.ones(numel, dtype=wide), empty_sums(segments)
        CPU.reduce_slices_(expected, slices, 3, accumulate, segments, expected_sums)
        name = f"{numel} {world_size} {accumulate} {num_misaligned} {is_special}"
        own_rank = 1 if accumulate else world_size - 1
        others = torch.cat([slices[:own_rank], slices[own_rank + 1 :]])
        own = misaligned(slices[own_rank], num_misaligned) if world_size > 1 else None
        for sums in (None, empty_sums(segments)):
            actual = misaligned(torch.ones(numel, dtype=wide), num_misaligned)
            if own is None or sums is None:
                shim.reduce_slices_(actual, slices, 3, accumulate, None if sums is None else segments, sums)
            else:
                shim.reduce_slices_(actual, others, 3, accumulate, segments, sums, own, own_rank)
            assert_same_bits(actual, expected, name)
            if sums is not None:
                assert_same_sums(sums, expected_sums, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wire_kernels_equal_cpu(dtype: torch.dtype, shim: Shim) -> None:
    """Blocks byte for byte, and their sums; the first blocks hold zeros, NaN and inf."""
    for num_blocks, world_size, num_misaligned in itertools.product((0, 1, 2, 9, 70), (1, 3), (0, 1)):
        numel = 256 * num_blocks
        values = make_values(world_size * numel, dtype, is_special=num_blocks > 1)
        values[-256:] = 0
        expected_wire = torch.zeros(world_size * num_blocks * 260, dtype=torch.uint8)
        CPU.quantize_(expected_wire, values)
        wire = misaligned(torch.ones_like(expected_wire), num_misaligned)
        shim.configure(num_processors=1 + num_misaligned, is_descending=num_misaligned > 0)
        shim.quantize_(wire, misaligned(values, num_misaligned))
        assert torch.equal(wire, expected_wire), num_blocks
        segments = make_segments(numel)
        expected, expected_sums = torch.ones(numel), empty_sums(segments)
        CPU.reduce_slices_(expected, wire.view(world_size, -1), 3, True, segments, expected_sums)
        for sums in (None, empty_sums(segments)):
            actual = misaligned(torch.ones(numel), num_misaligned)
            shim.reduce_slices_(actual, wire.view(world_size, -1), 3, True, None if sums is None else segments, sums)
            assert_same_bits(actual, expected, f"{num_blocks} {world_size}")
            if sums is not None:
                assert_same_sums(sums, expected_sums, f"{num_blocks} {world_size}")


def split_values(values: Tensor, num_parts: int) -> tuple[list[Tensor], list[int]]:
    """About so many tensors of the values, with gaps, overlapping nothing; some are empty, the last one is."""
    numbers = random.Random(num_parts)
    cuts = sorted(numbers.randrange(values.numel() + 1) for _ in range(num_parts - 1))
    tensors, offsets = [], []
    for start, stop in itertools.pairwise([0, *cuts, values.numel()]):
        if numbers.random() < 0.9:
            tensors.append(values[start:stop].clone() if numbers.random() < 0.5 else values[start:stop])
            offsets.append(start)
    return [*tensors, values[:0]], [*offsets, values.numel()]


@pytest.mark.parametrize("dtype", FLOATS)
def test_sum_squares_kernels_equal_cpu(dtype: torch.dtype, shim: Shim) -> None:
    """Chunks in one tensor, cut by several, by the tables of two launches, or in none."""
    cases = itertools.product((*SIZES, 16, 1024, LARGE), (1, 5, 40, 400), (0, 1, 3), (False, True))
    for numel, num_parts, num_misaligned, is_special in cases:
        values = misaligned(make_values(numel, dtype, is_special), num_misaligned)
        # A chunk in the tables of two launches is canonical as long as it lies in few tensors.
        tensors, offsets = split_values(values, num_parts if num_parts < numel / 20 else 5)
        segments = make_segments(numel, num_cuts=6 if num_parts < 40 else 60)
        expected, actual = empty_sums(segments), empty_sums(segments)
        CPU.sum_squares_(expected, tensors, offsets, numel, segments)
        shim.configure(num_processors=1 + num_misaligned, is_descending=num_misaligned == 1)
        shim.sum_squares_(actual, tensors, offsets, numel, segments)
        assert_same_sums(actual, expected, f"{numel} {num_parts} {num_misaligned} {is_special}")


def test_sum_squares_kernels_take_many_tensors_in_few_launches(shim: Shim) -> None:
    """20,000 parameters at multiples of 16, as a shard lays them out: still the bits of the CPU."""
    segments = torch.tensor([[16 * number, 1 + number % 16, number, 0] for number in range(20_000)])
    values = make_values(16 * len(segments), torch.float32, False)
    tensors = [values[start : start + numel] for start, numel, *_ in segments.tolist()]
    expected, actual = empty_sums(segments), empty_sums(segments)
    CPU.sum_squares_(expected, tensors, segments[:, 0].tolist(), values.numel(), segments)
    before = shim.num_launches()
    shim.sum_squares_(actual, tensors, segments[:, 0].tolist(), values.numel(), segments)
    assert 0 < shim.num_launches() - before <= 200
    assert_same_sums(actual, expected, "many")


def test_sum_squares_kernels_lose_nothing_when_a_chunk_lies_in_hundreds_of_tensors(shim: Shim) -> None:
    """One element each, a single segment: chunks are added in parts then, which may round otherwise."""
    values = make_values(3001, torch.float32, False)
    segments = torch.tensor([[0, 3001, 0, 16]])
    sums = empty_sums(segments)
    shim.sum_squares_(sums, list(values.split(1)), list(range(3001)), 3001, segments)
    torch.testing.assert_close(sums[0, 0], values.double().square().sum(), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("is_descending", [False, True])
def test_sum_squares_kernels_add_thousands_of_partial_sums(is_descending: bool, shim: Shim) -> None:
    """Two large segments, which a whole block adds one after the other, and one that a warp adds."""
    rows = [[0, 2_300_000, 0, 0], [2_300_000, 100_000, 1, 0], [2_400_000, 2_400_000, 2, 0]]
    values, segments = make_values(4_800_000, torch.bfloat16, False), torch.tensor(rows)
    expected, actual = empty_sums(segments), empty_sums(segments)
    CPU.sum_squares_(expected, [values], [0], values.numel(), segments)
    shim.configure(is_descending=is_descending)
    shim.sum_squares_(actual, [values], [0], values.numel(), segments)
    assert_same_sums(actual, expected, "thousands")


def test_sum_pairs_kernel_equals_cpu(shim: Shim) -> None:
    for count, special in itertools.product((0, 1, 2, 31, 300, 5000), (None, float("inf"), float("nan"))):
        pairs = torch.randn(count, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
        pairs[:, 0].square_()
        pairs[:, 1] *= 1e-17
        if special is not None and count:
            pairs[count // 2] = torch.tensor([special, 0.0])
        expected, actual = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
        CPU.sum_pairs_(expected[0], pairs)
        shim.sum_pairs_(actual[0], pairs)
        assert_same_sums(actual, expected, f"{count} {special}")


# --- flatten_, unflatten_ ---------------------------------------------------------------------------------


def strided(values: Tensor, kind: int) -> Tensor:
    """The values in memory of another order, or with holes."""
    if values.dim() == 0 or kind == 0:
        return values
    if kind == 1:
        order = list(range(values.dim()))[::-1]
        return values.permute(order).contiguous().permute(order)
    wide = torch.zeros((*values.shape[:-1], 2 * values.shape[-1] + 1), dtype=values.dtype)
    wide[..., 1::2] = values
    return wide[..., 1::2]


def make_copies(num_small: int = 0) -> tuple[list[Tensor], list[int], int]:
    """Tensors of every dtype, shape and memory order, with gaps between them; then so many small ones."""
    shapes = [(), (3,), (0,), (17, 5), (2, 3, 4, 5), (257,), (4099,), (0, 3), (1, 7, 1), (2, 3, 2, 3, 2, 3)]
    tensors = [torch.zeros(0)]
    for number, (kind, shape) in enumerate(itertools.product(range(3), shapes)):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(number)).mul_(1000)
        tensors.append(strided(values.to(FLOATS[(number + number // 4) % 4]), kind))
    special = torch.tensor(SPECIAL_VALUES, dtype=torch.float64)
    tensors += [strided(special.to(dtype), kind) for dtype in FLOATS for kind in (0, 2)]
    tensors += [torch.full((number % 9,), float(number)).to(FLOATS[number % 4]) for number in range(num_small)]
    offsets, end = [], 1
    for number, tensor in enumerate(tensors):
        end += number % 3
        offsets.append(end)
        end += tensor.numel()
    return [*tensors, torch.zeros(0)], [*offsets, end + 2], end + 2500


def whole_memory(tensor: Tensor) -> Tensor:
    """Return all elements of the storage behind a tensor, also those between its own."""
    return torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def with_own_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.as_strided(whole_memory(tensor).clone(), tensor.shape, tensor.stride(), tensor.storage_offset())
        for tensor in tensors
    ]


@pytest.mark.parametrize("dtype", FLOATS)
def test_flatten_kernels_equal_cpu(dtype: torch.dtype, shim: Shim) -> None:
    tensors, offsets, numel = make_copies(num_small=200)
    for scale, num_misaligned in itertools.product((None, torch.tensor(0.3)), (0, 1, 4)):
        expected = torch.full((numel,), float("nan"), dtype=dtype)
        actual = misaligned(expected, num_misaligned)
        CPU.flatten_(expected, tensors, offsets, scale)
        shim.configure(num_processors=1 + num_misaligned, is_descending=num_misaligned == 1)
        shim.flatten_(actual, tensors, offsets, scale)
        assert_same_bits(actual, expected, f"{scale} {num_misaligned}")


@pytest.mark.parametrize("dtype", FLOATS)
def test_unflatten_kernels_equal_cpu(dtype: torch.dtype, shim: Shim) -> None:
    tensors, offsets, numel = make_copies(num_small=200)
    for scale, num_misaligned, is_special in itertools.product((None, torch.tensor(0.3)), (0, 1, 4), (False, True)):
        flat = misaligned(make_values(numel, dtype, is_special), num_misaligned)
        expected, actual = with_own_memory(tensors), with_own_memory(tensors)
        CPU.unflatten_(expected, flat, offsets, scale)
        shim.configure(num_processors=1 + num_misaligned, is_descending=num_misaligned == 1)
        shim.unflatten_(actual, flat, offsets, scale)
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(whole_memory(one), whole_memory(other), f"{scale} {num_misaligned} tensors[{number}]")


@pytest.mark.parametrize("numel", SIZES)
def test_flatten_kernels_of_one_tensor_or_none_equal_cpu(numel: int, shim: Shim) -> None:
    for source, target in itertools.product(FLOATS, FLOATS):
        for tensors, offset in ([], []), ([make_values(numel, source, True)], [2]):
            expected = torch.full((numel + 3,), float("nan"), dtype=target)
            actual = expected.clone()
            CPU.flatten_(expected, tensors, offset, None)
            shim.flatten_(actual, tensors, offset, None)
            assert_same_bits(actual, expected, f"{source} {target}")


def test_flatten_kernels_take_many_tensors_in_few_launches(shim: Shim) -> None:
    tensors, offsets, numel = make_copies(num_small=20_000)
    flat = torch.full((numel,), float("nan"))
    before = shim.num_launches()
    shim.flatten_(flat, tensors, offsets, None)
    assert 0 < shim.num_launches() - before <= 220
    expected = torch.empty(numel)
    CPU.flatten_(expected, tensors, offsets, None)
    assert_same_bits(flat, expected)


# --- wrong accesses, undefined behaviour, large indices ----------------------------------------------------


def built_loops() -> dict[str, list[str]]:
    """The instruction sets that the build has, with the compiler's flags."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return {"scalar": [], **(build_setting("X86_LOOPS") if is_x86 else {})}


@pytest.fixture(scope="module")
def bounds_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CPU loops and CUDA kernels in one program, with sanitizers."""
    directory = tmp_path_factory.mktemp("bounds")
    probe, program = directory / "probe", directory / "bounds"
    (directory / "probe.cpp").write_text("int main() {}\n")
    try:
        run([CXX, *SANITIZER_FLAGS, directory / "probe.cpp", "-o", probe])
    except RuntimeError as error:
        pytest.skip(f"{CXX} has no sanitizers: {error}")
    loops = built_loops()
    common = ["-std=c++17", *build_setting("LOOP_FLAGS")]
    dispatch = ["-DZERO_SHARD_HAS_X86_LOOPS=1"] if len(loops) > 1 else []
    jobs = [(ROOT / "csrc/cpu/dispatch.cpp", "dispatch", [*common, *dispatch])]
    for name, flags in loops.items():
        jobs.append((ROOT / "csrc/cpu/loops.cpp", name, [*common, *flags, f"-DZERO_SHARD_ISA={name}"]))
    jobs += [(source, source.stem, KERNEL_FLAGS) for source in (*CUDA_SOURCES, NATIVE / "bounds.cpp")]
    objects = [directory / f"{name}.o" for _, name, _ in jobs]
    compile_all([(job[0], target, [*SANITIZER_FLAGS, *job[2]]) for job, target in zip(jobs, objects, strict=True)])
    run([CXX, *SANITIZER_FLAGS, *objects, "-o", program])
    return program


def run_bounds(program: Path, what: str) -> subprocess.CompletedProcess[str]:
    # Leaks are looked for by tracing the process, which containers forbid.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run([str(program), what], capture_output=True, text=True, env=environment)


def test_sanitizers_find_no_wrong_access_and_nothing_undefined(bounds_program: Path) -> None:
    """Every loop and kernel, in buffers of exactly the right size."""
    done = run_bounds(bounds_program, "small")
    assert done.returncode == 0, done.stderr[-8000:]


def test_more_than_2_to_the_32_elements(bounds_program: Path) -> None:
    """Sparse memory: only the last 5,000 of 2^32 elements are touched, and are updated as they are in a small shard."""
    done = run_bounds(bounds_program, "large")
    if done.returncode == NO_ADDRESS_SPACE:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr[-8000:]


@needs_native
def test_built_loops_stay_within_their_tensors() -> None:
    """The vectorised loops that are shipped, on tensors between pages that nothing may touch."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-W", "error", str(NATIVE / "guarded.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-4000:]}"


def test_twin_is_what_the_kernels_are_compared_with_in_the_end(shim: Shim) -> None:
    """Once without the compiled CPU path between them."""
    step = make_step(257, "bf16_remainder_int8").with_split_grads()
    actual = step.clone()
    twins.adamw_(*step.arguments())
    shim.adamw_(*actual.arguments())
    assert_same_step(actual, step)
