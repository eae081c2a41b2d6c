"""Stage 3: parameters are sharded too, and whole only around each use.

    unit        released          gathering              whole               released
    full [N]    0 bytes     ->    own slice + peers' ->  parameters    ->    0 bytes
    param       no data                                  views of full       no data
    shard [n]   ------------------- kept for life, updated by step() -------------------

A unit is gathered before the forward of its modules and released after it, gathered again when a gradient of its
outputs arrives in backward, and released when its own gradients have been taken and those of its inputs computed.

# Note [One storage for life]
``full`` never changes its storage object: release resizes it to zero bytes, gather to its full size. So views of
parameters that autograd saved in forward are valid again in backward. An output that aliases the storage (a module
that returns a slice of its weight) is copied before the release.

# Note [Inside backward]
A forward that runs while a graph task is active is a recomputation (activation checkpointing). Its units stay whole
until their backward is over, so that checkpointing costs no further gather.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_shard.buffers import Bucket
from zero_shard.masters import take_shard
from zero_shard.stages.base import Layer
from zero_shard.stages.gathers import Gatherer
from zero_shard.stages.hooks import (
    Call,
    ModuleHooks,
    is_in_graph_task,
    parts_of,
    storage_of,
    tensors_in,
    watch_inputs,
    watch_outputs,
    weakly,
    without_aliases,
)
from zero_shard.stages.reduction import Reducer
from zero_shard.stages.released import is_used_by, register
from zero_shard.stages.schedule import Schedule
from zero_shard.stages.unit import Unit, UnitState

_PATIENCE_S = 0.25  # longer than ranks in step are apart, shorter than anybody minds on a path of its own


class _Forward(NamedTuple):
    """A forward that is running in a hooked module."""

    module: nn.Module
    error: BaseException | None  # that was being handled when it began
    inputs: list[Tensor]
    adopted: list[int]  # units that it has turned out to use


class ParameterSharding(Layer):
    """Gathers units around their use. Buckets outside of all units pass to the layer below.

    Source: ZeRO (arXiv:1910.02054), P_os+g+p; FSDP (arXiv:2304.11277).
    """

    def __init__(self, below: Layer, reshard_after_forward: bool, prefetch: int) -> None:
        super().__init__(below)
        self._gatherer = Gatherer(below.communicator)
        self.units = self._gatherer.units
        self.handles: list[Any] = []
        self._reshards, self._prefetch = reshard_after_forward, prefetch
        self._reducer: Reducer | None = None
        self._unit_of: dict[Bucket, Unit] = {}
        self._unit_of_param: dict[int, Unit] = {}  # by id
        self._root: weakref.ref[nn.Module] | None = None
        self._running: list[_Forward] = []  # outermost first
        self._schedules: dict[Any, Schedule] = {}
        self._forward: Schedule | None = None
        self._backward: Schedule | None = None
        self._backward_key: Any = "backward"
        self._leaf_handles: list[Any] = []  # of hooks on inputs that the user made
        self._num_calls = 0

    # ---- set-up --------------------------------------------------------------------------------------------

    def add_unit(self, name: str, modules: Sequence[nn.Module], buckets: Sequence[Bucket]) -> Unit:
        """Take charge of buckets whose parameters are whole now; releases them. Local."""
        unit = Unit(len(self.units), name, modules, buckets)
        self.units.append(unit)
        for bucket in buckets:
            bucket.split_off_shard()
            self._unit_of[bucket] = unit
            for param, param_name in zip(bucket.params, bucket.names, strict=True):
                register(param, self, param_name)
                self._unit_of_param[id(param)] = unit
        self._gatherer.release(unit)
        return unit

    def attach(self, root: nn.Module, reducer: Reducer) -> None:
        """Hook the modules of all units, and ``root``, whose forward is one pass."""
        self._reducer, self._root = reducer, weakref.ref(root)
        reducer.patience_s = _PATIENCE_S
        reducer.at_backward_end = weakly(self._end_backward)
        reducer.at_backward_abandoned = weakly(self._abandon_backward)
        reducer.at_bucket_complete = weakly(self._bucket_complete)
        units_of: dict[nn.Module, list[int]] = {root: []}
        for unit in self.units:
            for module in unit.modules:
                units_of.setdefault(module, []).append(unit.index)
        for number, (module, indices) in enumerate(units_of.items()):
            parts = list(parts_of(module, units_of))
            self.handles += ModuleHooks(self, number, indices, parts).attach(module)

    def a_parameter(self) -> nn.Parameter | None:
        """Return a parameter to name in messages."""
        return next((param for unit in self.units for param in unit.params), None)

    # ---- forward -------------------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, number: int, indices: list[int], inputs: Any) -> None:
        """Gather the units of a module whose forward begins. Called by its hook; blocks."""
        is_recomputing = is_in_graph_task()
        tensors = tensors_in(inputs)
        if is_recomputing:
            self._open_backward()
        else:
            self._enter(module, number, tensors)
        for index in indices:
            self._use(self.units[index], is_recomputing)
        if indices and torch.is_grad_enabled():
            tensors = [tensor for tensor in tensors if tensor.requires_grad]
            self._num_calls += 1
            for index in indices:
                self.units[index].last_call = (self._num_calls, bool(tensors))
            self._leaf_handles += watch_inputs(self, indices, self._num_calls, tensors)

    def _use(self, unit: Unit, is_recomputing: bool) -> None:
        if is_recomputing:
            unit.is_in_backward = True
        else:
            unit.num_forwards += 1
        self._make_whole(unit)

    def after_forward(self, module: nn.Module, indices: list[int], output: Any, left: list[Tensor]) -> Any:
        """Release the units of a module whose forward has ended; return the output if it was changed.

        Args:
            left: Tensors that may have come out beside the output.
        """
        if is_in_graph_task():
            if torch.is_grad_enabled():
                self._watch_outputs([self.units[index] for index in indices], tensors_in(output))
            return None
        if not self._running or self._running[-1].module is not module:
            return None  # a hook before ours raised, so that this forward was never entered
        units = [self.units[index] for index in (*indices, *self._running[-1].adopted)]
        if output is None and sys.exc_info()[1] is not self._running[-1].error:
            self._unwind(units)
            return None
        changed = None
        for unit in units:
            unit.num_forwards -= 1
            changed = output = without_aliases(output, unit.storages)
        known = {id(tensor) for tensor in self._running[-1].inputs}
        outputs = [*tensors_in(output), *(tensor for tensor in left if id(tensor) not in known)]
        is_hooked = torch.is_grad_enabled() and self._watch_outputs(units, outputs)
        for unit in units:
            unit.is_stuck |= isinstance(output, Iterator)  # a generator: its body has not run yet
            unit.is_stuck |= any(storage_of(tensor) in unit.storages for tensor in outputs)
            if torch.is_grad_enabled() and not is_hooked:
                unit.is_stuck |= unit.is_trainable
            elif is_hooked and not self._reshards:
                unit.awaits_backward = True
            self._gatherer.release(unit)
        self._leave()
        return changed

    def _watch_outputs(self, units: list[Unit], outputs: list[Tensor]) -> bool:
        """Have the units gathered when a gradient of the outputs arrives; return whether that is possible."""
        tensors = list({id(tensor): tensor for tensor in outputs if tensor.requires_grad}.values())
        watch_outputs(self, [Call(unit.index, *unit.last_call) for unit in units], tensors)
        return bool(tensors)

    def gather_for_use(self, param: nn.Parameter) -> bool:
        """Gather the unit of a released parameter if a method of the model is using it; return whether it is whole.

        Within the forward of a hooked module the unit is treated as one of that module's. In any other method of the
        model (one that is called in place of ``forward``) it stays whole until the step. All ranks must call then.
        """
        unit, root = self._unit_of_param.get(id(param)), None if self._root is None else self._root()
        if unit is None or root is None or not is_used_by(root, sys._getframe(1)):
            return False
        if is_in_graph_task():
            self._open_backward()
            self._use(unit, is_recomputing=True)
        elif self._running:
            self._running[-1].adopted.append(unit.index)
            unit.last_call = (self._num_calls, False)
            self._use(unit, is_recomputing=False)
        else:
            unit.is_stuck = True
            self._forward = Schedule(self.communicator, f"a use of {unit.name} outside of its forward")
            self._forward.begin()
            self._make_whole(unit)
            self._end_pass()
        return True

    def _enter(self, module: nn.Module, number: int, inputs: list[Tensor]) -> None:
        if self._running and self._running[0].module is module:
            self._abandon_pass()  # its last forward ended in an exception
        if not self._running:
            key = (number, torch.is_grad_enabled())
            if torch.is_grad_enabled() or not all(unit.num_pins for unit in self.units):
                self._forward = self._schedule(key, "forward")
                self._forward.begin()  # else nothing is to be gathered: ranks may differ in how many passes they make
            self._backward_key = ("backward", number)
        self._running.append(_Forward(module, sys.exc_info()[1], inputs, []))

    def _leave(self) -> None:
        self._running.pop()
        if not self._running:
            self._end_pass()

    def _end_pass(self) -> None:
        if self._forward is not None:
            self._forward.end(self._gatherer)
            self._forward = None

    def _unwind(self, units: list[Unit]) -> None:
        """Leave a module whose forward raised; one that encloses it may catch the exception and go on."""
        for unit in units:
            unit.num_forwards -= 1
            self._gatherer.release(unit)
        self._running.pop()
        if not self._running:
            self._abandon_pass()

    def _abandon_pass(self) -> None:
        """Forget a pass that an exception ended."""
        self._running, self._forward = [], None
        for unit in self.units:
            if unit.state is UnitState.GATHERING:
                with suppress(RuntimeError):  # a gather that failed raised where it was waited for
                    self._gatherer.finish(unit)
            unit.num_forwards = unit.num_promised = 0
            self._gatherer.release(unit)

    def _schedule(self, key: Any, name: str) -> Schedule:
        return self._schedules.setdefault(key, Schedule(self.communicator, name))

    # ---- backward ------------------------------------------------------------------------------------------

    def _open_backward(self) -> None:
        assert self._reducer is not None
        self._reducer.open_backward()
        if self._backward is None:
            self._backward = self._schedule(self._backward_key, "backward")
            self._backward.begin()

    def before_backward(self, calls: Sequence[Call]) -> None:
        """Gather the units of these calls. Called when a gradient of an output arrives; blocks."""
        self._open_backward()
        for index, number, has_inputs in calls:
            unit = self.units[index]
            unit.is_in_backward, unit.awaits_backward = True, False
            # With create_graph the nodes of a second backward will need the weights, and nothing tells when.
            unit.is_stuck |= torch.is_grad_enabled()
            # Nothing tells when a frozen parameter has been used for the last time before the inputs do, and where no
            # input needs a gradient, the end of backward. The unit's own gradients may all come earlier.
            if has_inputs or unit.has_frozen:
                unit.open_calls.add(number)
            self._make_whole(unit)

    def close_call(self, indices: Sequence[int], number: int) -> None:
        """Release units unless their own gradients are still to come. Called when those of the inputs are complete."""
        for index in indices:
            unit = self.units[index]
            unit.open_calls.discard(number)
            self._release_after_backward(unit)

    def _remove_leaf_hooks(self) -> None:
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles.clear()

    def _bucket_complete(self, bucket: Bucket) -> None:
        unit = self._unit_of.get(bucket)
        if unit is not None:
            self._release_after_backward(unit)

    def _release_after_backward(self, unit: Unit) -> None:
        assert self._reducer is not None
        if unit.is_in_backward and not unit.open_calls and all(map(self._reducer.is_complete, unit.buckets)):
            unit.is_in_backward = False
            self._gatherer.release(unit)

    def _abandon_backward(self) -> None:
        """Forget a backward that an exception ended half-way."""
        self._remove_leaf_hooks()
        self._backward = None
        for unit in self.units:
            unit.is_in_backward = unit.awaits_backward = False
            unit.open_calls.clear()
        self._abandon_pass()

    def _end_backward(self) -> None:
        self._remove_leaf_hooks()
        if self._backward is None:  # this rank had no backward, or none through a unit, but others may need its shards
            self._backward = self._schedule(self._backward_key, "backward")
            self._backward.begin()
        self._backward.end(self._gatherer)
        self._backward = None
        for unit in self.units:
            unit.is_in_backward = unit.awaits_backward = False
            unit.open_calls.clear()
            self._gatherer.release(unit)

    def _make_whole(self, unit: Unit) -> None:
        if unit.state is not UnitState.WHOLE or unit.num_promised:
            schedule = self._backward if self._backward is not None and is_in_graph_task() else self._forward
            assert schedule is not None
            with torch._C._DisableFuncTorch():
                schedule.request(unit.index, self._gatherer, self._prefetch)
                unit.num_promised -= 1
                self._gatherer.finish(unit)

    # ---- verbs ---------------------------------------------------------------------------------------------

    def publish(self, bucket: Bucket) -> None:
        """Do nothing for released units; gather again what somebody holds whole; pass other buckets down."""
        unit = self._unit_of.get(bucket)
        if unit is None:
            self.below.publish(bucket)
        elif unit.state is UnitState.WHOLE:
            bucket.full[bucket.own_range].copy_(bucket.shard)
            label = f"the updated parameters of {unit.name}"
            hop = self.communicator.shards
            unit.gathers.append(self.communicator.all_gather_(hop, bucket.full, 3 * bucket.index + 1, label))

    def finish_publishing(self) -> None:
        """Block until every publish is done."""
        for unit in self.units:
            self._gatherer.wait(unit) if unit.state is UnitState.WHOLE else None
        self.below.finish_publishing()

    def before_step(self) -> None:
        """Release units that were kept for a backward that did not come. Local."""
        self._remove_leaf_hooks()
        for unit in self.units:
            unit.awaits_backward = unit.is_stuck = unit.is_in_backward = False
            self._gatherer.release(unit)
        self.below.before_step()

    def gathered(self, params: Sequence[nn.Parameter], modify: bool) -> AbstractContextManager[None]:
        """Return a context in which the units of the given parameters are whole. All ranks enter and leave."""
        wanted = {id(param) for param in params}
        units = [u for u in self.units if any(id(p) in wanted for bucket in u.buckets for p in bucket.params)]
        return self._gathered(units, params, modify)

    @contextmanager
    def _gathered(self, units: list[Unit], params: Sequence[nn.Parameter], modify: bool) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.below.gathered(params, modify))
            for unit in units:
                if unit.num_pins == 0:  # whether it is whole may differ from rank to rank
                    self._gatherer.start_gather(unit.index)
                    unit.num_promised -= 1
                    self._gatherer.finish(unit)
                unit.num_pins += 1
            try:
                yield
            finally:
                for unit in units:
                    unit.version = unit.count_changes()  # without ``modify`` changes are lost
                    for bucket in unit.buckets if modify else ():
                        bucket.take_back_replaced()
                        take_shard(bucket)
                    unit.num_pins -= 1
                    self._gatherer.release(unit)
