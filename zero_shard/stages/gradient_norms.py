"""Norms of the mean gradient: from the squares that were summed while it was reduced, or in a pass of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero_shard.buffers import Bucket, version_of
from zero_shard.collectives import Communicator
from zero_shard.norms import global_norm, norm_of_totals, norms_of_parts, norms_of_sums, total_of
from zero_shard.ops import Kernels
from zero_shard.sharded_grad import ShardedGrad
from zero_shard.stages.plain_gradients import PlainGradients
from zero_shard.stages.slots import GradSlot


class GradientNorms:
    """Norms over all ranks of the gradients in buckets, once they are reduced (see ``Reducer.collect``).

    Among replicas, which hold the same, each speaks for a part of the shard.

    Args:
        buckets, slots: Those of the reducer, which adds to them.
        communicator: The ranks.
        kernels: sum_squares_ and sum_pairs_.
        plain: The gradients of a world of one.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        slots: Sequence[GradSlot],
        communicator: Communicator,
        kernels: Kernels,
        plain: PlainGradients,
    ) -> None:
        self._buckets, self._slots, self._plain = buckets, slots, plain
        self._communicator, self._kernels = communicator, kernels
        self._is_alone = communicator.num_ranks == 1
        self.first_total: Tensor | None = None  # [2] of the first norm of the present round: nothing is clipped yet
        self._of_slots: dict[float, tuple[list[float], Tensor]] = {}  # order -> versions of gradients, norm of each [P]

    def global_norm(self, order: float, is_owned: Tensor) -> Tensor:
        """Return the norm of the whole mean gradient, 0-dim, fp32 or fp64, equal on all ranks. All ranks call.

        Args:
            order: p of the p-norm, > 0; inf for the largest absolute value.
            is_owned: [P] uint8 on the CPU: the parameter is in a group; others do not count.
        """
        if order != 2:
            return global_norm(self._parts(is_owned), order, self._communicator)
        total = total_of(self._square_sums(is_owned), self._kernels)
        if self.first_total is None:
            self.first_total = total
        is_double = any(bucket.math_dtype == torch.float64 for bucket in self._buckets_with_gradients())
        gathered = self._communicator.all_gather_small(total, "the gradient norm")
        return norm_of_totals(gathered, is_double, self._kernels)

    def first_squares(self, is_owned: Tensor) -> tuple[Tensor, Tensor, list[Bucket]]:
        """Return what the first norm since `forget` has found, and take it now if there was none. Local.

        Returns:
            This rank's sum of squares [2]; the same for each segment [K, 2] of these buckets.
        """
        buckets = list(self._buckets_with_gradients())
        if self.first_total is None:
            self.first_total = total_of(self._square_sums(is_owned), self._kernels)
        pairs = [bucket.sums for bucket in buckets]
        return self.first_total, torch.cat(pairs) if pairs else self.first_total.new_zeros(0, 2), buckets

    def norm_of(self, slot: GradSlot, order: float) -> Tensor:
        """Return the norm of one mean gradient, 0-dim fp64 on the CPU. All ranks call.

        The norms of all gradients are taken at once and kept until one is reduced or changed in place, as clipping code
        asks for them one by one.
        """
        versions = [version_of(bucket.grad) for bucket in self._buckets]
        kept = self._of_slots.get(order)
        if kept is None or kept[0] != versions:
            self.refuse_plain()
            kept = self._of_slots[order] = (versions, self._all(order))
        return kept[1][slot.index]

    def refuse_plain(self) -> None:
        """Raise NotImplementedError if a plain gradient that the user has set stands beside sharded ones. Local."""
        for slot in self._slots:
            grad = slot.param.grad
            if grad is not None and grad is not slot.handed and not isinstance(grad, ShardedGrad):
                raise NotImplementedError(
                    f"the norm of sharded gradients is not available while p.grad of {slot.name} is a plain tensor, "
                    "which counts as this rank's gradient and is averaged in step(): ranks would get different norms. "
                    "Clip with optimizer.clip_grad_norm_(max_norm) or max_grad_norm in the config"
                )

    def forget(self) -> None:
        """Forget the norms of slots: gradients may have changed. All ranks do so at the same call."""
        self._of_slots.clear()
        self.first_total = None

    def _square_sums(self, is_owned: Tensor) -> Tensor:
        """Return [K, 2] fp64, sums of squares as pairs, of the parts that this rank speaks for."""
        owned, pairs = is_owned.numpy(), []
        for bucket in self._buckets_with_gradients():
            self._refresh(bucket)
            is_counted = owned[bucket.slots.start : bucket.slots.stop]
            if is_counted.all():
                pairs.append(bucket.sums)
            else:
                pairs.append(bucket.sums[[bool(is_counted[segment.slot]) for segment in bucket.part_segments]])
        device = pairs[0].device if pairs else torch.device("cpu")
        return torch.cat([torch.zeros(0, 2, dtype=torch.float64, device=device), *(each.to(device) for each in pairs)])

    def _parts(self, is_owned: Tensor) -> Iterator[Tensor]:
        owned = is_owned.numpy()
        for bucket in self._buckets_with_gradients():
            for position, part in self._parts_of(bucket):
                if owned[bucket.first_slot + position]:
                    yield part

    def _all(self, order: float) -> Tensor:
        if order != 2:
            parts: list[Tensor | None] = [None] * len(self._slots)
            for bucket in self._buckets_with_gradients():
                for position, part in self._parts_of(bucket):
                    parts[bucket.first_slot + position] = part
            return norms_of_parts(parts, order, self._communicator)
        pairs = torch.zeros(len(self._slots), 2, dtype=torch.float64)
        for bucket in self._buckets_with_gradients():
            self._refresh(bucket)
            pairs[[bucket.first_slot + segment.slot for segment in bucket.part_segments]] = bucket.sums.cpu()
        if self.first_total is None:
            self.first_total = total_of(pairs, self._kernels)
        return norms_of_sums(pairs, self._communicator)

    def _buckets_with_gradients(self) -> Iterator[Bucket]:
        for bucket in self._buckets:
            has_plain = self._is_alone and len(self._plain.present(bucket)[1]) > 0
            if has_plain or bucket.grad is not None:
                yield bucket

    def _refresh(self, bucket: Bucket) -> None:
        """Take the sums of squares of a bucket's gradient unless they are known. Local."""
        numel = bucket.part_range.stop - bucket.part_range.start
        if self._is_alone:
            self._kernels.sum_squares_(bucket.sums, *self._plain.of(bucket), numel, bucket.part_table)
            return
        assert bucket.grad is not None
        # Whoever holds plain gradients (stage 0) may have changed them behind torch's back, through grad.data.
        is_plain = bucket.layout.num_shards == 1 and bucket.grad.dtype == bucket.grad_dtype  # as in `GradSlot.hand`
        if is_plain or not bucket.are_sums_current():
            self._kernels.sum_squares_(bucket.sums, [bucket.grad[bucket.part_range]], [0], numel, bucket.part_table)
            bucket.note_sums()

    def _parts_of(self, bucket: Bucket) -> Iterator[tuple[int, Tensor]]:
        """Yield the position and the 1-d part of each gradient of a bucket that this rank speaks for."""
        if self._is_alone:
            for position, grad in zip(*self._plain.present(bucket), strict=True):
                yield position, grad.reshape(-1)
            return
        assert bucket.grad is not None
        part = bucket.grad[bucket.part_range]
        for segment in bucket.part_segments:
            yield segment.slot, part[segment.shard_start : segment.shard_start + segment.numel]
