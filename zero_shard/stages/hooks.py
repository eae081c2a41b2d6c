"""Stage 3: hooks on modules, on the tensors that go into them, and on those that come out.

# Note [Hooks without cycles]
A hook lives in C++ beside its graph node, where the garbage collector sees no cycle. So the hooks here are plain tensor
hooks that hold a weak reference to the layer and no tensors (torch's register_multi_grad_hook holds graph nodes, and
would keep every graph alive).

# Note [Outputs that are not returned]
A loss may be made of tensors that a forward leaves on its module (``self.aux_loss = ...``) or puts into a list that
somebody passed in. They are watched as if they had been returned. What goes out in any other way (a global list) can't
be found; if its gradient is the first to arrive, autograd refuses the released weights (see `Unit.lock`).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zero_shard.stages.released import unreadable

_COMPILER_REASON = (
    "zero_shard gathers parameters around this module (stage 3); compile its units (block.compile()) for whole graphs"
)
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
_LEAVES = (str, bytes, int, float, complex, type(None), type, nn.Module)
_MAX_DEPTH = 6


class Call(NamedTuple):
    """One forward of the modules of a unit."""

    unit: int
    number: int
    has_inputs: bool  # some of its inputs need gradients


class HookedLayer(Protocol):
    """What hooks call."""

    def before_forward(self, module: nn.Module, number: int, indices: list[int], inputs: Any) -> None:
        """Make units whole before a forward."""

    def after_forward(self, module: nn.Module, indices: list[int], output: Any, left: list[Tensor]) -> Any:
        """Release units after a forward that left tensors on its modules; return the output if it was changed."""

    def before_backward(self, calls: Sequence[Call]) -> None:
        """Make units whole: a gradient of an output of these calls has arrived."""

    def close_call(self, indices: Sequence[int], number: int) -> None:
        """Note that the gradients of all inputs of a call are complete."""

    def a_parameter(self) -> nn.Parameter | None:
        """Return a parameter to name in messages."""


class ModuleHooks:
    """What is called before and after the forward of one module.

    Args:
        layer: Held weakly, as hooks outlive it.
        number: Of the module among those with hooks.
        indices: Of the units that the module needs whole.
        parts: The module and those below it that have no hooks of their own.
    """

    def __init__(self, layer: HookedLayer, number: int, indices: list[int], parts: Sequence[nn.Module]) -> None:
        self._layer, self._number, self._indices = weakref.ref(layer), number, indices
        self._parts = [weakref.ref(part) for part in parts]
        self._left: list[weakref.ref[Tensor]] = []  # on the parts by the last forward

    def attach(self, module: nn.Module) -> list[Any]:
        """Register the hooks and return their handles. A compiler that meets one breaks its graph there."""
        return [
            module.register_forward_pre_hook(_Hook(self, self.before), prepend=True, with_kwargs=True),
            module.register_forward_hook(_Hook(self, self.after), with_kwargs=True, always_call=True),
        ]

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Make the units whole."""
        layer = self._layer()
        if layer is not None:
            layer.before_forward(module, self._number, self._indices, (args, kwargs))

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Release the units."""
        layer = self._layer()
        if layer is None:
            return None
        left = [*self._newly_left(), *tensors_in((args, kwargs))]
        return layer.after_forward(module, self._indices, output, left)

    def _newly_left(self) -> list[Tensor]:
        """Return the tensors on the modules that were not there after the last forward."""
        tensors = _tensors_on([part for reference in self._parts if (part := reference()) is not None])
        if not tensors and not self._left:
            return tensors
        before = {id(tensor) for reference in self._left if (tensor := reference()) is not None}
        self._left = [weakref.ref(tensor) for tensor in tensors]
        return [tensor for tensor in tensors if id(tensor) not in before]

    def refuse_copy(self) -> NoReturn:
        """Raise: the parameters of a copy would not be there."""
        layer = self._layer()
        raise unreadable("copying or pickling the model", [None if layer is None else layer.a_parameter()])


class _Hook:
    """A hook that no compiler looks into, and that can't be copied with its module."""

    def __init__(self, hooks: ModuleHooks, call: Callable[..., Any]) -> None:
        self._hooks, self._call = hooks, torch.compiler.disable(call, reason=_COMPILER_REASON)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._hooks.refuse_copy()


def parts_of(module: nn.Module, hooked: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield a module and those below it that are not hooked themselves."""
    yield module
    for child in module.children():
        if child not in hooked:
            yield from parts_of(child, hooked)


def watch_inputs(layer: HookedLayer, indices: Sequence[int], number: int, tensors: Sequence[Tensor]) -> list[Any]:
    """Have a call closed when the gradients of its inputs are complete; return handles of hooks that outlive a pass."""
    alive, num_missing, task = weakref.ref(layer), 0, -1
    num_inputs = len(tensors)

    def input_done(_: Any) -> None:
        nonlocal num_missing, task
        present_layer, present_task = alive(), torch._C._current_graph_task_id()
        if present_task != task:  # a graph may be walked more than once (retain_graph)
            num_missing, task = num_inputs, present_task
        num_missing -= 1
        if present_layer is not None and num_missing == 0:
            present_layer.close_call(indices, number)

    handles = [(tensor, tensor.register_hook(input_done)) for tensor in tensors]
    return [handle for tensor, handle in handles if tensor.is_leaf]


def watch_outputs(layer: HookedLayer, calls: Sequence[Call], tensors: Sequence[Tensor]) -> None:
    """Have the units of the calls made whole when a gradient of one of the tensors arrives."""
    alive, task = weakref.ref(layer), -1

    def gradient_arrives(_: Tensor) -> None:
        nonlocal task
        present_layer, present_task = alive(), torch._C._current_graph_task_id()
        if present_layer is not None and present_task != task:  # once per walk, with the first of the gradients
            present_layer.before_backward(calls)
        task = present_task

    for tensor in tensors:
        tensor.register_hook(gradient_arrives)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, mappings, and objects with attributes (model outputs)."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    _collect(value, found, set(), _MAX_DEPTH)
    return found


def _collect(value: Any, found: list[Tensor], seen: set[int], depth: int) -> None:
    items: Iterable[Any] = ()
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, _LEAVES) or callable(value) or depth == 0 or id(value) in seen:
        return
    elif isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = value
    elif hasattr(value, "__dict__"):
        items = vars(value).values()
    elif dataclasses.is_dataclass(value):  # with slots
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    seen.add(id(value))
    for item in items:
        _collect(item, found, seen, depth - 1)


def _tensors_on(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Return the tensors that a forward may have left on its modules, apart from constants."""
    found: list[Tensor] = []
    for module in modules:
        attributes = vars(module)
        for name in attributes.keys() - _OWN_ATTRIBUTES:
            value = attributes[name]
            if isinstance(value, Tensor):
                found.append(value)
            elif type(value) in (list, tuple, dict) and value:
                items = value.values() if isinstance(value, dict) else value
                if isinstance(next(reversed(items)), Tensor):  # what a forward has added; vocabularies may be long
                    found += [item for item in items if isinstance(item, Tensor)]
        for buffer in module._buffers.values():
            if buffer is not None and buffer.grad_fn is not None:
                found.append(buffer)
    return found


def without_aliases(output: Any, storages: set[int]) -> Any:
    """Copy output tensors that live in one of the storages. See Note [One storage for life]."""
    if not any(storage_of(tensor) in storages for tensor in tensors_in(output)):
        return output
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if storage_of(tensor) in storages else tensor, output)


def storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, 0 if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # wrapper subclasses have none
        return 0


def is_in_graph_task() -> bool:
    """Whether a backward is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call
