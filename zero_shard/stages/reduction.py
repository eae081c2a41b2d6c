"""Mean gradients over ranks: hooks that collect them in backward, and the rounds that reduce them.

    autograd -> slot.local (full, own)  -> flatten -> exchange slices -> ordered fp32 sum -> bucket.grad (own range)

See Note [Rounds] in ``rounds.py``, Note [Crossing replicas] in ``crossings.py``, Note [Exchanges in flight] and
Note [Patience] in ``exchanges.py``, and Note [Nested backward] in ``backward_end.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zero_shard.buffers import Bucket
from zero_shard.collectives import Communicator
from zero_shard.masters import notice_edits
from zero_shard.norms import global_norm
from zero_shard.ops import Kernels
from zero_shard.stages.accumulation_hooks import attach
from zero_shard.stages.backward_end import call_at_end, is_inside_node
from zero_shard.stages.crossings import Crossings
from zero_shard.stages.exchanges import Exchanges
from zero_shard.stages.gradient_norms import GradientNorms
from zero_shard.stages.plain_gradients import PlainGradients
from zero_shard.stages.rounds import Rounds
from zero_shard.stages.slot_gradients import SlotGradients
from zero_shard.stages.slots import GradSlot


class Reducer:
    """Reduces the gradients of buckets over the ranks of a communicator.

    Args:
        communicator: The ranks; split into shards before the first bucket is added.
        kernels: flatten_, quantize_, reduce_slices_ and sum_squares_.
        is_eager: Reduce in backward (stages 0, 2, 3), or only when the gradient is read (stage 1).
    """

    def __init__(self, communicator: Communicator, kernels: Kernels, is_eager: bool) -> None:
        self.buckets: list[Bucket] = []
        self.slots: list[GradSlot] = []
        self.handles: list[Any] = []  # of every hook
        self.before_backward: Callable[[], None] | None = None  # set by the optimizer
        self.before_first_backward: Callable[[], None] | None = None  # set by the optimizer
        # Set by the parameters layer.
        self.at_backward_end: Callable[[], None] | None = None
        self.at_backward_abandoned: Callable[[], None] | None = None
        self.at_bucket_complete: Callable[[Bucket], None] | None = None
        self.before_round: Callable[[], None] | None = None  # set while ranks may run out of data (Join)
        self.before_zero_grad: Callable[[], None] | None = None  # set by a monitor
        self._communicator, self._is_eager = communicator, is_eager
        self._is_alone = communicator.num_ranks == 1
        self._was_zeroed = False
        self._is_synchronizing = True
        self._stands_back = False  # DistributedDataParallel is there
        self._is_fresh = False  # the gradients on all ranks are reduced and agreed on
        self._is_open = False  # a backward is under way
        self._is_finish_queued = False  # and its end will call back
        self._graph_tasks: set[int] = set()
        self.patience_s: float | None = None  # set by the parameters layer
        self._is_impatient = False
        self._local_nbytes = 0
        self._crossings = Crossings(communicator)
        self._rounds = Rounds(self.buckets, self.slots, communicator)
        self.exchanges = Exchanges(communicator, kernels)
        self.plain_gradients = PlainGradients(kernels)
        self.gradients = SlotGradients(self.buckets, self.slots, self.plain_gradients if self._is_alone else None)
        self.norms = GradientNorms(self.buckets, self.slots, communicator, kernels, self.plain_gradients)

    # ---- set-up --------------------------------------------------------------------------------------------

    def add_bucket(self, bucket: Bucket) -> None:
        """Take charge of the gradients of a bucket. All ranks add the same buckets in the same order."""
        bucket.index = len(self.buckets)
        self.buckets.append(bucket)
        self.exchanges.expect(bucket.full_nbytes)
        for position in range(len(bucket.params)):
            slot = GradSlot(bucket.first_slot + position, position, bucket, self)
            assert slot.index == len(self.slots)
            self.slots.append(slot)
            self._attach(slot)
        self._rounds.add_bucket(bucket)

    def _attach(self, slot: GradSlot) -> None:
        if not self._is_alone and not self._stands_back and slot.hooks is None:
            self.handles += attach(self, slot)

    def stand_back(self, name: str) -> None:
        """Leave gradients where DistributedDataParallel puts them, until they are asked for. Local; all ranks call.

        What it has averaged is equal on all ranks, so that another mean changes nothing; what it has not (under its
        ``no_sync``) becomes the mean that is wanted.

        Args:
            name: Of a parameter that it wraps.
        """
        self._stands_back = self._rounds.has_learned_order = True
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        warnings.warn(
            f"parameter {name} belongs to a model wrapped in DistributedDataParallel: full gradients stay in memory "
            "until the step and are averaged twice; leave the wrapper away, zero_shard.AdamW averages them itself",
            stacklevel=2,
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients local in the backward passes inside."""
        before, self._is_synchronizing = self._is_synchronizing, False
        try:
            yield
        finally:
            self._is_synchronizing = before

    # ---- in backward ---------------------------------------------------------------------------------------

    def open_backward(self) -> None:
        """Note that a backward is under way, and have its end call back. Called from hooks, often."""
        task = torch._C._current_graph_task_id()
        if self._is_open and task in self._graph_tasks:
            return
        is_nested = is_inside_node()
        if self._is_finish_queued and not is_nested:
            self.abandon_backward()  # the last one ended in an exception
        if not self._is_open:
            if self.before_backward is not None:
                self.before_backward()
            if self.before_first_backward is not None:
                check, self.before_first_backward = self.before_first_backward, None
                check()
            if self._stands_back:
                return
            self._is_open = True
            for bucket in self.buckets:
                bucket.was_gathered = not bucket.is_released
            self.gradients.notice_drops()
            self._begin_round()
            if self._is_eager and self._is_synchronizing:
                self.exchanges.is_crossing = self._crossings.begin_round(can_wait=self.before_round is None)
                if self.before_round is not None:
                    self.before_round()
        self._graph_tasks.add(task)
        if not is_nested:
            self._is_finish_queued = True
            call_at_end(self)

    def abandon_backward(self) -> None:
        """Forget a backward that an exception ended half-way, on all ranks alike: what it added is dropped."""
        self._is_open = self._is_finish_queued = False
        self._graph_tasks.clear()
        self.exchanges.abandon()
        for slot in self.slots:
            slot.local = None
            if self._rounds.is_started[slot.bucket.index]:
                slot.handed, slot.has_reduced, slot.has_partial = None, False, False
                slot.generation += 1
            slot.param.grad = slot.handed
        for bucket in self.buckets:
            if self._rounds.is_started[bucket.index]:
                bucket.grad = bucket.partial = None
        self._is_fresh = False
        if self.at_backward_abandoned is not None:
            self.at_backward_abandoned()

    def _begin_round(self) -> None:
        self._local_nbytes, self._is_impatient = 0, False
        self._rounds.begin()

    def before_accumulate(self, slot: GradSlot) -> None:
        """Make way for the gradient that autograd is about to put into ``param.grad``. Called by hooks."""
        self.open_backward()
        if self._stands_back:
            return
        if slot.bucket.is_released and not slot.bucket.was_gathered:
            raise RuntimeError(
                f"backward reached {slot.name} while it was released: its module was used outside of the forward that "
                "gathers it. Name the module that uses it in the config's units, or wrap the use in zero_shard.gathered"
            )
        slot.make_way()

    def after_accumulate(self, slot: GradSlot) -> None:
        """Take the gradient that autograd has put there, and start the bucket if it is full. Called by hooks."""
        if self._stands_back:
            return
        slot.take()
        if slot.is_ready or slot.local is None:
            return  # a second contribution in this backward waits for the end of the round; or a hook has dropped it
        slot.is_ready = True
        bucket = slot.bucket
        self._local_nbytes += slot.local.nbytes
        self._make_room(self._local_nbytes)
        num_missing = self._rounds.num_missing
        num_missing[bucket.index] -= 1
        if num_missing[bucket.index] == 0:
            self._complete(bucket)

    def _complete(self, bucket: Bucket) -> None:
        if self._is_eager and self._is_synchronizing:
            self._rounds.note_ready(bucket)
            self._start_ready_buckets()
        if self.at_bucket_complete is not None:
            self.at_bucket_complete(bucket)

    def is_complete(self, bucket: Bucket) -> bool:
        """Whether all gradients of a bucket have arrived in the present backward."""
        return self._rounds.num_missing[bucket.index] <= 0

    def _start_ready_buckets(self) -> None:
        while (bucket := self._rounds.next_bucket()) is not None:
            if self._is_open:
                self._make_room(2 * bucket.full_nbytes)
            self._start(bucket)

    def finish_backward(self) -> None:
        """End the present backward: reduce what is left, or mark gradients as pending. Called by the engine."""
        if not self._is_open:
            return
        # autograd.grad runs the hook before accumulation without accumulating
        self.gradients.take_new(self.gradients.replaced())
        is_reducing = self._is_eager and self._is_synchronizing
        self._is_open = self._is_finish_queued = False
        if is_reducing:
            self._rounds.end_backward()
            self._start_ready_buckets()
        if self.at_backward_end is not None:
            self.at_backward_end()
        if is_reducing:
            self._finish_round()
        else:
            self._is_fresh = False
            self._hand_pending()
        self._graph_tasks.clear()

    def _hand_pending(self) -> None:
        """Give out gradients that are reduced at the first read.

        At stage 1 every trainable parameter gets one: another rank may have a gradient for it, and all must read alike.
        Not after ``autograd.grad``, which leaves ``param.grad`` alone.
        """
        has_local = any(slot.local is not None for slot in self.slots)
        for slot in self.slots:
            is_possible = has_local and not self._is_eager and slot.param.requires_grad and slot.handed is None
            if slot.local is not None or is_possible:
                slot.hand_pending()
            elif slot.handed is not None:
                slot.param.grad = slot.handed

    # ---- rounds --------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Reduce every gradient that is not reduced yet. All ranks call; blocks. Repeated calls cost nothing.

        A plain tensor that the user put into ``param.grad`` counts as this rank's local gradient.
        """
        if self._is_open:
            self.finish_backward()
        changed = self.gradients.notice_drops()
        if self._is_alone:
            return
        has_local = self.gradients.take_new(changed)
        if self._is_fresh and not has_local:
            return
        if self.before_round is not None:
            self.before_round()
        for slot in self.slots:
            self._attach(slot)  # those unfrozen since
        if not self._crossings.is_due:
            self._begin_round()
            if self._is_eager:  # as the end of backward does on ranks that had one
                self.exchanges.is_crossing = self._crossings.begin_round(can_wait=self.before_round is None)
                self._rounds.end_backward()
                self._start_ready_buckets()
                if self.at_backward_end is not None:
                    self.at_backward_end()
            self._finish_round()
        if self._crossings.is_due:  # here, or where others had a backward
            self._begin_round()
            self.exchanges.is_crossing = True
            self._finish_round()

    @property
    def has_reduced(self) -> bool:
        """Whether the present gradients are the mean ones, as after `collect`."""
        return self._is_alone or self._is_fresh

    def _finish_round(self) -> None:
        self.exchanges.finish()
        waiting, is_present = self._rounds.agree()
        for bucket in waiting:
            self._start(bucket)
            self.exchanges.finish_older()
        self.exchanges.finish()
        if self.exchanges.is_crossing:
            self.exchanges.cross(self.buckets)
            self._hand_reduced(is_present)
        else:
            self._hand_partial(is_present)
        self._crossings.is_due = not self.exchanges.is_crossing
        self._is_fresh = self.exchanges.is_crossing
        self.norms.forget()
        self._rounds.learn_order()

    def _hand_reduced(self, is_present: Sequence[int]) -> None:
        """Give out mean gradients."""
        views: dict[int, list[Tensor]] = {}
        for slot, has_gradient in zip(self.slots, is_present, strict=True):
            slot.has_reduced |= slot.has_partial or bool(has_gradient)
            slot.has_partial = False
            if slot.has_reduced:
                slot.hand(views)
            elif slot.handed is not None:  # was pending, and nobody had one
                slot.handed = slot.param.grad = None

    def _hand_partial(self, is_present: Sequence[int]) -> None:
        """Give out gradients that are reduced inside the shard group so far."""
        for slot, has_gradient in zip(self.slots, is_present, strict=True):
            slot.has_partial |= bool(has_gradient)
            if slot.has_reduced or slot.has_partial:
                slot.hand_pending()
            elif slot.handed is not None:
                slot.handed = slot.param.grad = None

    def _start(self, bucket: Bucket) -> None:
        """Start to reduce the local gradients of a bucket, and free them."""
        slots = self.slots[bucket.slots.start : bucket.slots.stop]
        local = [(slot.position, slot.local) for slot in slots if slot.local is not None]
        self._local_nbytes -= sum(slot.local.nbytes for slot in slots if slot.local is not None and slot.is_ready)
        for slot in slots:
            slot.is_sent |= slot.local is not None
            slot.local = None
        self.exchanges.start(bucket, local)
        self._rounds.is_started[bucket.index] = True

    def _make_room(self, nbytes: int) -> None:
        """Finish old exchanges in the middle of backward, unless peers keep away (see Note [Patience])."""
        if not self.exchanges.make_room(nbytes, self.patience_s if not self._is_impatient else 0.0):
            self._is_impatient = True

    # ---- what the optimizer asks for -----------------------------------------------------------------------

    def gradient_of(self, bucket: Bucket) -> tuple[list[Tensor], list[int]]:
        """Return the mean gradient of the own shard as tensors in memory order, and where in the shard each begins."""
        if self._is_alone:
            return self.plain_gradients.of(bucket)
        assert bucket.grad is not None, f"{bucket.label} has no reduced gradient"
        return [bucket.grad], [0]

    @property
    def number(self) -> int:
        """Place of the optimizer among those on the same ranks."""
        return self._communicator.number

    @property
    def communicator(self) -> Communicator:
        """The ranks, for who reads a sharded gradient: all of them must, so that it is refused inside ``Join``."""
        if self.before_round is not None:
            raise NotImplementedError(
                "reading a sharded gradient (clip_grad_norm_ of torch, GradScaler, .full()) inside Join needs the "
                "ranks without data, too; clip with optimizer.clip_grad_norm_() or max_grad_norm in the config"
            )
        return self._communicator

    def take_marks(self) -> list[float]:
        """Return whether gradients have been zeroed in place since the last time, and which parameters have one."""
        was_zeroed, self._was_zeroed = self._was_zeroed, False
        return [float(was_zeroed), *(float(slot.has_reduced) for slot in self.slots)]

    def follow_round(self, marks: Sequence[float]) -> None:
        """Take part in a round of ranks that have data, as one without. All others are in a round.

        Args:
            marks: What `take_marks` returned there.
        """
        for slot, has_reduced in zip(self.slots, marks[1:], strict=False):
            if slot.has_reduced and not has_reduced:
                slot.drop()
                slot.param.grad = None
        if marks[0]:
            self.zero_grad(set_to_none=False)
        self._is_fresh = False
        self.collect()

    def refuse_plain(self) -> None:
        """Raise NotImplementedError if a plain gradient that the user has set stands beside sharded ones. Local."""
        self.norms.refuse_plain()

    def norm_of(self, slot: GradSlot, order: float) -> Tensor:
        """Return the norm of one mean gradient, 0-dim fp64 on the CPU. All ranks call."""
        assert self.communicator is not None
        self.exchanges.takes_squares |= order == 2
        return self.norms.norm_of(slot, order)

    def norm_of_part(self, part: Tensor, order: float) -> Tensor:
        """Return the norm of a tensor of which each rank has a part, 0-dim on the CPU. All ranks call."""
        return global_norm([part], order, self.communicator)

    def take_back_replaced(self) -> None:
        """Move parameters whose data the user has replaced back into their buckets, and notice edits. Local."""
        for bucket in self.buckets:
            if not bucket.is_released:
                bucket.take_back_replaced()
                notice_edits(bucket)

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop all gradients, or set them to zero."""
        if self.before_zero_grad is not None:
            self.before_zero_grad()
        if self._is_open:  # a backward that failed half-way
            self.abandon_backward()
        set_to_none |= self._stands_back  # nobody would take a sharded gradient away before the next backward
        self.gradients.zero(set_to_none)
        self.norms.forget()
        self._crossings.drop(set_to_none)
        self._is_fresh = self._is_fresh and not set_to_none
        self._was_zeroed = not set_to_none

    def after_step(self) -> None:
        """Note that the gradients have been used; the next step agrees anew if no backward has done so."""
        self._is_fresh = False
        self._crossings.end_step()
