"""What the twins check before they change anything: the same faults, in the same words, as the compiled operators.

They raise RuntimeError, because that is what the compiled operators (and torch's own) raise for the same fault.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_shard.adamw_math import Shard
from zero_shard.layout import BLOCK_NUMEL

FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MAX_DIMS = 6
NUM_HYPER = 7  # lr, beta1, beta2, eps, weight_decay, is_amsgrad, is_maximize
_IS_AMSGRAD = 5
_SEGMENT_COLUMNS = 4


class Tables(NamedTuple):
    """The tables of a step, on the device; see ``twins.adamw_``."""

    segments: Tensor
    slot_steps: Tensor
    slot_is_active: Tensor
    slot_groups: Tensor
    slot_numbers: Tensor
    group_hyper: Tensor


def check(condition: bool, message: str) -> None:
    """Raise RuntimeError unless ``condition`` holds."""
    if not condition:
        raise RuntimeError(message)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kind_of(tensor: Tensor | None) -> str:
    """Return dtype, shape and device in words."""
    return "None" if tensor is None else f"{_name_of(tensor.dtype)}{list(tensor.shape)} on {tensor.device}"


class Checker(NamedTuple):
    """The checks of one call of operator ``op``; all tensors share ``device``."""

    op: str
    device: torch.device

    def tensor(self, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], shape: list[int]) -> None:
        """Refuse anything but a contiguous tensor of one of the dtypes, of this shape."""
        is_right = tensor.dtype in dtypes and list(tensor.shape) == shape and tensor.device == self.device
        wanted = " or ".join(map(_name_of, dtypes))
        check(is_right, f"{self.op}: {name} must be {wanted}{shape} on {self.device}, got {kind_of(tensor)}")
        check(tensor.is_contiguous(), f"{self.op}: {name} must be contiguous, got strides {list(tensor.stride())}")

    def optional(self, name: str, tensor: Tensor | None, dtypes: Sequence[torch.dtype], shape: list[int]) -> None:
        """Check a tensor that may be None."""
        if tensor is not None:
            self.tensor(name, tensor, dtypes, shape)

    def absent(self, name: str, tensor: Tensor | None, where: str) -> None:
        """Refuse a tensor that has no place here."""
        check(tensor is None, f"{self.op}: {name} must be None {where}, got {kind_of(tensor)}")

    def present(self, name: str, tensor: Tensor | None, where: str) -> None:
        """Refuse None."""
        check(tensor is not None, f"{self.op}: {name} must be given {where}, got None")

    def offsets(
        self, names: tuple[str, str, str], offsets: Sequence[int], tensors: Sequence[Tensor], numel: int
    ) -> None:
        """Refuse offsets that do not place the tensors one after the other in a whole of ``numel`` elements.

        Args:
            names: Of the offsets, of the tensors, and of the whole.
        """
        name, tensors_name, whole = names
        check(
            len(offsets) == len(tensors),
            f"{self.op}: {name} must have one entry for each of the {len(tensors)} {tensors_name}, got {len(offsets)}",
        )
        end = 0
        for index, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
            last = numel - tensor.numel()
            if not end <= offset <= last:
                raise RuntimeError(
                    f"{self.op}: {name}[{index}] must lie between {end} and {last} "
                    f"(ascending, disjoint, inside {whole}), got {offset}"
                )
            end = offset + tensor.numel()

    def floats(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors of other dtypes or on another device."""
        for index, tensor in enumerate(tensors):
            if tensor.dtype not in FLOAT_DTYPES or tensor.device != self.device:
                wanted = " or ".join(map(_name_of, FLOAT_DTYPES))
                raise RuntimeError(
                    f"{self.op}: {name}[{index}] must be {wanted} on {self.device}, got {kind_of(tensor)}"
                )

    def runs(self, name: str, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
        """Refuse tensors that are not contiguous, or not all of one of the dtypes."""
        for index, tensor in enumerate(tensors):
            wanted = (tensors[0].dtype,) if index else dtypes
            self.tensor(f"{name}[{index}]", tensor, wanted, list(tensor.shape))

    def segments(self, segments: Tensor) -> None:
        """Refuse a table of segments of another kind; what is in it is checked by ``segment_rows``."""
        num_segments = segments.numel() // _SEGMENT_COLUMNS
        self.tensor("segments", segments, (torch.int64,), [num_segments, _SEGMENT_COLUMNS])

    def segment_rows(self, table: list[list[int]], numel: int) -> None:
        """Refuse segments that overlap or leave the shard of ``numel`` elements."""
        end = 0
        for index, (start, length, _, param_start) in enumerate(table):
            if not (length >= 0 and end <= start <= numel - length and param_start >= 0):
                raise RuntimeError(
                    f"{self.op}: segments[{index}] must be ascending, disjoint, within {numel} elements, with a "
                    f"param_start of at least 0, got start {start}, numel {length}, param_start {param_start}"
                )
            end = start + length


def count_dims(tensor: Tensor) -> int:
    """Return how many dimensions are left when neighbours that are one run of memory are joined."""
    count, joined = 0, -1
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if length == 1:
            continue
        count += stride != joined
        joined = stride * length
    return count


def check_adamw(
    shard: Shard,
    grads: Sequence[Tensor],
    grad_offsets: Sequence[int],
    tables: Tables,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Check all arguments of ``adamw_`` as far as that needs no look into the tables."""
    param, numel = shard.param, shard.param.numel()
    checker = Checker("adamw_", param.device)
    compute = torch.float64 if param.dtype == torch.float64 else torch.float32
    checker.tensor("param", param, FLOAT_DTYPES, [numel])
    grad_dtypes = (compute,) if param.dtype == compute else (compute, param.dtype)
    checker.offsets(("grad_offsets", "grads", "param"), grad_offsets, grads, numel)
    checker.runs("grads", grads, grad_dtypes)
    _check_weight(checker, shard)
    _check_moments(checker, shard, compute)
    num_slots = tables.slot_steps.numel()
    checker.segments(tables.segments)
    checker.tensor("slot_steps", tables.slot_steps, (torch.float32,), [num_slots])
    checker.tensor("slot_is_active", tables.slot_is_active, (torch.uint8,), [num_slots])
    checker.tensor("slot_groups", tables.slot_groups, (torch.int32,), [num_slots])
    checker.tensor("slot_numbers", tables.slot_numbers, (torch.int64,), [num_slots])
    hyper_shape = [tables.group_hyper.numel() // NUM_HYPER, NUM_HYPER]
    checker.tensor("group_hyper", tables.group_hyper, (torch.float64,), hyper_shape)
    checker.optional("grad_scale", grad_scale, (torch.float32, torch.float64), [])
    checker.optional("found_inf", found_inf, (torch.float32,), [])


def _check_weight(checker: Checker, shard: Shard) -> None:
    param, low = shard.param, shard.low
    where = f"for a {_name_of(param.dtype)} param"
    low_dtype = {torch.bfloat16: torch.int16, torch.float16: torch.float32}.get(param.dtype)
    if low_dtype is None:
        checker.absent("low", low, where)
    else:
        checker.optional("low", low, (low_dtype,), [param.numel()])
    if shard.is_stochastic:
        check(param.dtype == torch.bfloat16, f"adamw_: stochastic must be False {where}, got True")
        checker.absent("low", low, "where stochastic is True")


def _check_moments(checker: Checker, shard: Shard, compute: torch.dtype) -> None:
    shape, dtype = [shard.param.numel()], shard.exp_avg.dtype
    dtypes = (compute,) if compute == torch.float64 else (compute, torch.bfloat16, torch.int8)
    checker.tensor("exp_avg", shard.exp_avg, dtypes, shape)
    is_coded, where = dtype == torch.int8, f"for {_name_of(dtype)} moments"
    checker.tensor("exp_avg_sq", shard.exp_avg_sq, (torch.uint8 if is_coded else dtype,), shape)
    scales = {"exp_avg_scale": shard.exp_avg_scale, "exp_avg_sq_scale": shard.exp_avg_sq_scale}
    if is_coded:
        checker.absent("max_exp_avg_sq", shard.max_exp_avg_sq, where)
        for name, scale in scales.items():
            checker.present(name, scale, where)
            checker.optional(name, scale, (torch.float32,), [-(-shape[0] // BLOCK_NUMEL)])
    else:
        checker.optional("max_exp_avg_sq", shard.max_exp_avg_sq, (dtype,), shape)
        for name, scale in scales.items():
            checker.absent(name, scale, where)


class StepRows(NamedTuple):
    """The tables of a step, read on the host."""

    segments: list[list[int]]
    steps: list[float]
    is_active: list[int]
    groups: list[int]
    numbers: list[int]
    hyper: list[list[float]]


def read_tables(shard: Shard, tables: Tables) -> StepRows:
    """Read and check the tables; waits for the device.

    Raises:
        RuntimeError: an entry that is out of range.
    """
    rows = StepRows(*(table.tolist() for table in tables))
    num_slots, num_groups = len(rows.steps), len(rows.hyper)
    Checker("adamw_", shard.param.device).segment_rows(rows.segments, shard.param.numel())
    for index, (start, _, slot, param_start) in enumerate(rows.segments):
        if not 0 <= slot < num_slots:
            raise RuntimeError(f"adamw_: segments[{index}] must be within {num_slots} slots, got slot {slot}")
        if shard.exp_avg_scale is not None and (start % BLOCK_NUMEL or param_start % BLOCK_NUMEL):
            raise RuntimeError(
                f"adamw_: segments[{index}] must start at multiples of {BLOCK_NUMEL} for int8 moments, "
                f"got start {start}, param_start {param_start}"
            )
    for slot, group in enumerate(rows.groups):
        if not 0 <= group < num_groups:
            raise RuntimeError(
                f"adamw_: slot_groups[{slot}] must be a row of the {num_groups} in group_hyper, got {group}"
            )
        if shard.max_exp_avg_sq is None and rows.is_active[slot] and rows.hyper[group][_IS_AMSGRAD]:
            raise RuntimeError(
                f"adamw_: max_exp_avg_sq must be given for group {group}, which asks for amsgrad, got None"
            )
    return rows


def find_runs(rows: StepRows, grads: Sequence[Tensor], grad_offsets: Sequence[int]) -> list[int]:
    """Return which gradient holds each segment, -1 for those that need none.

    Raises:
        RuntimeError: An active segment does not lie within one gradient.
    """
    found = []
    for number, (start, length, slot, _) in enumerate(rows.segments):
        if not length or not rows.is_active[slot]:
            found.append(-1)
            continue
        place = bisect_right(grad_offsets, start) - 1  # of an empty tensor and the next one the latter
        is_inside = place >= 0 and start + length <= grad_offsets[place] + grads[place].numel()
        if not is_inside:
            raise RuntimeError(
                f"adamw_: grads must hold each active segment within one tensor, got none for segments[{number}] "
                f"with start {start}, numel {length}"
            )
        found.append(place)
    return found
