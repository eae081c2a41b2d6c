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

# Note [Hooks without cycles]
A hook lives in C++ beside its graph node, where the garbage collector sees no cycle. So the hooks here are plain tensor
hooks that hold a weak reference to the layer and no tensors (torch's register_multi_grad_hook holds graph nodes, and
would keep every graph alive).

# Note [Inside backward]
A forward that runs while a graph task is active is a recomputation (activation checkpointing). Its units stay whole
until their backward is over, so that checkpointing costs no further gather.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zero_shard.buffers import Bucket
from zero_shard.collectives import Pending
from zero_shard.masters import take_shard
from zero_shard.stages.base import Layer
from zero_shard.stages.reduction import Reducer
from zero_shard.stages.released import release, restore, unreadable
from zero_shard.stages.schedule import Schedule

_PATIENCE_S = 0.25  # longer than ranks in step are apart, shorter than anybody minds on a path of its own


class UnitState(Enum):
    """Where the full parameters of a unit are."""

    RELEASED = "only the own shard is here"
    GATHERING = "the other shards are on their way"
    WHOLE = "parameters may be read"


class Unit:
    """Parameters that are gathered as one, and why they are whole at the moment.

    Args:
        index: Number among the units, the same on all ranks.
        name: For messages.
        modules: Those whose forward needs the unit.
        buckets: One per dtype, device and trainability.
    """

    def __init__(self, index: int, name: str, modules: Sequence[nn.Module], buckets: Sequence[Bucket]) -> None:
        self.index, self.name = index, name
        self.modules, self.buckets = list(modules), list(buckets)
        self.state = UnitState.WHOLE
        self.gathers: list[Pending] = []
        self.version = self.count_changes()
        self.num_pins = 0  # `gathered` contexts
        self.num_forwards = 0  # forwards that are running
        self.num_promised = 0  # gathers that the schedule has started and nobody has used or discarded
        self.is_in_backward = False
        self.awaits_backward = False  # kept whole between forward and backward
        self.is_stuck = False  # its outputs can't call back, so it stays whole until the step
        self.last_call = (0, False)  # number of the latest call, and whether its inputs need gradients
        self.open_calls: set[int] = set()  # calls in backward whose input gradients are not complete
        self.placeholders = [
            [torch.full((), torch.nan, dtype=b.dtype, device=b.device).expand(p.shape) for p in b.params]
            for b in buckets
        ]

    @property
    def is_in_use(self) -> bool:
        """Whether something needs the unit whole."""
        is_kept = self.is_in_backward or self.awaits_backward or self.is_stuck
        return bool(self.num_pins or self.num_forwards or self.num_promised or is_kept)

    def count_changes(self) -> int:
        """Return a number that grows with every change of a parameter in place."""
        return sum(param._version for bucket in self.buckets for param in bucket.params)

    @property
    def storages(self) -> set[int]:
        """Identities of the storages that the unit's parameters live in."""
        return {bucket.full.untyped_storage()._cdata for bucket in self.buckets}


