"""Exchanges in flight: flattened gradients on their way to the ranks that own them, and what becomes of them there.

local gradients -> flatten [N] -> exchange -> W slices [n] -> ordered fp32 sum / W (+ squares) -> bucket.grad [n]

A gradient that fills its bucket is sent and added from where autograd has put it.

# Note [Exchanges in flight]
Extra memory stays at about two buckets and one gradient: an exchange holds the flattened bucket, which has the own
slice, and the W - 1 received ones, and counts as two. Whenever exchanges and the gradients that pile up beside them
would take more than two and a quarter, the oldest is finished. So that several fit, a bucket is exchanged in pieces
where a wait blocks the host (gloo): a rank that is late then does not stop the others at once. Only the end of backward
starts what is left without finishing: ranks that took other paths may need this one's part of them before they get
here. After backward gradients only get fewer: there, one piece is flattened and sent while the one before it is on its
way.

# Note [Patience]
At stage 3 a peer on another path may be waiting for our part of a gather while we wait for its part of an exchange. So
there the wait in the middle of backward ends after a while, and backward goes on with one more exchange in flight.

# Note [8 bits on the wire]
Where ``reduce_dtype`` is int8, what a hop sends is quantized first, also the sums of an earlier hop:

    floats [N] -> blocks of 260 bytes [N / 256 * 260] -> exchange -> decoded while they are added in fp32

A rank's slice for itself goes the same way, so that the result does not depend on who owns it. Slots, shards and parts
of shards are whole blocks, and a block is 256 elements of one parameter: the bits show neither stage nor bucket size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_shard.buffers import Bucket
from zero_shard.collectives import Communicator, Pending, Received
from zero_shard.layout import BLOCK_NUMEL, WIRE_BLOCK_NBYTES
from zero_shard.ops import Kernels
from zero_shard.pages import on_large_pages
from zero_shard.phases import Phase
from zero_shard.stages.slots import flat_gradients


class _Exchange(NamedTuple):
    """An exchange in flight.

    Attributes:
        nbytes: Of what it sends and receives, at the most.
        hop: Which of the communicator's ``reduce_hops`` it takes; their number: the gather of the replicas' parts.
    """

    bucket: Bucket
    hop: int
    received: Received | None
    pending: Pending
    nbytes: int


class Exchanges:
    """Starts exchanges, and adds what they bring to the gradients of their buckets.

    Args:
        communicator: The ranks.
        kernels: flatten_, quantize_ and reduce_slices_.
    """

    def __init__(self, communicator: Communicator, kernels: Kernels) -> None:
        self._communicator, self._kernels = communicator, kernels
        self._in_flight: list[_Exchange] = []
        self._budget_nbytes = 0
        self.is_crossing = True  # sums go on across replicas; else they stay in ``bucket.partial``
        self.takes_squares = False  # somebody asks for norms: take the sums of squares while reducing
        self.at_reduced: Callable[[Bucket, Received], None] | None = None  # called with what has just been summed

    def start(self, bucket: Bucket, gradients: list[tuple[int, Tensor]]) -> None:
        """Flatten full gradients of a bucket and start to exchange slices. All ranks call in the same order.

        Args:
            gradients: Position in the bucket and gradient, ascending; others count as zero. Is emptied, so that their
                memory is free before that for the slices is taken.
        """
        dtype = bucket.grad_dtype if bucket.has_wire_blocks else bucket.storage.wire_dtype
        with Phase("reduce", bucket.label):
            tensors, offsets = flat_gradients(bucket, gradients)
            gradients.clear()
            if len(tensors) == 1 and _is_flat(tensors[0], bucket.layout.numel, dtype):
                flat = tensors[0].view(-1)
            else:
                flat = on_large_pages(torch.empty(bucket.layout.numel, dtype=dtype, device=bucket.device))
                self._kernels.flatten_(flat, tensors, offsets, None)
            del tensors
            self._in_flight.append(self._exchange(bucket, 0, flat))

    def _exchange(self, bucket: Bucket, number: int, full: Tensor) -> _Exchange:
        """Start one hop of the exchange of a bucket. See Note [8 bits on the wire]."""
        communicator, way = self._communicator, ""
        if bucket.has_wire_blocks:
            wire = torch.empty(full.numel() // BLOCK_NUMEL * WIRE_BLOCK_NBYTES, dtype=torch.uint8, device=full.device)
            self._kernels.quantize_(wire, full)
            full = wire
        if number:
            way = " across hosts" if number < communicator.num_inner_hops else " across replicas"
        label = f"the gradients of {bucket.label}{way}"
        received, pending = communicator.exchange(communicator.reduce_hops[number], full, 3 * bucket.index, label)
        return _Exchange(bucket, number, received, pending, 2 * full.nbytes)

    def expect(self, bucket_nbytes: int) -> None:
        """Expect buckets of this size; see Note [Exchanges in flight]."""
        self._budget_nbytes = max(self._budget_nbytes, 9 * bucket_nbytes // 4)

    def make_room(self, nbytes: int, patience_s: float | None) -> bool:
        """Finish the oldest exchanges until so many bytes fit beside the others; return whether they do. Blocks."""
        while self._in_flight and sum(each.nbytes for each in self._in_flight) + nbytes > self._budget_nbytes:
            if not self._finish_first(patience_s):
                return False
        return True

    def finish(self) -> None:
        """Wait for exchanges in flight and add their slices to the buckets' gradients."""
        while self._in_flight:
            self._finish_first()

    def finish_older(self) -> None:
        """Finish all exchanges in flight but the one that was started last."""
        while len(self._in_flight) > 1:
            self._finish_first()

    def _finish_first(self, patience_s: float | None = None) -> bool:
        while True:
            if not self._in_flight[0].pending.wait(patience_s):
                return False
            with Phase("reduce", self._in_flight[0].bucket.label):
                follow_up = self._advance(self._in_flight.pop(0))
            if follow_up is None:
                return True
            self._in_flight.insert(0, follow_up)

    def cross(self, buckets: Sequence[Bucket]) -> None:
        """Send what has stayed in ``bucket.partial`` across replicas, two buckets at a time. All ranks call; blocks."""
        for bucket in buckets:
            if bucket.partial is not None:
                self._in_flight.append(self._exchange(bucket, self._communicator.num_inner_hops, bucket.partial))
            self.finish_older()
        self.finish()

    def abandon(self) -> None:
        """Finish exchanges in flight, whose sums are to be dropped: it must not stay behind for the next ones.

        Every hop is taken: other ranks may be further.
        """
        try:
            self.finish()
        finally:
            self._in_flight.clear()

    def _advance(self, exchange: _Exchange) -> _Exchange | None:
        """Use what an exchange has brought; return the one that follows where there are more hops."""
        bucket, number, received = exchange.bucket, exchange.hop, exchange.received
        communicator, num_hops = self._communicator, len(self._communicator.reduce_hops)
        if received is None:
            return None
        slices, own_slice = received.slices, received[1:]
        if number == communicator.num_inner_hops - 1 < num_hops - 1:  # see Note [Crossing replicas] in crossings.py
            accumulate = bucket.partial is not None
            if bucket.partial is None:
                bucket.partial = _sum_of(bucket, slices)
            self._kernels.reduce_slices_(bucket.partial, slices, 1, accumulate, None, None, *own_slice)
            return self._exchange(bucket, number + 1, bucket.partial) if self.is_crossing else None
        if number < num_hops - 1:
            partial = _sum_of(bucket, slices)
            self._kernels.reduce_slices_(partial, slices, 1, False, None, None, *own_slice)
            return self._exchange(bucket, number + 1, partial)
        accumulate = bucket.grad is not None
        if bucket.grad is None:
            bucket.grad = bucket.partial
        if bucket.grad is None:
            shard = torch.empty(bucket.layout.shard_numel, dtype=bucket.math_dtype, device=bucket.device)
            bucket.grad = on_large_pages(shard)
        bucket.partial = None
        table, sums = (bucket.part_table, bucket.sums) if self.takes_squares else (None, None)
        own = bucket.grad[bucket.part_range]
        self._kernels.reduce_slices_(own, slices, communicator.num_ranks, accumulate, table, sums, *own_slice)
        bucket.has_sums = False
        if sums is not None:
            bucket.note_sums()
            if self.at_reduced is not None:
                self.at_reduced(bucket, received)
        replicas = communicator.replicas
        if replicas.num_ranks == 1:
            return None
        label = f"the gradients of {bucket.label} from replicas"
        pending = communicator.all_gather_(replicas, bucket.grad, 3 * bucket.index, label)
        return _Exchange(bucket, num_hops, None, pending, 0)


def _is_flat(gradient: Tensor, numel: int, dtype: torch.dtype) -> bool:
    """Whether a gradient has in its memory just what flattening would give."""
    return gradient.numel() == numel and gradient.dtype == dtype and gradient.is_contiguous()


def _sum_of(bucket: Bucket, slices: Tensor) -> Tensor:
    """Return memory for the sum of slices [K, n], or of as many blocks of the wire."""
    numel = slices.shape[1]
    numel = numel // WIRE_BLOCK_NBYTES * BLOCK_NUMEL if bucket.has_wire_blocks else numel
    return torch.empty(numel, dtype=bucket.math_dtype, device=bucket.device)
