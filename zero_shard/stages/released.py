"""A parameter whose data lie on other ranks: it keeps its shape and raises when it is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_strides: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_classes: dict[type, type] = {}

_METADATA = (
    "shape dtype device layout ndim requires_grad grad is_leaf grad_fn _grad_fn names is_sparse is_quantized is_cuda "
    "is_meta is_cpu is_mkldnn is_mps is_xpu is_nested itemsize nbytes retains_grad _version output_nr grad_dtype "
    "_backward_hooks _post_accumulate_grad_hooks"
).split()
_METHODS = (
    "size dim numel nelement element_size is_floating_point is_complex __len__ __hash__ requires_grad_ "
    "register_hook register_post_accumulate_grad_hook storage_offset ndimension get_device is_signed"
).split()


def _allowed() -> set[Any]:
    allowed: set[Any] = set()
    for name in _METADATA:
        attribute = getattr(torch.Tensor, name, None)
        for access in ("__get__", "__set__"):
            if hasattr(attribute, access):
                allowed.add(getattr(attribute, access))
    allowed.add(torch.Tensor.grad.__delete__)  # type: ignore[union-attr]
    for name in _METHODS:
        if hasattr(torch.Tensor, name):
            allowed.add(getattr(torch.Tensor, name))
    # Their inputs are asked for, not read.
    allowed.update({torch.autograd.grad, torch.autograd.backward})
    allowed.update({torch.is_floating_point, torch.is_complex, torch.numel})
    return allowed


_ALLOWED = _allowed()
_STRIDE_METHODS = {torch.Tensor.stride, torch.Tensor.is_contiguous}


class ReleasedParameter(nn.Parameter):
    """What a parameter is while its unit is released; metadata work, everything else raises with its name."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Released parameter {_names.get(self, '?')} of shape {tuple(self.shape)}"

    def __deepcopy__(self, memo: Any) -> Any:
        raise unreadable("copy.deepcopy", (self,))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unreadable("pickling", (self,))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _STRIDE_METHODS:
            stand_in = torch.empty_strided(args[0].shape, _strides[args[0]], dtype=args[0].dtype, device="meta")
            return func(stand_in, *args[1:], **(kwargs or {}))
        raise unreadable(getattr(func, "__name__", str(func)), (*args, *(kwargs or {}).values()))


def release(param: nn.Parameter, name: str, placeholder: Tensor) -> None:
    """Turn a parameter into a released one in place; ``placeholder`` has its shape and no memory."""
    if param not in _names:
        _names[param] = name
        _strides[param] = param.stride()
    param.data = placeholder
    param.__class__ = _released_class(type(param))


def restore(param: nn.Parameter, data: Tensor) -> None:
    """Turn a released parameter into what it was, with ``data``."""
    if isinstance(param, ReleasedParameter):
        param.__class__ = type(param).original  # type: ignore[attr-defined]
    param.data = data


def _released_class(original: type) -> type:
    if original not in _classes:
        bases = (ReleasedParameter,) if original is nn.Parameter else (ReleasedParameter, original)
        _classes[original] = type("ReleasedParameter", bases, {"original": original})
    return _classes[original]


def unreadable(what: str, args: Any) -> RuntimeError:
    """Return the error that names the released parameters among ``args`` and the remedy."""
    names = sorted({_names.get(each, "?") for each in _released_in(args)})
    average = "; for an average of the weights (EMA) use zero_shard.ExponentialMovingAverage(optimizer)"
    return RuntimeError(
        f"{what} needs the parameter {', '.join(names)}, which is sharded and not gathered here (stage 3). Inside its "
        "module's forward it is whole; elsewhere use 'with zero_shard.gathered(module):' on all ranks, and "
        "zero_shard.full_state_dict(module) or zero_shard.save in place of module.state_dict()"
        f"{average if what.startswith('copy') else ''}"
    )


def _released_in(args: Any) -> list[ReleasedParameter]:
    if isinstance(args, ReleasedParameter):
        return [args]
    if isinstance(args, (list, tuple)):
        return [each for item in args for each in _released_in(item)]
    return []