class ParameterSharding(Layer):
    """Gathers units around their use. Buckets outside of all units pass to the layer below.

    Source: ZeRO (arXiv:1910.02054), P_os+g+p; FSDP (arXiv:2304.11277).
    """

    def __init__(self, below: Layer, reshard_after_forward: bool, prefetch: int) -> None:
        super().__init__(below)
        self.units: list[Unit] = []
        self.handles: list[Any] = []
        self._reshards, self._prefetch = reshard_after_forward, prefetch
        self._reducer: Reducer | None = None
        self._unit_of: dict[Bucket, Unit] = {}
        # Hooked modules whose forward is running, outermost first, and the exception that was being handled then.
        self._running: list[tuple[nn.Module, BaseException | None]] = []
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
        self._release(unit)
        return unit

    def attach(self, root: nn.Module, reducer: Reducer) -> None:
        """Hook the modules of all units, and ``root``, whose forward is one pass."""
        self._reducer = reducer
        reducer.patience_s = _PATIENCE_S
        reducer.at_backward_end = _weakly(self._end_backward)
        reducer.at_backward_abandoned = _weakly(self._abandon_backward)
        reducer.at_bucket_complete = _weakly(self._bucket_complete)
        units_of: dict[nn.Module, list[int]] = {root: []}
        for unit in self.units:
            for module in unit.modules:
                units_of.setdefault(module, []).append(unit.index)
        for number, (module, indices) in enumerate(units_of.items()):
            hooks = _ModuleHooks(self, number, indices)
            self.handles += [
                module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True),
                module.register_forward_hook(hooks.after, always_call=True),
            ]

    # ---- forward -------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, number: int, units: list[Unit], inputs: Any) -> None:
        is_recomputing = _is_in_graph_task()
        if is_recomputing:
            self._open_backward()
        else:
            self._enter(module, number)
        for unit in units:
            if is_recomputing:
                unit.is_in_backward = True
            else:
                unit.num_forwards += 1
            self._make_whole(unit)
        if torch.is_grad_enabled() and units:
            self._watch_inputs(units, inputs)

    def _watch_inputs(self, units: list[Unit], inputs: Any) -> None:
        """Have the units told when the gradients of their inputs are complete."""
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        self._num_calls += 1
        for unit in units:
            unit.last_call = (self._num_calls, bool(tensors))
        if not tensors:
            return
        layer, call, indices = weakref.ref(self), self._num_calls, [unit.index for unit in units]
        num_inputs, num_missing, task = len(tensors), 0, -1

        def input_done(_: Any) -> None:
            nonlocal num_missing, task
            alive, present_task = layer(), torch._C._current_graph_task_id()
            if present_task != task:  # a graph may be walked more than once (retain_graph)
                num_missing, task = num_inputs, present_task
            num_missing -= 1
            if alive is not None and num_missing == 0:
                alive._close_call(indices, call)

        for tensor in tensors:
            handle = tensor.register_hook(input_done)
            if tensor.is_leaf:  # it outlives the pass
                self._leaf_handles.append(handle)

    def _close_call(self, indices: list[int], call: int) -> None:
        for index in indices:
            unit = self.units[index]
            unit.open_calls.discard(call)
            self._release_after_backward(unit)

    def _remove_leaf_hooks(self) -> None:
        for handle in self._leaf_handles:
            handle.remove()
        self._leaf_handles.clear()

    def _after_forward(self, module: nn.Module, units: list[Unit], output: Any) -> Any:
        if _is_in_graph_task():
            if torch.is_grad_enabled():
                self._watch_outputs(units, output)
            return None
        if not self._running or self._running[-1][0] is not module:
            return None  # a hook before ours raised, so that this forward was never entered
        if output is None and sys.exc_info()[1] is not self._running[-1][1]:
            self._unwind(units)
            return None
        changed = None
        for unit in units:
            unit.num_forwards -= 1
            changed = output = _without_aliases(output, unit.storages)
            unit.is_stuck |= any(_storage(tensor) in unit.storages for tensor in tensors_in(output))
        is_hooked = torch.is_grad_enabled() and self._watch_outputs(units, output)
        for unit in units:
            if torch.is_grad_enabled() and not is_hooked:
                unit.is_stuck |= any(param.requires_grad for bucket in unit.buckets for param in bucket.params)
            elif is_hooked and not self._reshards:
                unit.awaits_backward = True
            self._release(unit)
        self._leave()
        return changed

    def _watch_outputs(self, units: list[Unit], output: Any) -> bool:
        """Have the units gathered when a gradient of the output arrives; return whether that is possible."""
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not tensors:
            return False
        layer = weakref.ref(self)
        calls = [(unit.index, *unit.last_call) for unit in units]

        task = -1

        def gradient_arrives(_: Tensor) -> None:
            nonlocal task
            alive, present_task = layer(), torch._C._current_graph_task_id()
            if alive is not None and present_task != task:  # once per walk, with the first of the gradients
                alive._before_backward(calls)
            task = present_task

        for tensor in tensors:
            tensor.register_hook(gradient_arrives)
        return True

    def _enter(self, module: nn.Module, number: int) -> None:
        if self._running and self._running[0][0] is module:
            self._abandon_pass()  # its last forward ended in an exception
        if not self._running:
            key = (number, torch.is_grad_enabled())
            self._forward = self._schedule(key, "forward")
            self._forward.begin()
            self._backward_key = ("backward", number)
        self._running.append((module, sys.exc_info()[1]))

    def _leave(self) -> None:
        self._running.pop()
        if not self._running:
            assert self._forward is not None
            self._forward.end(self)
            self._forward = None

    def _unwind(self, units: list[Unit]) -> None:
        """Leave a module whose forward raised; one that encloses it may catch the exception and go on."""
        for unit in units:
            unit.num_forwards -= 1
            self._release(unit)
        self._running.pop()
        if not self._running:
            self._abandon_pass()

    def _abandon_pass(self) -> None:
        """Forget a pass that an exception ended."""
        self._running, self._forward = [], None
        for unit in self.units:
            if unit.state is UnitState.GATHERING:
                with suppress(RuntimeError):  # a gather that failed raised where it was waited for
                    self._finish_gather(unit)
            unit.num_forwards = unit.num_promised = 0
            self._release(unit)

    def _schedule(self, key: Any, name: str) -> Schedule:
        return self._schedules.setdefault(key, Schedule(self.communicator, name))

    # ---- backward ------------------------------------------------------------------------------------------

    def _open_backward(self) -> None:
        assert self._reducer is not None
        self._reducer.open_backward()
        if self._backward is None:
            self._backward = self._schedule(self._backward_key, "backward")
            self._backward.begin()

    def _before_backward(self, calls: list[tuple[int, int, bool]]) -> None:
        self._open_backward()
        for index, call, has_inputs in calls:
            unit = self.units[index]
            unit.is_in_backward, unit.awaits_backward = True, False
            # With create_graph the nodes of a second backward will need the weights, and nothing tells when.
            unit.is_stuck |= torch.is_grad_enabled()
            if has_inputs:
                unit.open_calls.add(call)
            self._make_whole(unit)

    def _bucket_complete(self, bucket: Bucket) -> None:
        unit = self._unit_of.get(bucket)
        if unit is not None:
            self._release_after_backward(unit)

    def _release_after_backward(self, unit: Unit) -> None:
        assert self._reducer is not None
        if unit.is_in_backward and not unit.open_calls and all(map(self._reducer.is_complete, unit.buckets)):
            unit.is_in_backward = False
            self._release(unit)

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
        self._backward.end(self)
        self._backward = None
        for unit in self.units:
            unit.is_in_backward = unit.awaits_backward = False
            unit.open_calls.clear()
            self._release(unit)

    # ---- gather and release --------------------------------------------------------------------------------

    def _make_whole(self, unit: Unit) -> None:
        if unit.state is not UnitState.WHOLE or unit.num_promised:
            schedule = self._backward if self._backward is not None and _is_in_graph_task() else self._forward
            assert schedule is not None
            schedule.request(unit.index, self, self._prefetch)
            unit.num_promised -= 1
            self._finish_gather(unit)

    def start_gather(self, index: int) -> None:
        """Start to gather a unit in place; all ranks do so in the same order."""
        unit = self.units[index]
        unit.num_promised += 1
        if unit.state is UnitState.GATHERING:
            self._finish_gather(unit)
        for bucket in unit.buckets:
            if unit.state is UnitState.RELEASED:
                bucket.refill_full()
            label = f"the parameters of {unit.name}"
            unit.gathers.append(
                self.communicator.all_gather_(self.communicator.shards, bucket.full, 3 * bucket.index + 1, label)
            )
        if unit.state is UnitState.WHOLE:
            self._wait(unit)
        else:
            unit.state = UnitState.GATHERING

    def discard(self, index: int) -> None:
        """End the gather of a unit that this rank passes by."""
        unit = self.units[index]
        unit.num_promised -= 1
        self._finish_gather(unit)
        self._release(unit)

    def _wait(self, unit: Unit) -> None:
        gathers, unit.gathers = unit.gathers, []
        for gather in gathers:
            gather.wait()

    def _finish_gather(self, unit: Unit) -> None:
        self._wait(unit)
        if unit.state is UnitState.WHOLE:
            return
        for bucket in unit.buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                restore(param, view)
        unit.state = UnitState.WHOLE
        unit.version = unit.count_changes()

    def _release(self, unit: Unit) -> None:
        """Give the memory of a whole unit back unless something needs it."""
        if unit.state is not UnitState.WHOLE or unit.is_in_use:
            return
        has_changed = unit.count_changes() != unit.version
        for bucket, placeholders in zip(unit.buckets, unit.placeholders, strict=True):
            if has_changed:  # a forward edited its weights in place, as nn.Embedding(max_norm=...) does
                take_shard(bucket)
            for param, name, placeholder in zip(bucket.params, bucket.names, placeholders, strict=True):
                release(param, name, placeholder)
        self._give_back(unit)

    def _give_back(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            bucket.release_full()
        unit.state = UnitState.RELEASED

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
            self._wait(unit) if unit.state is UnitState.WHOLE else None
        self.below.finish_publishing()

    def before_step(self) -> None:
        """Release units that were kept for a backward that did not come. Local."""
        self._remove_leaf_hooks()
        for unit in self.units:
            unit.awaits_backward = unit.is_stuck = unit.is_in_backward = False
            self._release(unit)
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
                    self.start_gather(unit.index)
                    unit.num_promised -= 1
                    self._finish_gather(unit)
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
                    self._release(unit)


class _ModuleHooks:
    """What is called before and after the forward of one module.

    Args:
        layer: Held weakly, as hooks outlive it.
        number: Of the module among those with hooks.
        indices: Of the units that the module needs whole.
    """

    def __init__(self, layer: ParameterSharding, number: int, indices: list[int]) -> None:
        self._layer, self._number, self._indices = weakref.ref(layer), number, indices

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        layer = self._layer()
        if layer is not None:
            layer._before_forward(module, self._number, [layer.units[index] for index in self._indices], (args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        layer = self._layer()
        return (
            None
            if layer is None
            else layer._after_forward(module, [layer.units[index] for index in self._indices], output)
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        layer = self._layer()
        units = [] if layer is None else layer.units
        raise unreadable("copying or pickling the model", [p for u in units for b in u.buckets for p in b.params][:1])


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, mappings, and objects with attributes (model outputs)."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif not isinstance(value, (list, tuple, set)):
        value = list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, nn.Module) else ()
        return [item for item in value if isinstance(item, Tensor)]
    return [tensor for item in value for tensor in tensors_in(item)]


def _without_aliases(output: Any, storages: set[int]) -> Any:
    """Copy output tensors that live in one of the storages. See Note [One storage for life]."""
    if not any(_storage(tensor) in storages for tensor in tensors_in(output)):
        return output
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if _storage(tensor) in storages else tensor, output)


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # wrapper subclasses have none
        return 0


def _is_in_graph_task() -> bool:
    return torch._C._current_graph_task_id() != -1


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call
