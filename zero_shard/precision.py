"""Computing in 16 bits: which parameters are cast, and the hooks that cast what goes into and comes out of modules.

Every module that owns parameters gets its floating inputs in their dtype, and the model in that of the parameters cast;
hence methods other than the model's forward work, and float32 buffers that are added on the way do no harm. Norms that
stay float32 compute in float32, and return what the rest computes in. The hooks stay on the model for life, as its
parameters stay 16 bits wide; they hold dtypes only, and another optimizer on the same model finds and keeps them.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten

from zero_shard.config import ParamDtypes
from zero_shard.masters import home_of, write_master

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d, nn.RMSNorm)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises: one of torch's, or one without children whose class is called ...Norm."""
    return isinstance(module, _NORMS) or (type(module).__name__.endswith("Norm") and not any(module.children()))


class Precision:
    """Which dtype each float32 parameter of a model is stored in, and the hooks that this takes.

    Args:
        dtypes: What is asked for.
        module: The model.
    """

    def __init__(self, dtypes: ParamDtypes, module: nn.Module) -> None:
        self._dtypes, self._module = dtypes, module
        self._kept: set[int] = set()  # ids of the parameters of norms that stay as they are
        self._cast: dict[int, torch.dtype] = {}  # id of each parameter to be cast, or cast before
        self.look()

    def look(self) -> None:
        """Look for the parameters of the model, which may have grown. Local."""
        cast, self._cast, self._kept = self._cast, {}, set()
        for module in self._module.modules():
            dtype = self._dtypes.norms if is_norm(module) else self._dtypes.params
            for param in module._parameters.values():
                if param is not None and dtype == torch.float32:
                    self._kept.add(id(param))
                elif param is not None and (param.dtype == torch.float32 or id(param) in cast or home_of(param)):
                    self._cast[id(param)] = dtype

    def copy(self, module: nn.Module, memo: dict[int, Any]) -> Precision:
        """Return the same for a deep copy of the model, whose parameters are in ``memo``. Local."""
        copied = copy.copy(self)
        copied._module = module
        copied._kept = {id(memo[key]) for key in self._kept if key in memo}
        copied._cast = {id(memo[key]): dtype for key, dtype in self._cast.items() if key in memo}
        return copied

    def dtype_of(self, param: nn.Parameter) -> torch.dtype | None:
        """Return the dtype that a parameter is cast to, or has been; None for those that stay as they are."""
        return None if id(param) in self._kept else self._cast.get(id(param))

    def check(self, name: str, param: nn.Parameter) -> None:
        """Refuse a parameter that can't be cast.

        Raises:
            ValueError: It is neither float32 nor what was asked for.
        """
        wanted = (torch.float32, self._dtypes.params, self._dtypes.norms)
        if id(param) not in self._kept and id(param) not in self._cast and param.dtype not in wanted:
            raise ValueError(
                f"parameter {name} has dtype {param.dtype}, expected float32 or {self._dtypes.params}: param_dtype "
                "casts float32 parameters; convert the model with module.float() first, or leave param_dtype out"
            )

    def attach(self) -> None:
        """Cast the buffers that shall be, and hook the modules that have no hooks yet. Local."""
        if not self._cast:
            return
        for module in self._module.modules():
            own = [param for param in module._parameters.values() if param is not None]
            if is_norm(module) and self._dtypes.norms == torch.float32:
                _hook(module, torch.float32, self._dtypes.params)
                continue
            if any(param.dtype in _FLOATS for param in own):
                _hook(module, self._dtypes.params, None)
            if any(id(param) in self._cast for param in own):
                _keep_masters_when_loading(module)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.dtype == torch.float32 and self._dtypes.buffers is not None:
                    module._buffers[name] = buffer.to(self._dtypes.buffers)
        if not is_norm(self._module):
            _hook(self._module, self._dtypes.params, self._dtypes.outputs)


# ---- casts -------------------------------------------------------------------------------------------------------


