"""Mean gradients over ranks: hooks that collect them in backward, and the rounds that reduce them.

    autograd -> slot.local (full, own)  -> flatten -> exchange slices -> ordered fp32 sum -> bucket.grad (own range)

# Note [Rounds]
A round reduces every bucket once, in the same order on all ranks. Buckets start as they fill during backward; the
end of backward starts the rest, with zeros for what this rank has no gradient for. Then all ranks combine one byte
per parameter ("somebody has a gradient") and per bucket ("more came after it started", as reentrant checkpointing
does), reduce the late ones, and know which parameters to update. A bucket that nobody used in the last round waits
for that byte, so that a part of the model which is not trained at the moment sends nothing.

See Note [One exchange in flight] and Note [Patience] in ``exchanges.py``.

# Note [Nested backward]
Reentrant checkpointing runs a backward inside a backward. Only the end of the outermost one ends a round; a callback
of the engine can't be queued there from inside. If no hook of ours ran in the outer one, `collect` ends the round.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import unserializable_hook

from zero_shard.buffers import Bucket
from zero_shard.collectives import Communicator
from zero_shard.masters import notice_edits
from zero_shard.norms import global_norm
from zero_shard.ops import Kernels
from zero_shard.sharded_grad import ShardedGrad
from zero_shard.stages.exchanges import Exchanges
from zero_shard.stages.gradient_norms import GradientNorms
from zero_shard.stages.slots import GradSlot, PlainGradients, refuse_sparse


class Reducer:
    """Reduces the gradients of buckets over the ranks of a communicator.

    Args:
        communicator: The ranks; split into shards before the first bucket is added.
        kernels: flatten_, reduce_slices_ and sum_squares_.
        reduce_dtype: dtype on the wire; None = the parameters'. fp64 gradients always travel as fp64.
        is_eager: Reduce in backward (stages 0, 2, 3), or only when the gradient is read (stage 1).
    """

    def __init__(
        self, communicator: Communicator, kernels: Kernels, reduce_dtype: torch.dtype | None, is_eager: bool
    ) -> None:
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
        self._communicator, self._is_eager = communicator, is_eager
        self._is_alone = communicator.num_ranks == 1
        self._was_zeroed = False
        self._is_synchronizing = True
        self._stands_back = False  # DistributedDataParallel is there
        self._is_fresh = False  # the gradients on all ranks are reduced and agreed on
        self._is_open = False  # a backward is under way
        self._is_finish_queued = False  # and its end will call back
        self._graph_tasks: set[int] = set()
        self._order: list[int] = []  # buckets in the order in which they start, the same on all ranks
        self._has_learned_order = False
        self._ready_order: list[int] = []
        self._next = 0
        self._is_started: list[bool] = []
        self._is_idle: list[bool] = []  # nobody had a gradient in the last round
        self._num_missing: list[int] = []
        self.patience_s: float | None = None  # set by the parameters layer
        self._is_impatient = False
        self._local_nbytes = 0
        self.exchanges = Exchanges(communicator, kernels, reduce_dtype)
        self.plain_gradients = PlainGradients(kernels)
        self.norms = GradientNorms(self.buckets, self.slots, communicator, kernels, self.plain_gradients)

    # ---- set-up --------------------------------------------------------------------------------------------

    def add_bucket(self, bucket: Bucket) -> None:
        """Take charge of the gradients of a bucket. All ranks add the same buckets in the same order."""
        bucket.index = len(self.buckets)
        self.buckets.append(bucket)
        for position in range(len(bucket.params)):
            slot = GradSlot(bucket.first_slot + position, position, bucket, self)
            assert slot.index == len(self.slots)
            self.slots.append(slot)
            self._attach(slot)
        self._order.insert(0, bucket.index)  # backward meets the last parameters first
        self._is_started.append(False)
        self._is_idle.append(False)
        self._num_missing.append(0)
        self._has_learned_order = False

    def _attach(self, slot: GradSlot) -> None:
        if self._is_alone or self._stands_back or slot.hooks is not None:
            return
        # Weak: hooks live in C++ beside the parameter, where the garbage collector sees no cycle.
        reducer, index = weakref.ref(self), slot.index

        @unserializable_hook  # type: ignore[untyped-decorator]
        def before(_: Tensor) -> None:
            alive = reducer()
            if alive is not None:
                alive._before_accumulate(alive.slots[index])

        def after(_: nn.Parameter) -> None:
            alive = reducer()
            if alive is not None:
                alive._after_accumulate(alive.slots[index])

        with torch._C.DisableTorchFunctionSubclass():
            is_trainable = slot.param.requires_grad
            slot.param.requires_grad_(True)  # torch takes no hook of a frozen parameter, but keeps one
            last = slot.param.register_post_accumulate_grad_hook(after)
            slot.hooks = last.hooks_dict_ref(), last.id
            self.handles += [slot.param.register_hook(before), last]
            slot.param.requires_grad_(is_trainable)

    def stand_back(self, name: str) -> None:
        """Leave gradients where DistributedDataParallel puts them, until they are asked for. Local; all ranks call.

        What it has averaged is equal on all ranks, so that another mean changes nothing; what it has not (under its
        ``no_sync``) becomes the mean that is wanted.

        Args:
            name: Of a parameter that it wraps.
        """
        self._stands_back = self._has_learned_order = True
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
        is_nested = _is_inside_node()
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
            self._notice_drops()
            self._start_counting()
            if self.before_round is not None and self._is_eager and self._is_synchronizing:
                self.before_round()
        self._graph_tasks.add(task)
        if not is_nested:
            self._is_finish_queued = True
            _open_reducers.add(self)
            torch.autograd.Variable._execution_engine.queue_callback(_finish_all)

    def abandon_backward(self) -> None:
        """Forget a backward that an exception ended half-way, on all ranks alike: what it added is dropped."""
        self._is_open = self._is_finish_queued = False
        self._graph_tasks.clear()
        self.exchanges.abandon()
        for slot in self.slots:
            slot.local = None
            if self._is_started[slot.bucket.index]:
                slot.handed, slot.has_reduced = None, False
                slot.generation += 1
            slot.param.grad = slot.handed
        for bucket in self.buckets:
            bucket.grad = None if self._is_started[bucket.index] else bucket.grad
        self._is_fresh = False
        if self.at_backward_abandoned is not None:
            self.at_backward_abandoned()

    def _start_counting(self) -> None:
        self._next, self._local_nbytes, self._ready_order = 0, 0, []
        self._is_impatient = False
        for bucket in self.buckets:
            slots = self.slots[bucket.slots.start : bucket.slots.stop]
            self._num_missing[bucket.index] = sum(slot.param.requires_grad for slot in slots)
            self._is_started[bucket.index] = False
            for slot in slots:
                slot.is_ready = slot.is_sent = False

    def _before_accumulate(self, slot: GradSlot) -> None:
        self.open_backward()
        if self._stands_back:
            return
        param = slot.param
        if slot.bucket.is_released and not slot.bucket.was_gathered:
            raise RuntimeError(
                f"backward reached {slot.name} while it was released: its module was used outside of the forward that "
                "gathers it. Name the module that uses it in the config's units, or wrap the use in zero_shard.gathered"
            )
        grad = param.grad
        if grad is not None:
            if isinstance(grad, ShardedGrad) and grad is not slot.handed:
                slot.adopt(grad)
            if param.grad is slot.handed:
                param.grad = None
        assert slot.hooks is not None
        hooks, key = slot.hooks
        if len(hooks) > 1 and next(reversed(hooks)) != key:
            hooks[key] = hooks.pop(key)  # the user's come first: they see this rank's gradient, and may change it
        if slot.local is not None:
            param.grad, slot.local = slot.local, None  # autograd adds to it in place

    def _after_accumulate(self, slot: GradSlot) -> None:
        if self._stands_back:
            return
        slot.take()
        if slot.is_ready or slot.local is None:
            return  # a second contribution in this backward waits for the end of the round; or a hook has dropped it
        slot.is_ready = True
        bucket = slot.bucket
        self._local_nbytes += slot.local.nbytes
        if 4 * self._local_nbytes > self.exchanges.last_nbytes():
            self._make_room()
        self._num_missing[bucket.index] -= 1
        if self._num_missing[bucket.index] == 0:
            self._complete(bucket)

    def _complete(self, bucket: Bucket) -> None:
        if self._is_eager and self._is_synchronizing:
            self._ready_order.append(bucket.index)
            self._start_ready_buckets()
        if self.at_bucket_complete is not None:
            self.at_bucket_complete(bucket)

    def is_complete(self, bucket: Bucket) -> bool:
        """Whether all gradients of a bucket have arrived in the present backward."""
        return self._num_missing[bucket.index] <= 0

    def _start_ready_buckets(self) -> None:
        while self._next < len(self._order):
            index = self._order[self._next]
            if self._is_idle[index] or not self._has_trainable(index):
                self._next += 1
                continue
            if self._num_missing[index] > 0:
                return
            self._next += 1
            if self._is_open:
                self._make_room()
            self._start(self.buckets[index])

    def _has_trainable(self, index: int) -> bool:
        bucket = self.buckets[index]
        return any(param.requires_grad for param in bucket.params)

    def finish_backward(self) -> None:
        """End the present backward: reduce what is left, or mark gradients as pending. Called by the engine."""
        if not self._is_open:
            return
        for slot in self.slots:  # autograd.grad runs the hook before accumulation without accumulating
            if slot.param.grad is not None and slot.param.grad is not slot.handed:
                slot.take()
        is_reducing = self._is_eager and self._is_synchronizing
        self._is_open = self._is_finish_queued = False
        if is_reducing:
            self._num_missing = [0] * len(self.buckets)
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
        """
        for slot in self.slots:
            is_possible = not self._is_eager and slot.param.requires_grad and slot.handed is None
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
        self._notice_drops()
        if self._is_alone:
            return
        has_local = False
        for slot in self.slots:
            grad = slot.param.grad
            if grad is not None and grad is not slot.handed:
                slot.take()
            has_local |= slot.local is not None
        if self._is_fresh and not has_local:
            return
        if self.before_round is not None:
            self.before_round()
        for slot in self.slots:
            self._attach(slot)  # those unfrozen since
        self._start_counting()
        if self._is_eager:  # as the end of backward does on ranks that had one
            self._num_missing = [0] * len(self.buckets)
            self._start_ready_buckets()
            if self.at_backward_end is not None:
                self.at_backward_end()
        self._finish_round()

    def _finish_round(self) -> None:
        self.exchanges.finish()
        num_slots = len(self.slots)
        flags = torch.zeros(num_slots + len(self.buckets), dtype=torch.uint8)
        mine = flags.numpy()
        for slot in self.slots:
            if slot.is_sent or slot.local is not None:
                mine[slot.index] = 1
                if slot.local is not None and self._is_started[slot.bucket.index]:
                    mine[num_slots + slot.bucket.index] = 1
        union = self._communicator.agree(flags, "max", "the list of gradients present").numpy()
        for bucket in self.buckets:
            is_used = bool(union[bucket.slots.start : bucket.slots.stop].any())
            is_late = bool(union[num_slots + bucket.index])
            if is_late or (is_used and not self._is_started[bucket.index]):
                self._start(bucket)
                self.exchanges.finish()
            self._is_idle[bucket.index] = not is_used
        views: dict[int, list[Tensor]] = {}
        for slot, is_present in zip(self.slots, union[:num_slots].tolist(), strict=True):
            slot.has_reduced |= bool(is_present)
            if slot.has_reduced:
                slot.hand(views)
            elif slot.handed is not None:  # was pending, and nobody had one
                slot.handed = slot.param.grad = None
        self.norms.forget()
        self._learn_order()
        self._is_fresh = True

    def _learn_order(self) -> None:
        """Take the order in which rank 0's buckets filled as everybody's order from now on, once it had a backward."""
        if self._has_learned_order:
            return
        rest = [index for index in self._order if index not in set(self._ready_order)]
        message = torch.tensor([bool(self._ready_order), *self._ready_order, *rest], dtype=torch.int64)
        if self._communicator.rank != 0:
            message.zero_()
        is_known, *order = self._communicator.agree(message, "sum", "the order of buckets").tolist()
        if is_known:
            self._order, self._has_learned_order = order, True

    def _start(self, bucket: Bucket) -> None:
        """Start to reduce the local gradients of a bucket, and free them."""
        slots = self.slots[bucket.slots.start : bucket.slots.stop]
        local = [(slot.position, slot.local) for slot in slots if slot.local is not None]
        for slot in slots:
            slot.is_sent |= slot.local is not None
            slot.local = None
        self.exchanges.start(bucket, local)
        self._local_nbytes = 0
        self._is_started[bucket.index] = True

    def _make_room(self) -> None:
        """Finish the exchanges in flight in the middle of backward, unless peers keep away (see Note [Patience])."""
        if not self.exchanges.finish(self.patience_s if not self._is_impatient else 0.0):
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

    def active_flags(self) -> Tensor:
        """Return one byte per slot: 1 if the parameter has a gradient. After `collect`, equal on all ranks."""
        flags = bytearray(len(self.slots))
        if self._is_alone:
            self.plain_gradients.mark(flags, self.buckets)
            return _as_tensor(flags)
        for slot in self.slots:
            grad = slot.param.grad
            flags[slot.index] = grad is not None
            if grad is not None and grad.layout != torch.strided:
                refuse_sparse(slot.name, grad)
        return _as_tensor(flags)

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop all gradients, or set them to zero."""
        if self._is_open:  # a backward that failed half-way
            self.abandon_backward()
        set_to_none |= self._stands_back  # nobody would take a sharded gradient away before the next backward
        if not set_to_none:
            self._notice_drops()
        for slot in self.slots:
            if set_to_none or slot.handed is None:
                slot.forget()
                slot.param.grad = None if set_to_none else slot.param.grad
            elif slot.local is not None:
                slot.local.zero_()
        for bucket in self.buckets:
            if set_to_none:
                bucket.grad = None
            elif bucket.grad is not None:
                bucket.grad.zero_()
                bucket.has_sums = False
        self.norms.forget()
        self._is_fresh = self._is_fresh and not set_to_none
        self._was_zeroed = not set_to_none

    def scale_replaced(self, factor: Tensor) -> None:
        """Multiply gradients that the user has put in the place of what was handed out. Local."""
        self._notice_drops()
        for slot in self.slots:
            grad = slot.param.grad
            if grad is not None and grad is not slot.handed:
                grad.mul_(factor.to(device=grad.device, dtype=grad.dtype))

    def after_step(self) -> None:
        """Note that the gradients have been used; the next step agrees anew if no backward has done so."""
        self._is_fresh = False

    def held_nbytes(self) -> int:
        """Bytes of gradients that are not in a bucket: local ones."""
        local = sum(slot.local.nbytes for slot in self.slots if slot.local is not None)
        if self._is_alone:
            local += sum(slot.param.grad.nbytes for slot in self.slots if slot.param.grad is not None)
        return local

    def _notice_drops(self) -> None:
        """Forget gradients that the user has taken away or replaced since they were handed out."""
        if self._is_alone:
            return
        for bucket in self.buckets:
            has_reduced, is_whole = False, bucket.layout.num_shards == 1
            for slot in self.slots[bucket.slots.start : bucket.slots.stop]:
                if slot.handed is not None and slot.param.grad is not slot.handed:
                    slot.notice_replaced()
                elif is_whole and slot.handed is not None:
                    slot.notice_moved()
                has_reduced |= slot.has_reduced
            if not has_reduced:
                bucket.grad = None


def _as_tensor(flags: bytearray) -> Tensor:
    return torch.frombuffer(flags, dtype=torch.uint8) if flags else torch.zeros(0, dtype=torch.uint8)


_open_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()


def _finish_all() -> None:
    """End the backward of every optimizer that took part in it, in the order in which they were built.

    Ranks may meet the parameters of several optimizers in different orders; their agreements must not cross.
    """
    reducers = sorted(_open_reducers, key=lambda reducer: reducer.number)
    _open_reducers.clear()
    with torch._C._DisableFuncTorch():  # a gradient of torch.func may run this backward; its tensors are not ours
        for reducer in reducers:
            reducer.finish_backward()


def _is_inside_node() -> bool:
    """Whether a Python autograd node's backward is on the stack. See Note [Nested backward]."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False
