"""Flat buffers: parameters as views into one bucket, and what this rank keeps of it.

full  [N]   all parameters of the bucket (stage 3: memory comes and goes, the storage object stays)
shard [n]   own range of the parameters: a view of ``full``, or at stage 3 a tensor of its own
grad  [n]   own range of the mean gradient, fp32 (fp64 for fp64), between backward and zero_grad
exp_avg, exp_avg_sq, max_exp_avg_sq, low [n]   optimizer state, allocated at the first step
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zero_shard.layout import BucketLayout, Segment, dense_strides, lay_out

STATE_NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Bucket:
    """Parameters of one dtype and device that are stored, reduced and gathered as one.

    Args:
        params: The parameters, in order; their data move into the bucket.
        names: Their names, for messages and checkpoints.
        first_slot: Number of the first parameter among all slots of the optimizer.
        layout: Where each parameter lies.
        shard_rank: Which shard this rank owns.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        first_slot: int,
        layout: BucketLayout,
        shard_rank: int,
    ) -> None:
        self.params, self.names = list(params), list(names)
        self.first_slot, self.layout, self.shard_rank = first_slot, layout, shard_rank
        self.index = -1  # position among the optimizer's buckets
        self.dtype, self.device = params[0].dtype, params[0].device
        self.math_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.full = torch.empty(layout.numel, dtype=self.dtype, device=self.device)
        self.views: list[Tensor] = []
        self._move_in()
        start, stop = layout.shard_range(shard_rank)
        self.own_range = slice(start, stop)
        self.shard = self.full[start:stop]
        self.owns_shard = False
        self.is_released = False
        self.was_gathered = False  # in the present pass
        self.grad: Tensor | None = None
        self.low: Tensor | None = None
        self.exp_avg: Tensor | None = None
        self.exp_avg_sq: Tensor | None = None
        self.max_exp_avg_sq: Tensor | None = None
        self.segments: list[Segment] = layout.segments(shard_rank)
        self.segment_of = {segment.slot: segment for segment in self.segments}
        self.segment_table = torch.tensor(
            [[s.shard_start, s.numel, first_slot + s.slot] for s in self.segments], dtype=torch.int64
        ).view(-1, 3)
        self.segment_table = self.segment_table.to(self.device)

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
            view = self.full.as_strided(param.shape, dense_strides(param.shape, param.stride()), offset)
            view.copy_(param.detach())
            param.data = view
            self.views.append(view)
            end = offset + numel
        self.full[end:].zero_()

    def take_back_replaced(self) -> None:
        """Move parameters whose data somebody has replaced (``param.data = ...``) back into their slots.

        Raises:
            RuntimeError: The new data have another shape, dtype or device.
        """
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

    def refill_full(self) -> None:
        """Take memory for ``full`` again and copy the own shard in; the rest is undefined until gathered."""
        self.full.untyped_storage().resize_(self.full_nbytes)
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

    def allocate_state(self, state_dtype: torch.dtype, has_master: bool) -> None:
        """Allocate zeroed moments, and the rest of the master for 16-bit weights, once."""
        if self.exp_avg is not None:
            return
        dtype = self.math_dtype if state_dtype == torch.float32 or self.dtype == torch.float64 else state_dtype
        numel = self.layout.shard_numel
        self.exp_avg = torch.zeros(numel, dtype=dtype, device=self.device)
        self.exp_avg_sq = torch.zeros(numel, dtype=dtype, device=self.device)
        if has_master and self.dtype == torch.bfloat16:
            self.low = torch.zeros(numel, dtype=torch.int16, device=self.device)
        elif has_master and self.dtype == torch.float16:
            self.low = self.shard.float()

    def allocate_max_exp_avg_sq(self) -> None:
        """Allocate the zeroed maximum of the second moment (amsgrad), once."""
        if self.max_exp_avg_sq is None and self.exp_avg_sq is not None:
            self.max_exp_avg_sq = torch.zeros_like(self.exp_avg_sq)

    def held_nbytes(self) -> int:
        """Bytes of model state that this rank holds in the bucket right now."""
        held = self.full.untyped_storage().nbytes() + (self.shard.nbytes if self.owns_shard else 0)
        for tensor in (self.grad, self.low, self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq):
            held += 0 if tensor is None else tensor.nbytes
        return held


def make_bucket(
    params: Sequence[nn.Parameter],
    names: Sequence[str],
    first_slot: int,
    num_shards: int,
    replicas: int,
    shard_rank: int,
) -> Bucket:
    """Lay parameters of one dtype and device out and move them into a new bucket."""
    numels = [param.numel() for param in params]
    layout = lay_out(numels, num_shards, params[0].element_size(), replicas)
    return Bucket(params, names, first_slot, layout, shard_rank)
