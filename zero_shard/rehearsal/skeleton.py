"""A stand-in for a model: its modules, parameters and buffers on the meta device, and a forward that needs no data.

The forward walks through the modules in their order and touches every parameter, so that what hangs on modules and
parameters (gathers, releases, gradients) happens as in the model, while nothing is computed and no activation is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class _Touch(torch.autograd.Function):
    """Uses a parameter as a layer does: needs it in backward, and gives it a gradient."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, param: Tensor) -> Tensor:
        """Return a new stream, a scalar."""
        ctx.save_for_backward(param)
        return torch.empty_like(stream)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of the stream and of the parameter."""
        (param,) = ctx.saved_tensors
        return grads[0], torch.empty_like(param) if ctx.needs_input_grad[1] else None


class _Walk:
    """What every module of a skeleton has in place of its own ways to be called."""

    _parameters: dict[str, nn.Parameter | None]
    _modules: dict[str, nn.Module | None]
    __call__ = nn.Module.__call__

    def forward(self, stream: Tensor) -> Tensor:
        """Touch the own parameters, then those of each child."""
        for param in self._parameters.values():
            if param is not None:
                stream = _Touch.apply(stream, param)  # type: ignore[no-untyped-call]
        for child in self._modules.values():
            if child is not None:
                stream = child(stream)
        return stream


class Skeleton:
    """A stand-in for a model, or for parameters without one: classes, names, sharing, dtypes and who trains are equal.

    Args:
        model: On any device; not changed.
        params: Others beside it.

    Attributes:
        has_model: Whether there is a model.
        module: To be called with a 0-dim meta tensor; returns one.
        tensors: Every parameter and buffer, as it is before an optimizer is built, and "weights" or "buffers".
    """

    def __init__(self, model: nn.Module | None, params: Iterable[Tensor] = ()) -> None:
        self.has_model = model is not None
        self._made: dict[int, Any] = {}  # by the id of what it stands for
        self._sources: list[Any] = []  # held, so that no new object takes an id
        self.module = _bag([]) if model is None else self._copy(model)
        self._loose = _bag([self.param(param) for param in params if id(param) not in self._made])
        named = [each for part in (self.module, self._loose) for each in part.parameters()]
        self.tensors: list[tuple[str, Tensor]] = [("weights", param) for param in named]
        self.tensors += [("buffers", buffer) for buffer in self.module.buffers()]

    def param(self, param: Tensor) -> nn.Parameter:
        """Return the stand-in of a parameter."""
        made: nn.Parameter = self._on_meta(param)
        return made

    def walk(self) -> Tensor:
        """Run the forward of all modules; return the stream."""
        stream: Tensor = self._loose(self.module(torch.empty((), device="meta")))
        return stream

    def _copy(self, module: nn.Module) -> nn.Module:
        if id(module) in self._made:
            known: nn.Module = self._made[id(module)]
            return known
        copied = _new(type(module))
        self._note(module, copied)
        for name, param in module._parameters.items():
            copied._parameters[name] = None if param is None else self._on_meta(param)
        for name, buffer in module._buffers.items():
            copied._buffers[name] = None if buffer is None else self._on_meta(buffer)
        for name, child in module._modules.items():
            copied._modules[name] = None if child is None else self._copy(child)
        return copied

    def _on_meta(self, tensor: Tensor) -> Any:
        if id(tensor) not in self._made:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            is_param = isinstance(tensor, nn.Parameter)
            self._note(tensor, nn.Parameter(made, tensor.requires_grad) if is_param else made)
        return self._made[id(tensor)]

    def _note(self, source: Any, made: Any) -> None:
        self._made[id(source)] = made
        self._sources.append(source)


def _new(kind: type[nn.Module]) -> nn.Module:
    """Return an empty module of a class that is called as ``kind`` is, and counts as one."""
    module: nn.Module = object.__new__(type(kind.__name__, (_Walk, kind), {}))
    nn.Module.__init__(module)
    return module


def _bag(params: Iterable[nn.Parameter]) -> nn.Module:
    module = _new(nn.Module)
    for number, param in enumerate(params):
        module._parameters[str(number)] = param
    return module
