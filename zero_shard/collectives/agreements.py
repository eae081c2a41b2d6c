"""Small agreements between the hosts of all ranks: facts, objects and errors, not tensors of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zero_shard.collectives.groups import ProcessGroup, background_group, rank_in, timeout_of
from zero_shard.collectives.pending import Pending, announce, peer_missing, start, with_report
from zero_shard.fake_group import FakeGroup
from zero_shard.phases import Phase
from zero_shard.roll_call import RollCall

_ROLL_CALL_SHARE = 0.75  # of the time after which collectives give up


class Agreements:
    """All ranks that train together, and a way for their hosts to agree.

    Args:
        group: The ranks; None: this process alone.
        control: The same ranks over a backend that takes CPU tensors.
        name: Equal on all ranks, and no other one's on this group.
    Attributes:
        rank, num_ranks: Of this process, and how many there are.
        sent_nbytes: By this rank since the last step, by all collectives.
    """

    def __init__(self, group: ProcessGroup | None, control: ProcessGroup | None, name: str = "") -> None:
        self.group, self.control, self.name = group, control, name
        self.num_ranks = dist.get_world_size(group) if group is not None else 1
        self.rank = rank_in(group)
        self.sent_nbytes = 0
        self._num_background = 0

    @cached_property
    def _roll_call(self) -> RollCall:
        get_store = getattr(self.control, "get_group_store", None)
        store = get_store() if get_store is not None and self.num_ranks > 1 else None
        return RollCall(store, self.rank, self.num_ranks, f"zero_shard/{self.name}")

    def roll_call(self, label: str) -> None:
        """Return when every rank has come here. All ranks call.

        Raises:
            RuntimeError: Some rank has not come in time, by number: well before the collectives give up.
        """
        if self.control is not None:
            try:
                with Phase("wait", f"all ranks at {label}"):
                    self._roll_call.take(label, _ROLL_CALL_SHARE * timeout_of(self.control).total_seconds())
            except RuntimeError as error:
                raise RuntimeError(with_report(str(error))) from error.__cause__

    def in_background(self) -> Agreements:
        """Return the same for another thread. All ranks call; the first time blocks."""
        self._num_background += 1
        control = background_group(self.group) if self.group is not None and self.num_ranks > 1 else self.control
        return Agreements(self.group, control, f"{self.name} in background {self._num_background}")

    def agree(self, values: Tensor, op: str, label: str) -> Tensor:
        """Return the elementwise "min", "max" or "sum" of a small CPU tensor over all ranks; blocks. All call."""
        if self.num_ranks == 1:
            return values
        announce(label, values.nbytes)
        self.sent_nbytes += 2 * values.numel() * values.element_size() * (self.num_ranks - 1) // self.num_ranks
        reduce_op = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}[op]
        work = start(label, dist.all_reduce, values, op=reduce_op, group=self.control, async_op=True)
        Pending(label, [work], [values]).wait()
        return values

    def start_gather(self, values: Tensor, label: str) -> tuple[Tensor, Pending]:
        """Start to gather a small CPU tensor [n] of each rank into [W, n]. All ranks call."""
        if self.num_ranks == 1:
            return values.view(1, -1), Pending(label)
        announce(label)
        self.sent_nbytes += values.nbytes * (self.num_ranks - 1)
        gathered = values.new_empty(self.num_ranks * values.numel())
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        work = start(label, all_gather, gathered, values, group=self.control, async_op=True)
        return gathered.view(self.num_ranks, -1), Pending(label, [work], [gathered, values])

    def gather_objects(self, value: Any, label: str) -> list[Any]:
        """Return the ``value`` of every rank, in rank order, on every rank; blocks. Only for start-up and errors."""
        if self.num_ranks == 1:
            return [value]
        announce(label)
        if isinstance(self.group, FakeGroup):
            return [value] * self.num_ranks
        values: list[Any] = [None] * self.num_ranks
        try:
            with Phase("wait", label):
                dist.all_gather_object(values, value, group=self.control)
        except RuntimeError as error:
            raise peer_missing(label, error, self._roll_call.describe_missing()) from error
        return values

    def gather_to_first(self, value: Any, label: str) -> list[Any]:
        """Return the ``value`` of every rank, in rank order, on rank 0, [] elsewhere; blocks. All ranks call."""
        if self.num_ranks == 1:
            return [value]
        announce(label)
        values: list[Any] | None = [None] * self.num_ranks if self.rank == 0 else None
        try:
            with Phase("wait", label):
                dist.gather_object(value, values, group=self.control, group_dst=0)
        except RuntimeError as error:
            raise peer_missing(label, error, self._roll_call.describe_missing()) from error
        return values or []

    @contextmanager
    def errors_on_all_ranks(self, label: str) -> Iterator[None]:
        """Run the body on each rank; if it raises on one, raise on all of them. All ranks call; blocks at the end."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # re-raised once the other ranks know
            error = raised
        text = "" if error is None else f"{type(error).__name__}: {error}"
        texts = self.gather_objects(text, label)
        if error is not None:
            raise error
        for rank, message in enumerate(texts):
            if message:
                raise RuntimeError(f"{label} failed on rank {rank}: {message}")
