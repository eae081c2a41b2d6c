"""The operators in pure PyTorch: signatures, checks and bits of the compiled ones, at a lower speed.

They run where the compiled part is missing, and in the tests as its plain counterpart. None communicates.

# Note [One arithmetic]
Both forms use only IEEE basic operations (add, subtract, multiply, divide, square root) in one fixed order
and never a fused multiply-add, so that every instruction set, thread count, device and these twins give equal
bits (the payload of a NaN excepted). Constants are formed in float64 per segment and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

_FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Bounds the temporaries of the twins: a step must not allocate anything that grows with the model.
_CHUNK_NUMEL = 1 << 20
_NUM_HYPER = 7  # lr, beta1, beta2, eps, weight_decay, is_amsgrad, is_maximize
_IS_AMSGRAD = 5
_F32_MAGNITUDE = 0x7FFFFFFF
_F32_INF = 0x7F800000
_BF16_QUIET_BIT = 0x40


class _Constants(NamedTuple):
    """What one segment's update needs, each already rounded to the compute dtype."""

    is_first_weight_small: bool
    is_amsgrad: bool
    is_maximize: bool
    decay: float  # 1 - lr * weight_decay
    first_weight: float  # 1 - beta1 where that is below one half, else beta1
    beta2: float
    one_minus_beta2: float
    bias_correction2_sqrt: float
    eps: float
    minus_step_size: float


def _check(condition: bool, message: str) -> None:
    # RuntimeError, because that is what the compiled operators (and torch's own) raise for the same fault.
    if not condition:
        raise RuntimeError(message)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _check_tensor(
    op: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: list[int], device: torch.device
) -> None:
    is_right = tensor.dtype in dtypes and list(tensor.shape) == shape and tensor.device == device
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    _check(is_right, f"{op}: {name} must be {wanted}{shape} on {device}, got {_kind(tensor)}")
    _check(tensor.is_contiguous(), f"{op}: {name} must be contiguous, got strides {list(tensor.stride())}")


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one contiguous range of memory, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


