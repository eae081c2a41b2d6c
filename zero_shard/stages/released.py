"""A parameter whose data lie on other ranks: it keeps its shape and raises when it is read."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_TORCH_MODULE_FILE = nn.Module._apply.__code__.co_filename


class ReleasedOwner(Protocol):
    """Who can gather released parameters."""

    def gather_for_use(self, param: nn.Parameter) -> bool:
        """Make a parameter whole if the model itself is using it; return whether it is. Then all ranks must call."""


class _Facts(NamedTuple):
    name: str
    strides: tuple[int, ...]
    owner: weakref.ref[ReleasedOwner]


_facts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
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
    allowed.add(torch._has_compatible_shallow_copy_type)
    # Their inputs are asked for, not read.
    allowed.update({torch.autograd.grad, torch.autograd.backward})
    allowed.update({torch.is_floating_point, torch.is_complex, torch.numel})
    return allowed


_ALLOWED = _allowed()
_STRIDE_METHODS = {torch.Tensor.stride, torch.Tensor.is_contiguous}
_EDITS = {"__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
_LIKES = {getattr(torch, f"{name}_like") for name in "zeros ones empty full rand randn".split()}
_CONVERSIONS = {getattr(torch.Tensor, name) for name in "to cpu cuda float double half bfloat16".split()}


class ReleasedParameter(nn.Parameter):
    """What a parameter is while its unit is released; metadata work, everything else raises with its name."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Released parameter {_facts[self].name} of shape {tuple(self.shape)}"

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
            stand_in = torch.empty_strided(args[0].shape, _facts[args[0]].strides, dtype=args[0].dtype, device="meta")
            return func(stand_in, *args[1:], **(kwargs or {}))
        if func in _LIKES and isinstance(args[0] if args else None, ReleasedParameter):
            stand_in = torch.empty_strided(args[0].shape, _facts[args[0]].strides, dtype=args[0].dtype, device="meta")
            return func(stand_in, *args[1:], **{"device": args[0].device, **(kwargs or {})})
        if func in _CONVERSIONS and _changes_nothing(func, *args, **(kwargs or {})):
            return args[0]
        if func == torch.Tensor.data.__set__ and args[0] is args[1]:  # type: ignore[attr-defined]
            return None  # as module.to() does after a conversion that changed nothing
        params = _released_in((*args, *(kwargs or {}).values()))
        if params and not _is_edit(func) and _ask_for(params):
            return func(*args, **(kwargs or {}))
        raise unreadable(_name_of(func), params)


def register(param: nn.Parameter, owner: ReleasedOwner, name: str) -> None:
    """Note what must be known of a parameter, whole now, while it is released."""
    _facts[param] = _Facts(name, param.stride(), weakref.ref(owner))


def release(param: nn.Parameter, placeholder: Tensor) -> None:
    """Turn a registered parameter into a released one in place; ``placeholder`` has its shape and no memory."""
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


def _ask_for(params: Sequence[ReleasedParameter]) -> bool:
    """Have parameters gathered, if this is a use by the model; return whether all of them are whole now."""
    for param in params:
        facts = _facts.get(param)
        owner = None if facts is None else facts.owner()
        if owner is None or not owner.gather_for_use(param):
            return False
    return True


def _changes_nothing(convert: Any, param: nn.Parameter, *args: Any, **kwargs: Any) -> bool:
    """Whether a parameter already has the dtype and device that it is to be converted to."""
    probe = torch.empty(0, dtype=param.dtype, device=param.device)
    named = {name: _without_cpu_index(value) for name, value in kwargs.items()}
    return convert(probe, *map(_without_cpu_index, args), **named) is probe


def _without_cpu_index(value: Any) -> Any:
    """Return "cpu" for "cpu:1", as accelerate calls the CPU of rank 1: torch copies, though the device is the same."""
    is_cpu = isinstance(value, (str, torch.device)) and torch.device(value).type == "cpu"
    return torch.device("cpu") if is_cpu else value


def _is_edit(func: Any) -> bool:
    """Whether a function changes a tensor in place: each rank would make a change of its own."""
    name = getattr(func, "__name__", "")
    return name in _EDITS or (name.endswith("_") and not name.endswith("__"))


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name


def unreadable(what: str, args: Any) -> RuntimeError:
    """Return the error that names the released parameters among ``args`` and the remedy."""
    names = sorted({_facts[each].name if each in _facts else "?" for each in _released_in(args)})
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


def is_used_by(root: nn.Module, frame: FrameType | None) -> bool:
    """Whether code that reads a parameter was called by a method of a module of ``root``.

    Not by one of torch's that walks over all parameters (``state_dict``, ``to``), nor by other code: that may run on
    one rank only.
    """
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module) and hasattr(type(owner), code.co_name):
            if any(owner is module for module in root.modules()):
                return code.co_filename != _TORCH_MODULE_FILE
        frame = frame.f_back
    return False
