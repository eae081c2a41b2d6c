"""One parameter in a bucket, and the state of its gradient on this rank."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zero_shard.buffers import Bucket
from zero_shard.collectives import Communicator
from zero_shard.sharded_grad import ShardedGrad


class GradOwner(Protocol):
    """Who reduces the gradients of slots."""

    @property
    def communicator(self) -> Communicator:
        """The ranks; all of them read."""

    def collect(self) -> None:
        """Reduce every gradient that is not reduced yet; all ranks call."""

    def refuse_plain(self) -> None:
        """Raise NotImplementedError if a plain gradient stands beside sharded ones; local."""

    def norm_of(self, slot: GradSlot, order: float) -> Tensor:
        """Return the norm of one mean gradient; all ranks call."""

    def norm_of_part(self, part: Tensor, order: float) -> Tensor:
        """Return the norm of a tensor of which each rank has a part; all ranks call."""


class GradSlot:
    """The gradient of one parameter between autograd and its bucket.

    Attributes:
        local: This rank's own full gradient, not reduced yet; None if there is none.
        handed: The object given to the user as ``param.grad``; if ``param.grad`` is another one, the user took it.
        has_reduced: The bucket's ``grad`` holds a mean gradient of this parameter.
        has_partial: The bucket's ``partial`` holds a sum for it that has not crossed replicas yet.
        is_ready: The gradient has arrived in the present backward.
        is_sent: A local gradient has gone into the exchange of the present round.
        generation: Grows when the gradient is dropped: a ShardedGrad of an older one raises.
        hooks: The hooks after accumulation of the parameter, and the key of ours among them.
    """

    def __init__(
        self,
        index: int,
        position: int,
        bucket: Bucket,
        owner: GradOwner,
    ) -> None:
        self.index, self.position, self.bucket = index, position, bucket
        self.name, self.param = bucket.names[position], bucket.params[position]
        self.local: Tensor | None = None
        self.handed: Tensor | None = None
        self.has_reduced = self.has_partial = False
        self.is_ready = False
        self.is_sent = False
        self.hooks: tuple[OrderedDict[int, Any], int] | None = None
        self.generation = 0
        self._sharded: ShardedGrad | None = None  # kept from step to step
        self._owner = weakref.ref(owner)

    # ---- what a ShardedGrad asks for -----------------------------------------------------------------------

    @property
    def _is_pending(self) -> bool:
        return self.local is not None or self.has_partial or not self.has_reduced

    def reduced_part(self) -> Tensor:
        """Return this rank's part of the mean gradient, reducing first if it is pending (then all ranks call)."""
        if self._is_pending:
            self._alive().collect()
        if not self.has_reduced or self.bucket.grad is None:  # nobody had one
            segment = self.bucket.segment_of.get(self.position)
            numel = 0 if segment is None else segment.numel
            return torch.zeros(numel, dtype=self.bucket.math_dtype, device=self.bucket.device)
        return self.bucket.local_part(self.bucket.grad, self.position)

    def gather_full(self, part: Tensor) -> Tensor:
        """Return the full tensor [shape of the parameter] of which each rank has a part [n]. All ranks call."""
        bucket, communicator = self.bucket, self._alive().communicator
        wire = part.to(torch.uint8) if part.dtype == torch.bool else part
        flat = wire.new_zeros(bucket.layout.numel)
        bucket.local_part(flat[bucket.own_range], self.position).copy_(wire)
        communicator.all_gather_(
            communicator.shards, flat, 3 * bucket.index + 2, f"the full gradient of {self.name}"
        ).wait()
        view = bucket.views[self.position]
        return flat.as_strided(view.shape, view.stride(), bucket.layout.slots[self.position].offset).clone()

    def own_part(self, full: Tensor) -> Tensor:
        """Return the own part [n] of a full tensor, or of one that expands to the parameter's shape. Local."""
        bucket, segment = self.bucket, self.bucket.segment_of.get(self.position)
        full = full.expand(self.param.shape)
        if segment is None:
            return full.new_empty(0)
        flat = bucket.in_memory_order(self.position, full).reshape(-1)
        return flat[segment.param_start : segment.param_start + segment.numel]

    def counted_part(self, part: Tensor) -> Tensor:
        """Return what of the own part this rank speaks for among replicas. Local."""
        segment = self.bucket.segment_of.get(self.position)
        if segment is None:
            return part
        spoken = self.bucket.part_range
        start, stop = max(spoken.start - segment.shard_start, 0), max(spoken.stop - segment.shard_start, 0)
        return part[start:stop]

    def norm(self, order: float) -> Tensor:
        """Return the norm of the mean gradient, 0-dim fp64 on the CPU. All ranks call."""
        if self._is_pending:
            self._alive().refuse_plain()  # before it is averaged with the rest, while the caller holds the old one
            self.reduced_part()
        return self._alive().norm_of(self, order)

    def norm_of_part(self, part: Tensor, order: float) -> Tensor:
        """Return the norm of a tensor of which each rank has a part, 0-dim on the CPU. All ranks call."""
        return self._alive().norm_of_part(self.counted_part(part), order)

    def from_all_ranks(self, values: Tensor) -> Tensor:
        """Return [W, n] from a small tensor [n] of each rank. All ranks call."""
        return self._alive().communicator.all_gather_small(values, f"what ranks know of the gradient of {self.name}")

    def note_access(self) -> None:
        """Note that the gradient may change. Local."""
        self.bucket.has_sums = False

    def note_change(self) -> None:
        """Note that an operator has changed the gradient in place. All ranks call, none waits."""
        if self.bucket.grad is not None:
            increment_version(self.bucket.grad)  # torch counts no changes made in a dispatch

    def _alive(self) -> GradOwner:
        owner = self._owner()
        if owner is None:
            raise RuntimeError(f"the optimizer that holds the gradient of {self.name} has been deleted")
        return owner

    # ---- what the reducer does -----------------------------------------------------------------------------

    def take(self) -> None:
        """Take what is in ``param.grad``: this rank's local gradient (then None is left), or the mean gradient."""
        grad = self.param.grad
        if isinstance(grad, ShardedGrad):
            self.adopt(grad)
        elif grad is not None:
            if grad.layout != torch.strided:
                refuse_sparse(self.name, grad)
            self.local = grad.detach()
            self.param.grad = None

    def make_way(self) -> None:
        """Take away what was handed out, and give autograd the local gradient to add to."""
        param, grad = self.param, self.param.grad
        if grad is not None:
            if isinstance(grad, ShardedGrad) and grad is not self.handed:
                self.adopt(grad)
            if param.grad is self.handed:
                param.grad = None
        assert self.hooks is not None
        hooks, key = self.hooks
        if len(hooks) > 1 and next(reversed(hooks)) != key:
            hooks[key] = hooks.pop(key)  # the user's come first: they see this rank's gradient, and may change it
        if self.local is not None:
            param.grad, self.local = self.local, None  # autograd adds to it in place

    def adopt(self, grad: ShardedGrad) -> None:
        """Make a sharded tensor in ``param.grad`` the mean gradient: the user put it there (``p.grad = p.grad * 0.5``).

        Raises:
            NotImplementedError: It belongs to another parameter.
        """
        if grad.source is not self:
            raise NotImplementedError(
                f"p.grad of {self.name} was set to a sharded gradient of {grad.source.name}, of which each rank holds "
                "other elements; use grad.full() (all ranks call)"
            )
        if grad.is_value:
            bucket = self.bucket
            if bucket.grad is None:
                bucket.grad = torch.zeros(bucket.layout.shard_numel, dtype=bucket.math_dtype, device=bucket.device)
            self._drop_partial()
            bucket.local_part(bucket.grad, self.position).copy_(grad.part)
            bucket.has_sums, self.has_reduced, self.local = False, True, None
            self.hand({})
        else:
            grad.check_current()
            self.handed = grad

    def hand(self, views: dict[int, list[Tensor]]) -> None:
        """Give the mean gradient to the user: plain where it is whole and of the parameter's dtype, else sharded.

        Args:
            views: Those of whole gradients by bucket, as far as they have been made; added to.
        """
        grad, handed = self.bucket.grad, self.handed
        assert grad is not None
        if self.bucket.layout.num_shards == 1 and grad.dtype == self.bucket.grad_dtype:
            if handed is None or handed._base is not grad:
                if self.bucket.index not in views:
                    views[self.bucket.index] = _views_of_whole(self.bucket, grad)
                self.handed = views[self.bucket.index][self.position]
        elif handed is None:
            self.handed = self._new_handed()
        self._set_grad(self.handed)

    def hand_pending(self) -> None:
        """Give the user a gradient that is reduced at the first read."""
        if not isinstance(self.handed, ShardedGrad):
            self.handed = self._new_handed()
        self._set_grad(self.handed)

    def _set_grad(self, grad: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # that of a released parameter takes microseconds
            self.param.grad = grad

    def _new_handed(self) -> ShardedGrad:
        """Return a ShardedGrad that nobody else holds: making one costs more than all else that a step does to it."""
        grad = self._sharded
        # Held by this slot, `grad` and the call's argument. A dtype that the user has changed is refused in step().
        with torch._C.DisableTorchFunctionSubclass():
            is_fit = grad is not None and not grad.requires_grad and self.param.dtype == self.bucket.dtype
        if grad is None or not is_fit or sys.getrefcount(grad) > 3:
            grad = self._sharded = ShardedGrad(self.param, self)
        grad.generation = self.generation
        return grad

    def notice_replaced(self) -> None:
        """Use what the user has put in the place of what was handed out."""
        grad, own = self.param.grad, self.bucket.grad
        if isinstance(grad, ShardedGrad):
            self.adopt(grad)
            return
        if grad is not None and own is not None and grad.untyped_storage()._cdata == own.untyped_storage()._cdata:
            if self.handed is not None and (grad.data_ptr(), grad.stride()) == (
                self.handed.data_ptr(),
                self.handed.stride(),
            ):
                self.handed = grad  # p.grad = p.grad.detach()
                return
            self.param.grad = grad.clone()
        self.drop()

    def notice_moved(self) -> bool:
        """Use what the user has given to a plain gradient by ``p.grad.data = ...``, as if it were another tensor.

        Returns:
            Whether there was something.
        """
        handed, own = self.handed, self.bucket.grad
        if own is None or handed is None or isinstance(handed, ShardedGrad) or handed.numel() == 0:
            return False
        if handed.data_ptr() == 0:  # it was pending, and became plain while the right side was computed
            if own.is_meta:  # a rehearsal
                return False
            raise RuntimeError(
                f"p.grad.data of {self.name} was set to a sharded gradient, which has no memory of its own; assign to "
                "p.grad, or use p.grad.copy_(...)"
            )
        if handed.data_ptr() == own.data_ptr() + self.bucket.offsets[self.position] * own.element_size():
            return False
        self.param.grad = handed.detach().clone()
        self.drop()
        return True

    def drop(self) -> None:
        """Forget everything about the gradient: the user took it away."""
        if self.has_reduced and self.bucket.grad is not None:
            self.bucket.local_part(self.bucket.grad, self.position).zero_()
            self.bucket.has_sums = False
        self._drop_partial()
        self.forget()

    def _drop_partial(self) -> None:
        if self.has_partial and self.bucket.partial is not None:
            self.bucket.local_part(self.bucket.partial, self.position).zero_()
        self.has_partial = False

    def forget(self) -> None:
        """Forget the gradient; references to it raise from now on."""
        self.local, self.handed, self.has_reduced, self.has_partial = None, None, False, False
        self.generation += 1


def _views_of_whole(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """Return the gradient of every parameter of a bucket that is not sharded, as views of its gradient [N]."""
    lengths, end = [], 0
    for offset, numel in bucket.layout.slots:
        lengths += [offset - end, numel]
        end = offset + numel
    pieces = flat.split_with_sizes([*lengths, flat.numel() - end])[1::2]  # one call: as_strided for each takes longer
    return [
        (piece if len(view.shape) == 1 else piece.view(view.shape))
        if order is None
        else flat.as_strided(view.shape, view.stride(), piece.storage_offset())
        for piece, view, order in zip(pieces, bucket.views, bucket.memory_orders, strict=True)
    ]


def flat_gradients(bucket: Bucket, gradients: Sequence[tuple[int, Tensor]]) -> tuple[list[Tensor], list[int]]:
    """Return gradients (aliases) in the memory order of their slots, and the slots' offsets.

    Args:
        gradients: Position in the bucket and full gradient, ascending.
    Raises:
        RuntimeError: A gradient has another shape than its parameter.
    """
    tensors = [bucket.in_memory_order(position, grad) for position, grad in gradients]
    return tensors, [bucket.layout.slots[position].offset for position, _ in gradients]


def refuse_sparse(name: str, grad: Tensor) -> NoReturn:
    """Raise for a sparse gradient."""
    raise RuntimeError(
        f"the gradient of {name} has layout {grad.layout}, expected torch.strided; "
        "build the embedding with sparse=False"
    )