class CastInputs:
    """Forward pre-hook: casts floating tensors among the arguments, however nested.

    Args:
        dtype: To which, if the module has no floating parameter of its own, whose dtype it is else.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the new arguments, None if there is nothing to cast."""
        dtype = self.dtype
        for param in module._parameters.values():
            if param is not None and param.dtype in _FLOATS:
                dtype = param.dtype
                break
        copies: dict[int, Tensor] = {}  # one argument given three times, as attention does, stays one
        args = _cast(args, dtype, copies)
        kwargs = _cast(kwargs, dtype, copies) if kwargs else kwargs
        return (args, kwargs) if copies else None


class CastOutputs:
    """Forward hook: casts floating tensors in the output, however nested, to ``dtype``; None leaves them."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the new output, None if there is nothing to cast."""
        copies: dict[int, Tensor] = {}
        new = output if self.dtype is None else _cast(output, self.dtype, copies)
        return new if copies else None


def _cast(value: Any, dtype: torch.dtype, copies: dict[int, Tensor]) -> Any:
    """Return ``value`` with floating tensors cast; what holds none is the same object, as modules may change it."""
    if isinstance(value, Tensor):
        if value.dtype == dtype or value.dtype not in _FLOATS:
            return value
        if id(value) not in copies:
            copies[id(value)] = value.to(dtype)
        return copies[id(value)]
    if isinstance(value, (str, int, float, type(None))):
        return value
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return value._replace(data=_cast(value.data, dtype, copies))
    if type(value) is tuple:
        leaves: list[Any] = list(value)
        new = [_cast(leaf, dtype, copies) for leaf in leaves]
        return value if all(map(operator.is_, leaves, new)) else tuple(new)
    leaves, structure = tree_flatten(value)
    new = [leaf if leaf is value else _cast(leaf, dtype, copies) for leaf in leaves]
    return value if all(map(operator.is_, leaves, new)) else tree_unflatten(new, structure)


def _hook(module: nn.Module, inputs: torch.dtype, outputs: torch.dtype | None) -> None:
    """Cast floating inputs and outputs of a module, in place of what an earlier call asked for."""
    before = next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, CastInputs)), None)
    after = next((hook for hook in module._forward_hooks.values() if isinstance(hook, CastOutputs)), None)
    if before is not None:
        before.dtype = inputs
    else:
        module.register_forward_pre_hook(CastInputs(inputs), with_kwargs=True)
    if after is not None:
        after.dtype = outputs
    elif outputs is not None:
        module.register_forward_hook(CastOutputs(outputs))


# ---- loading -----------------------------------------------------------------------------------------------------


class _KeepMasters:
    """Gives parameters the digits that ``load_state_dict`` would round away. One for each module."""

    def __init__(self) -> None:
        self._wider: list[tuple[nn.Parameter, Tensor]] = []

    def before(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Note the values that are wider than the module's own parameters."""
        self._wider = []
        for name, param in module._parameters.items():
            value = state_dict.get(prefix + name)
            if param is None or not isinstance(value, Tensor) or value.shape != param.shape:
                continue
            if value.dtype in (torch.float32, torch.float64):
                self._wider.append((param, value.detach()))

    def after(self, module: nn.Module, _: Any) -> None:
        """Write them, rounded as a step would and with what that leaves over."""
        wider, self._wider = self._wider, []
        for param, value in wider:
            home = home_of(param)
            if home is not None and not home[0].is_released:
                write_master(*home, value)


def _keep_masters_when_loading(module: nn.Module) -> None:
    hooks = [hook for hook in module._load_state_dict_post_hooks.values() if hasattr(hook, "__self__")]
    if not any(isinstance(hook.__self__, _KeepMasters) for hook in hooks):
        keeper = _KeepMasters()
        module.register_load_state_dict_pre_hook(keeper.before)
        module.register_load_state_dict_post_hook(keeper.after)
