"""Flat buffers: parameters as views into one bucket, and what this rank keeps of it.

full  [N]   all parameters of the bucket (stage 3: memory comes and goes, the storage object stays)
shard [n]   own range of the parameters: a view of ``full``, or at stage 3 a tensor of its own
grad  [n]   own range of the mean gradient, fp32 (fp64 for fp64), between backward and zero_grad
partial [n] the same, summed inside the shard group and not across replicas yet
exp_avg, exp_avg_sq, max_exp_avg_sq, low [n]   optimizer state, allocated at the first step
exp_avg_scale, exp_avg_sq_scale [n / 256]      beside 8-bit moments
sums  [S, 2]  of the squares of ``grad`` by segment, of the part of the shard that this replica speaks for
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero_shard.block_codec import decode_blocks, encode_blocks
from zero_shard.layout import (
    ALIGNMENT_NUMEL,
    BLOCK_NUMEL,
    BucketLayout,
    Segment,
    dense_strides,
    lay_out,
)
from zero_shard.number_formats import split_masters_
from zero_shard.pages import on_large_pages
from zero_shard.seen_weights import SeenWeights

STATE_NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
SCALE_NAMES = ("exp_avg_scale", "exp_avg_sq_scale")
# Added to the version counters of released parameters, so that autograd refuses to use what it saved of them: a node
# that runs outside of the backward that gathers its unit would read memory that has been given back.
RELEASED_VERSIONS = 1 << 30  # torch counts with 32 bits


class Place(NamedTuple):
    """Which part of a bucket this rank keeps, and which part of that it speaks for among replicas."""

    num_shards: int
    shard_rank: int
    num_replicas: int
    replica_rank: int


class Storage(NamedTuple):
    """How the optimizer state of a bucket is stored, and how its gradients travel.

    Attributes:
        moment_dtype: float32, bfloat16, float64, or int8: codes with a scale for each block of 256 elements.
        wire_dtype: Of gradients on the wire; int8 as for the moments.
        low_dtype: Of what the fp32 master has beyond the 16-bit weight; None: no master.
        is_stochastic: The weight is rounded stochastically.
        param_dtype: The 16 bits that float32 parameters are cast to; None: parameters keep their dtype.
    """

    moment_dtype: torch.dtype
    wire_dtype: torch.dtype
    low_dtype: torch.dtype | None = None
    is_stochastic: bool = False
    param_dtype: torch.dtype | None = None

    @property
    def is_split(self) -> bool:
        """Whether float32 parameters live on as a 16-bit weight and ``low``, which is part of them from the start."""
        return self.param_dtype is not None and self.low_dtype is not None


class Bucket:
    """Parameters of one dtype and device that are stored, reduced and gathered as one.

    Args:
        params: The parameters, in order; their data move into the bucket.
        names: Their names, for messages and checkpoints.
        first_slot: Number of the first parameter among all slots of the optimizer.
        layout: Where each parameter lies.
        place: Which part of it is this rank's.
        storage: How the optimizer state is stored.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        first_slot: int,
        layout: BucketLayout,
        place: Place,
        storage: Storage,
    ) -> None:
        self.params, self.names = list(params), list(names)
        self.first_slot, self.layout, self.storage = first_slot, layout, storage
        self.index = -1  # position among the optimizer's buckets
        self.dtype, self.device = storage.param_dtype or params[0].dtype, params[0].device
        # GradScaler unscales no float16 gradients: they would underflow.
        is_scaled = storage.param_dtype == torch.float16 and hasattr(torch.Tensor, "grad_dtype")
        self.grad_dtype = torch.float32 if is_scaled else self.dtype  # of ``param.grad``
        self.math_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.full = torch.empty(layout.numel, dtype=self.dtype, device=self.device)
        # [N] until `masters.keep_own`, where it is part of the parameters.
        self.low = self.full.new_zeros(layout.numel, dtype=storage.low_dtype) if storage.is_split else None
        self.seen = SeenWeights()
        self.views: list[Tensor] = []
        self._move_in()
        self.memory_orders = [_memory_order(view) for view in self.views]
        self.is_permuted = any(order is not None for order in self.memory_orders)
        self.offsets = [slot.offset for slot in layout.slots]
        self._pointers: list[int] = []  # of the views
        self._pointers_base = -1
        start, stop = layout.shard_range(place.shard_rank)
        self.own_range = slice(start, stop)
        self.shard = self.full[start:stop]
        self.owns_shard = False
        self.is_released = False
        self.was_gathered = False  # in the present pass
        self.grad: Tensor | None = None
        self.partial: Tensor | None = None
        self.exp_avg: Tensor | None = None
        self.exp_avg_sq: Tensor | None = None
        self.max_exp_avg_sq: Tensor | None = None
        self.exp_avg_scale: Tensor | None = None
        self.exp_avg_sq_scale: Tensor | None = None
        self.segments: list[Segment] = layout.segments(place.shard_rank)
        self.segment_of = {segment.slot: segment for segment in self.segments}
        self.segment_table = self._table(self.segments)
        numel = layout.shard_numel // place.num_replicas
        self.part_range = slice(place.replica_rank * numel, (place.replica_rank + 1) * numel)  # of the shard
        self.part_segments = layout.segments_between(start + self.part_range.start, start + self.part_range.stop)
        self.part_table = self._table(self.part_segments)
        self.sums = torch.zeros(len(self.part_segments), 2, dtype=torch.float64, device=self.device)
        self.has_sums = False  # those of ``grad`` as it was left
        self._sums_version = -1.0

    def _table(self, segments: Sequence[Segment]) -> Tensor:
        """Return segments as the kernels read them: [S, 4] start, numel, slot, start in the parameter."""
        rows = [[s.shard_start, s.numel, self.first_slot + s.slot, s.param_start] for s in segments]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 4).to(self.device)

    def note_sums(self) -> None:
        """Note that ``sums`` are those of ``grad`` as it is now."""
        self.has_sums, self._sums_version = True, version_of(self.grad)

    def are_sums_current(self) -> bool:
        """Whether ``sums`` are those of ``grad``, as far as torch counts changes in place."""
        return self.has_sums and self._sums_version == version_of(self.grad)

    @property
    def slots(self) -> range:
        """Numbers of this bucket's parameters among all slots of the optimizer."""
        return range(self.first_slot, self.first_slot + len(self.params))

    @property
    def label(self) -> str:
        """The bucket in words, for messages."""
        last = f" to {self.names[-1]}" if len(self.names) > 1 else ""
        return f"bucket {self.index} ({self.names[0]}{last})"

    @property
    def full_nbytes(self) -> int:
        """Bytes of the whole bucket."""
        return self.layout.numel * self.full.element_size()

    def _move_in(self) -> None:
        """Copy each parameter into its slot and make it a view of it; its old memory is freed one by one."""
        end = 0
        for param, (offset, numel) in zip(self.params, self.layout.slots, strict=True):
            self.full[end:offset].zero_()
            end = offset + numel
            view = self.full.as_strided(param.shape, dense_strides(param.shape, param.stride()), offset)
            if self.low is None:
                view.copy_(param.detach())
            else:
                split_masters_(in_memory(param.detach(), view.stride()), self.full[offset:end], self.low[offset:end])
            grad, param.grad = param.grad, None
            param.data = view
            if self.grad_dtype != self.dtype:
                param.grad_dtype = self.grad_dtype
            param.grad = grad if grad is None else grad.to(self.grad_dtype)
            self.views.append(view)
        self.full[end:].zero_()

    def take_back_replaced(self) -> None:
        """Move parameters whose data somebody has replaced (``param.data = ...``) back into their slots.

        Raises:
            RuntimeError: The new data have another shape, dtype or device.
        """
        if self._pointers_base != self.full.data_ptr():
            self._pointers_base, self._pointers = self.full.data_ptr(), list(map(Tensor.data_ptr, self.views))
        if list(map(Tensor.data_ptr, self.params)) == self._pointers:  # 20,000 tensors in a millisecond
            return
        for param, view, name in zip(self.params, self.views, self.names, strict=True):
            if param.data_ptr() == view.data_ptr():
                continue
            if (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
                raise RuntimeError(
                    f"parameter {name} was replaced by {tuple(param.shape)} {param.dtype} on {param.device}, "
                    f"expected {tuple(view.shape)} {view.dtype} on {view.device}; convert it before it is sharded"
                )
            view.copy_(param.detach())
            param.data = view
            torch.autograd.graph.increment_version(param)

    def split_off_shard(self) -> None:
        """Keep the own shard apart from ``full``, so that ``full`` can be released (stage 3)."""
        self.shard = self.full[self.own_range].clone()
        self.owns_shard = True

    def release_full(self) -> None:
        """Give the memory of ``full`` back; its storage object, and so every view, stays."""
        if not self.full.untyped_storage().resizable():
            # Somebody holds a NumPy array of it, which keeps the old memory; go on with a new one.
            self.full = torch.empty_like(self.full)
            self.views = [
                self.full.as_strided(view.shape, view.stride(), offset)
                for view, (offset, _) in zip(self.views, self.layout.slots, strict=True)
            ]
        self.full.untyped_storage().resize_(0)
        self.is_released = True
        self.seen.loaded_low.clear()

    def refill_full(self) -> None:
        """Take memory for ``full`` again and copy the own shard in; the rest is undefined until gathered."""
        self.full.untyped_storage().resize_(self.full_nbytes)
        on_large_pages(self.full)
        self.is_released, self.was_gathered = False, True
        self.full[self.own_range].copy_(self.shard)

    def local_view(self, flat: Tensor, position: int) -> Tensor:
        """Return the own part of one parameter in a shard-sized tensor: 1-d, empty if another rank owns it all.

        A part that is the whole parameter comes in the parameter's shape and strides.
        """
        part, view = self.local_part(flat, position), self.views[position]
        if part.numel() < view.numel():
            return part
        return part.as_strided(view.shape, view.stride(), part.storage_offset())

    def local_part(self, flat: Tensor, position: int) -> Tensor:
        """Return the own part of one parameter in a shard-sized tensor, 1-d in memory order, an alias."""
        segment = self.segment_of.get(position)
        if segment is None:
            return flat[:0]
        return flat[segment.shard_start : segment.shard_start + segment.numel]

    def in_memory_order(self, position: int, grad: Tensor) -> Tensor:
        """Return a gradient (an alias) whose row-major order is the order of the slot's memory.

        Raises:
            RuntimeError: It has another shape than its parameter.
        """
        view = self.views[position]
        if grad.shape != view.shape:
            raise RuntimeError(
                f"the gradient of {self.names[position]} has shape {tuple(grad.shape)}, expected {tuple(view.shape)}"
            )
        order = self.memory_orders[position]
        return grad if order is None else grad.permute(order)

    # ---- optimizer state -----------------------------------------------------------------------------------

    @property
    def has_codes(self) -> bool:
        """Whether the moments have 8 bits."""
        return self.storage.moment_dtype == torch.int8

    @property
    def has_wire_blocks(self) -> bool:
        """Whether gradients travel in 8 bits."""
        return self.storage.wire_dtype == torch.int8

    def allocate_state(self) -> None:
        """Allocate zeroed moments, and the rest of the master for 16-bit weights, once."""
        if self.exp_avg is not None:
            return
        numel, dtype = self.layout.shard_numel, self.storage.moment_dtype
        self.exp_avg = torch.zeros(numel, dtype=dtype, device=self.device)
        self.exp_avg_sq = torch.zeros(numel, dtype=torch.uint8 if self.has_codes else dtype, device=self.device)
        if self.has_codes:
            self.exp_avg_scale = torch.zeros(-(-numel // BLOCK_NUMEL), dtype=torch.float32, device=self.device)
            self.exp_avg_sq_scale = torch.zeros_like(self.exp_avg_scale)
        if self.low is not None:
            return
        if self.storage.low_dtype == torch.int16:
            self.low = torch.zeros(numel, dtype=torch.int16, device=self.device)
        elif self.storage.low_dtype is not None:
            self.low = self.shard.float()

    def allocate_max_exp_avg_sq(self) -> None:
        """Allocate the zeroed maximum of the second moment (amsgrad), once."""
        if self.max_exp_avg_sq is None and self.exp_avg_sq is not None:
            self.max_exp_avg_sq = torch.zeros_like(self.exp_avg_sq)

    def state_part(self, name: str, position: int) -> Tensor | None:
        """Return one parameter's part of a tensor of state as it is stored, 1-d (an alias); None if there is none."""
        flat: Tensor | None = getattr(self, name)
        if flat is None:
            return None
        return flat[self._blocks(position)] if name in SCALE_NAMES else self.local_part(flat, position)

    def state_entry(self, position: int) -> dict[str, Tensor]:
        """Return what of one parameter's moments this rank keeps, as it is stored (aliases)."""
        entry = {}
        for name in STATE_NAMES:
            flat = getattr(self, name)
            if flat is not None:
                entry[name] = self.local_view(flat, position)
        for name in SCALE_NAMES if self.has_codes else ():
            entry[name] = getattr(self, name)[self._blocks(position)]
        return entry

    def read_state(self, name: str) -> Tensor | None:
        """Return the state of this name [n] as numbers: an alias, or decoded."""
        flat: Tensor | None = getattr(self, name)
        if flat is None or not self.is_coded(name):
            return flat
        return decode_blocks(flat, getattr(self, f"{name}_scale"))

    def read_part(self, name: str, position: int) -> Tensor:
        """Return one parameter's part of the state of this name as numbers, 1-d: an alias, or decoded."""
        part = self.local_part(getattr(self, name), position)
        return (
            decode_blocks(part, getattr(self, f"{name}_scale")[self._blocks(position)]) if self.is_coded(name) else part
        )

    def is_coded(self, name: str) -> bool:
        """Whether the state of this name is stored as codes."""
        return self.has_codes and f"{name}_scale" in SCALE_NAMES

    def write_state(self, name: str, position: int, values: Tensor) -> None:
        """Replace one parameter's part of the state of this name; 8-bit moments take the nearest code.

        Args:
            values: 1-d, in the order of memory.
        """
        target = self.local_part(getattr(self, name), position)
        if not self.is_coded(name):
            target.copy_(values)
            return
        codes, scales = encode_blocks(values.to(device=self.device, dtype=torch.float32), target.dtype == torch.int8)
        target.copy_(codes)
        getattr(self, f"{name}_scale")[self._blocks(position)] = scales

    def _blocks(self, position: int) -> slice:
        segment = self.segment_of.get(position)
        if segment is None:
            return slice(0, 0)
        stop = segment.shard_start + segment.numel
        return slice(segment.shard_start // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))

    def held_nbytes(self) -> int:
        """Bytes of model state that this rank holds in the bucket right now."""
        return sum(self.held_by_kind().values())

    def held_by_kind(self) -> dict[str, int]:
        """Bytes that this rank holds in the bucket right now, of each kind of model state."""
        moments = [getattr(self, name) for name in (*STATE_NAMES, *SCALE_NAMES)]
        return {
            "parameters": self.full.untyped_storage().nbytes() + (self.shard.nbytes if self.owns_shard else 0),
            "gradients": _nbytes(self.grad, self.partial),
            "moments": _nbytes(*moments),
            "masters": _nbytes(self.low, self.seen.last_shard),
        }


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def in_memory(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return the elements, 1-d, as a tensor of these (dense) strides has them in memory; an alias where it has them."""
    if tensor.stride() != tuple(stride):
        tensor = torch.empty_strided(tensor.shape, tuple(stride), dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def version_of(tensor: Tensor | None) -> float:
    """Return a number that grows with every change in place; NaN, which equals nothing, where torch counts none."""
    if tensor is None:
        return -1.0
    return math.nan if tensor.is_inference() else float(tensor._version)


def _memory_order(view: Tensor) -> list[int] | None:
    """Return the dimensions in the order in which they lie in memory, None for row-major."""
    if view.is_contiguous():
        return None
    strides = view.stride()
    return sorted(range(view.dim()), key=lambda dim: (-strides[dim], view.shape[dim] == 1, dim))


def make_bucket(
    params: Sequence[nn.Parameter], names: Sequence[str], first_slot: int, place: Place, storage: Storage
) -> Bucket:
    """Lay parameters of one dtype and device out and move them into a new bucket."""
    has_blocks = torch.int8 in (storage.moment_dtype, storage.wire_dtype)
    alignment = BLOCK_NUMEL if has_blocks else ALIGNMENT_NUMEL
    layout = lay_out([param.numel() for param in params], place.num_shards, place.num_replicas, alignment)
    return Bucket(params, names, first_slot, layout, place, storage)
