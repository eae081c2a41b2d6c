"""Give memory and values to modules that were built on the meta device, one unit at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def materialize(module: nn.Module, params: Iterable[nn.Parameter], device: torch.device) -> None:
    """Allocate and initialise the modules that own the given meta parameters, in module order.

    Each is initialised by its own ``reset_parameters()``, as it would have been when built; parameters of ``module``
    keep their identity.

    Raises:
        ValueError: A module has meta parameters and no ``reset_parameters``.
    """
    wanted = {id(param) for param in params if param.is_meta}
    if not wanted:
        return
    for name, each in module.named_modules():
        own = [param for param in each._parameters.values() if param is not None and param.is_meta]
        if any(id(param) in wanted for param in own):
            _materialize_one(name, each, own, device)  # all of them: reset_parameters() may run only once


def _materialize_one(name: str, module: nn.Module, own: list[nn.Parameter], device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        names = [key for key, param in module._parameters.items() if any(param is each for each in own)]
        raise ValueError(
            f"{name or 'the model'} ({type(module).__name__}) has parameters on the meta device ({', '.join(names)}) "
            "and no reset_parameters(); give it one that fills its own parameters, or build it on a real device"
        )
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=device)
    if isinstance(module, nn.RNNBase):
        module._flat_weight_refs = []  # weak references would forbid the swap; they are made again below
    for param in own:
        # A meta parameter can't take real data through .data, but swapping keeps the object that others refer to.
        torch.utils.swap_tensors(param, nn.Parameter(torch.empty_like(param, device=device), param.requires_grad))
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
    reset()


def check_buffers(module: nn.Module) -> None:
    """Initialise meta buffers of modules without parameters, and refuse those that nothing initialises."""
    for name, each in module.named_modules():
        missing = [key for key, buffer in each._buffers.items() if buffer is not None and buffer.is_meta]
        if missing:
            _materialize_one(name, each, [], _device_of(module))


def _device_of(module: nn.Module) -> torch.device:
    return next((param.device for param in module.parameters() if not param.is_meta), torch.device("cpu"))
