"""The gradients of a world of one, where autograd left them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zero_shard.buffers import Bucket
from zero_shard.ops import Kernels
from zero_shard.stages.slots import refuse_sparse


class PlainGradients:
    """The gradients of a world of one, where autograd left them.

    One comprehension per bucket and question: with thousands of small tensors a Python loop costs more than the update.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._found: dict[int, tuple[Sequence[int], list[Tensor]]] | None = None
        self._kept: dict[int, tuple[list[Tensor], list[int]]] = {}

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Look for gradients only once inside: nothing may change them."""
        self._found = {}
        try:
            yield
        finally:
            self._found = None
            self._kept.clear()

    def present(self, bucket: Bucket) -> tuple[Sequence[int], list[Tensor]]:
        """Return positions and gradients of the parameters that have one, ascending.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        if self._found is not None and bucket.index in self._found:
            return self._found[bucket.index]
        positions: Sequence[int] = range(len(bucket.params))
        grads = [grad for param in bucket.params if (grad := param.grad) is not None]
        if len(grads) < len(positions):
            positions = [position for position in positions if bucket.params[position].grad is not None]
        if not {grad.layout for grad in grads} <= {torch.strided}:
            for position, grad in zip(positions, grads, strict=True):
                if grad.layout != torch.strided:
                    refuse_sparse(bucket.names[position], grad)
        if self._found is not None:
            self._found[bucket.index] = (positions, grads)
        return positions, grads

    def mark(self, flags: bytearray, buckets: Sequence[Bucket]) -> None:
        """Set the byte of every slot whose parameter has a gradient."""
        for bucket in buckets:
            positions = self.present(bucket)[0]
            if len(positions) == len(bucket.params):
                flags[bucket.slots.start : bucket.slots.stop] = b"\1" * len(positions)
                continue
            for position in positions:
                flags[bucket.first_slot + position] = 1

    def of(self, bucket: Bucket) -> tuple[list[Tensor], list[int]]:
        """Return the gradients of a bucket as contiguous tensors in memory order, and where in the shard each begins.

        Gradients of mixed dtypes are flattened into one tensor of the dtype of the arithmetic. Called in every step:
        torch has seen to it that a gradient has its parameter's shape.
        """
        if bucket.index in self._kept:
            return self._kept[bucket.index]
        positions, tensors = self.present(bucket)
        offsets = bucket.offsets
        if len(positions) < len(offsets):
            offsets = [offsets[position] for position in positions]
        if bucket.is_permuted:
            orders = [bucket.memory_orders[position] for position in positions]
            tensors = [g if order is None else g.permute(order) for g, order in zip(tensors, orders, strict=True)]
        dtypes = {grad.dtype for grad in tensors}
        if not (len(dtypes) <= 1 and dtypes <= {bucket.dtype, bucket.math_dtype}):
            flat = torch.empty(bucket.layout.numel, dtype=bucket.math_dtype, device=bucket.device)
            self._kernels.flatten_(flat, tensors, offsets, None)
            return [flat], [0]
        if not all(map(Tensor.is_contiguous, tensors)):
            return [grad.contiguous() for grad in tensors], offsets  # copies are not kept
        if self._found is not None:
            self._kept[bucket.index] = (tensors, offsets)
        return tensors, offsets