@torch.no_grad()
def flatten_(out: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """Copy dense tensors, each in memory order and cast to the dtype of ``out``, into one flat buffer.

    Elements of ``out`` that no tensor covers become zero. Casts round to nearest even (from float64 to a
    16-bit type through float32, as ``Tensor.to`` does).

    Args:
        out: [N] contiguous, mutated.
        tensors: Dense, of any shape and of differing floating dtypes.
        offsets: Where each tensor starts in ``out``; ascending, the ranges disjoint.
    Raises:
        RuntimeError: a wrong dtype, device, shape, or ranges that overlap or leave ``out``.
    """
    _check_tensor("flatten_", "out", out, _FLOAT_DTYPES, [out.numel()], out.device)
    _check(
        len(tensors) == len(offsets),
        f"flatten_: offsets must have one entry for each of the {len(tensors)} tensors, got {len(offsets)}",
    )
    end = 0
    for index, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        name = f"tensors[{index}]"
        _check(
            tensor.dtype in _FLOAT_DTYPES and tensor.device == out.device,
            f"flatten_: {name} must be float32, float64, bfloat16 or float16 on {out.device}, got {_kind(tensor)}",
        )
        _check(_is_dense(tensor), f"flatten_: {name} must be dense, got strides {list(tensor.stride())}")
        _check(
            end <= offset <= out.numel() - tensor.numel(),
            f"flatten_: offsets[{index}] must lie between {end} and {out.numel() - tensor.numel()} "
            f"(ascending, disjoint, inside out), got {offset}",
        )
        end = offset + tensor.numel()
    end = 0
    for tensor, offset in zip(tensors, offsets, strict=True):
        out[end:offset].zero_()
        end = offset + tensor.numel()
        out[offset:end].copy_(tensor.as_strided((tensor.numel(),), (1,)))
    out[end:].zero_()


@torch.no_grad()
def reduce_slices_(out: Tensor, slices: Tensor, divisor: int, accumulate: bool) -> None:
    """Add W slices in rank order, divide the sum, and write it to ``out`` or add it there.

    Args:
        out: [N] float32 (float64 with float64 slices), mutated.
        slices: [W, N] contiguous, W >= 1; each slice is widened to the dtype of ``out`` before it is added.
        divisor: At least 1; a true division of the finished sum.
        accumulate: Whether the quotient is added to ``out`` instead of replacing it.
    Raises:
        RuntimeError: a wrong dtype, device or shape.
    """
    _check(
        slices.dim() == 2 and slices.shape[0] >= 1 and slices.dtype in _FLOAT_DTYPES and slices.is_contiguous(),
        f"reduce_slices_: slices must be contiguous floating [W, N] with W >= 1, got {_kind(slices)}",
    )
    dtype = torch.float64 if slices.dtype == torch.float64 else torch.float32
    _check_tensor("reduce_slices_", "out", out, (dtype,), [slices.shape[1]], slices.device)
    _check(divisor >= 1, f"reduce_slices_: divisor must be at least 1, got {divisor}")
    # A 0-dim tensor on the device: CUDA replaces the division by a host scalar with a multiplication.
    full_divisor = torch.full((), divisor, dtype=dtype, device=out.device)
    for start, stop in _chunks(0, out.numel()):
        total = slices[0, start:stop].to(dtype, copy=True)
        for rank in range(1, slices.shape[0]):
            total.add_(slices[rank, start:stop])
        total.div_(full_divisor)
        if accumulate:
            out[start:stop].add_(total)
        else:
            out[start:stop].copy_(total)


@torch.no_grad()
def adamw_(
    param: Tensor,
    low: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    segments: Tensor,
    slot_steps: Tensor,
    slot_is_active: Tensor,
    slot_groups: Tensor,
    group_hyper: Tensor,
    grad_scale: Tensor | None,
) -> None:
    """Update a shard of N elements by one AdamW step, in place; elements outside all segments stay.

    With P slots (parameters), S segments, G param groups; all tensors contiguous and on one device:

    Args:
        param: [N] float32, float64, bfloat16 or float16.
        low: [N] the part of the float32 master weight that a 16-bit ``param`` cannot hold: int16 remainder
            for bfloat16, the whole float32 master for float16 (made again from ``param`` where the two
            disagree). None: no master; must be None for float32 and float64.
        grad: [N] float32 (float64 with a float64 ``param``).
        exp_avg: [N] of the dtype of ``grad``, or bfloat16 (not with float64).
        exp_avg_sq: [N] of the dtype of ``exp_avg``.
        max_exp_avg_sq: [N] the same; None where no group asks for amsgrad.
        segments: [S, 3] int64: start, numel, slot; ascending and disjoint.
        slot_steps: [P] float32 step count, this step included.
        slot_is_active: [P] uint8; 0 leaves the slot's elements untouched.
        slot_groups: [P] int32 row of ``group_hyper``.
        group_hyper: [G, 7] float64: lr, beta1, beta2, eps, weight_decay, is_amsgrad, is_maximize.
        grad_scale: 0-dim float32 or float64; the gradient is multiplied by it first.
    Raises:
        RuntimeError: a wrong dtype, device, shape or table entry.
    Source: arXiv:1711.05101, algorithm 2; see Note [One arithmetic].
    """
    _check_adamw(param, low, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, grad_scale)
    _check_tables(param, segments, slot_steps, slot_is_active, slot_groups, group_hyper)
    table, hyper = segments.tolist(), group_hyper.tolist()
    steps, is_active, groups = slot_steps.tolist(), slot_is_active.tolist(), slot_groups.tolist()
    _check_entries(table, groups, param.numel(), len(hyper))
    if max_exp_avg_sq is None:
        for group, has_step in zip(groups, is_active, strict=True):
            _check(
                not (has_step and hyper[group][_IS_AMSGRAD]),
                f"adamw_: max_exp_avg_sq must be given for group {group}, which asks for amsgrad, got None",
            )
    scale = None if grad_scale is None else grad_scale.to(grad.dtype)
    shard = (param, low, grad, exp_avg, exp_avg_sq, max_exp_avg_sq)
    for start, numel, slot in table:
        if not is_active[slot] or not numel:
            continue
        constants = _constants(hyper[groups[slot]], steps[slot], grad.dtype)
        for first, last in _chunks(start, start + numel):
            chunk = (None if tensor is None else tensor[first:last] for tensor in shard)
            _update_chunk(constants, scale, *chunk)  # type: ignore[arg-type]


def _check_adamw(
    param: Tensor,
    low: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    grad_scale: Tensor | None,
) -> None:
    shape, device = [param.numel()], param.device
    compute = torch.float64 if param.dtype == torch.float64 else torch.float32
    _check_tensor("adamw_", "param", param, _FLOAT_DTYPES, shape, device)
    _check_tensor("adamw_", "grad", grad, (compute,), shape, device)
    is_fp64 = compute == torch.float64
    _check_tensor("adamw_", "exp_avg", exp_avg, (compute,) if is_fp64 else (compute, torch.bfloat16), shape, device)
    _check_tensor("adamw_", "exp_avg_sq", exp_avg_sq, (exp_avg.dtype,), shape, device)
    if max_exp_avg_sq is not None:
        _check_tensor("adamw_", "max_exp_avg_sq", max_exp_avg_sq, (exp_avg.dtype,), shape, device)
    if low is not None:
        low_dtype = {torch.bfloat16: torch.int16, torch.float16: torch.float32}.get(param.dtype)
        _check(low_dtype is not None, f"adamw_: low must be None for a {param.dtype} param, got {_kind(low)}")
        if low_dtype is not None:
            _check_tensor("adamw_", "low", low, (low_dtype,), shape, device)
    if grad_scale is not None:
        _check_tensor("adamw_", "grad_scale", grad_scale, (torch.float32, torch.float64), [], device)


def _check_tables(
    param: Tensor,
    segments: Tensor,
    slot_steps: Tensor,
    slot_is_active: Tensor,
    slot_groups: Tensor,
    group_hyper: Tensor,
) -> None:
    device, num_slots = param.device, slot_steps.numel()
    _check_tensor("adamw_", "segments", segments, (torch.int64,), [segments.numel() // 3, 3], device)
    _check_tensor("adamw_", "slot_steps", slot_steps, (torch.float32,), [num_slots], device)
    _check_tensor("adamw_", "slot_is_active", slot_is_active, (torch.uint8,), [num_slots], device)
    _check_tensor("adamw_", "slot_groups", slot_groups, (torch.int32,), [num_slots], device)
    hyper_shape = [group_hyper.numel() // _NUM_HYPER, _NUM_HYPER]
    _check_tensor("adamw_", "group_hyper", group_hyper, (torch.float64,), hyper_shape, device)


def _check_entries(table: list[list[int]], groups: list[int], num_elements: int, num_groups: int) -> None:
    end = 0
    for index, (start, numel, slot) in enumerate(table):
        _check(
            numel >= 0 and end <= start <= num_elements - numel and 0 <= slot < len(groups),
            f"adamw_: segments[{index}] must be ascending, disjoint, within {num_elements} elements "
            f"and {len(groups)} slots, got start {start}, numel {numel}, slot {slot}",
        )
        end = start + numel
    for slot, group in enumerate(groups):
        _check(
            0 <= group < num_groups,
            f"adamw_: slot_groups[{slot}] must be a row of the {num_groups} in group_hyper, got {group}",
        )


def _chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, _CHUNK_NUMEL):
        yield first, min(first + _CHUNK_NUMEL, stop)


def _power(base: float, exponent: float) -> float:
    """Return ``base`` to a whole power by squaring: basic operations only, one result on every device.

    A library's ``pow`` differs between devices in the last bit. The error of 1 - base**t stays below 1e-13
    for betas up to 0.9995.
    """
    remaining = int(exponent) if exponent > 0 else 0
    result = 1.0
    while remaining:
        if remaining & 1:
            result *= base
        base *= base
        remaining >>= 1
    return result


def _constants(hyper: Sequence[float], step: float, dtype: torch.dtype) -> _Constants:
    lr, beta1, beta2, eps, weight_decay, is_amsgrad, is_maximize = hyper
    weight = 1.0 - beta1
    is_small = weight < 0.5
    bias_correction1 = 1.0 - _power(beta1, step)
    bias_correction2 = torch.tensor(1.0 - _power(beta2, step), dtype=torch.float64)
    # A tensor, because Python raises on the division by zero that a step count of zero brings; this is inf.
    minus_step_size = -(torch.tensor(lr, dtype=torch.float64) / bias_correction1)
    exact = [
        1.0 - lr * weight_decay,
        weight if is_small else 1.0 - weight,
        beta2,
        1.0 - beta2,
        bias_correction2.sqrt().item(),
        eps,
        minus_step_size.item(),
    ]
    rounded = torch.tensor(exact, dtype=torch.float64).to(dtype).tolist()
    return _Constants(is_small, is_amsgrad != 0, is_maximize != 0, *rounded)


def _update_chunk(
    constants: _Constants,
    scale: Tensor | None,
    param: Tensor,
    low: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
) -> None:
    if scale is not None:
        grad = grad * scale
    if constants.is_maximize:
        grad = -grad
    master = _read_master(param, low, grad.dtype).mul_(constants.decay)
    mean = exp_avg.to(grad.dtype)  # the tensor itself where it has that dtype already
    difference = grad - mean
    if constants.is_first_weight_small:
        mean.add_(difference.mul_(constants.first_weight))
    else:
        mean.copy_(grad - difference.mul_(constants.first_weight))
    square = exp_avg_sq.to(grad.dtype)
    square.mul_(constants.beta2).add_((grad * constants.one_minus_beta2).mul_(grad))
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    if constants.is_amsgrad:
        assert max_exp_avg_sq is not None
        square = torch.maximum(max_exp_avg_sq.to(grad.dtype), square)
        max_exp_avg_sq.copy_(square)
    # Divisors are tensors on the device; see reduce_slices_.
    correction = torch.full((), constants.bias_correction2_sqrt, dtype=grad.dtype, device=grad.device)
    denom = _square_root(square).div_(correction).add_(constants.eps)
    master.add_((mean * constants.minus_step_size).div_(denom))
    _write_master(param, low, master)


def _square_root(tensor: Tensor) -> Tensor:
    """Return the correctly rounded square root, which IEEE 754 asks for.

    On the CPU by NumPy, because torch.sqrt there calls MKL's vector library, which is one ulp off at times
    (0.7 % of uniform float32 values, measured with torch 2.13).
    """
    if tensor.device.type != "cpu":
        return tensor.sqrt()
    with numpy.errstate(invalid="ignore"):
        return torch.from_numpy(numpy.sqrt(tensor.numpy()))


def _read_master(param: Tensor, low: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the master weight in the compute dtype; ``param`` itself where it is that already."""
    if low is None:
        return param.to(dtype)
    if param.dtype == torch.bfloat16:
        return join_remainder(param, low)
    is_stale = low.to(torch.float16).view(torch.int16) != param.view(torch.int16)
    return torch.where(is_stale, param.to(dtype), low)


def _write_master(param: Tensor, low: Tensor | None, master: Tensor) -> None:
    if low is not None and param.dtype == torch.bfloat16:
        high, remainder = split_remainder(master)
        param.copy_(high)
        low.copy_(remainder)
        return
    param.copy_(master)
    if low is not None:
        low.copy_(master)


def join_remainder(param: Tensor, low: Tensor) -> Tensor:
    """Return the float32 master weight of a bfloat16 ``param`` and its int16 remainder ``low``.

    A remainder that the split of no float32 value leaves behind (the weight was edited: zero, inf or NaN with
    a stale remainder) counts as 0; joining it blindly would turn an edited zero into a NaN.
    """
    high = param.view(torch.int16).to(torch.int32) << 16
    remainder = low.to(torch.int32)
    magnitude = high & _F32_MAGNITUDE
    is_stale = (
        ((magnitude == 0) & (remainder < 0)) | ((magnitude == _F32_INF) & (remainder > 0)) | (magnitude > _F32_INF)
    )
    return (high + remainder.masked_fill_(is_stale, 0)).view(torch.float32)


def split_remainder(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 weight and the int16 remainder that hold a float32 ``master`` without loss."""
    bits = master.view(torch.int32)
    magnitude = bits & _F32_MAGNITUDE
    high = (bits + 0x8000) >> 16
    remainder = bits - (high << 16)
    # Rounding would carry a NaN into the sign bit (-0.0), and truncation could drop the last bit of a NaN.
    special = (bits >> 16) | ((magnitude > _F32_INF).to(torch.int32) * _BF16_QUIET_BIT)
    is_special = magnitude >= _F32_INF
    high = torch.where(is_special, special, high)
    return high.to(torch.int16).view(torch.bfloat16), remainder.masked_fill_(is_special, 0).to(torch.int16)
