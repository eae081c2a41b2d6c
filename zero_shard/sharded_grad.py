"""What ``param.grad`` is while the gradient is sharded: the parameter's shape, but only this rank's part of it.

A ShardedGrad behaves like the full averaged gradient for what training loops do with one: norms (reduced over the
ranks), scaling, clamping, zeroing, finiteness checks. Everything else raises and names the way out. It is pending
while the gradient has not been reduced yet (stage 1, ``no_sync``): the first read reduces it, so all ranks must read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

aten = torch.ops.aten


class GradSource(Protocol):
    """Where a ShardedGrad gets its numbers from (the slot of its parameter)."""

    name: str

    def reduced_part(self) -> Tensor:
        """Return this rank's part of the mean gradient, reducing first if need be (then all ranks must call)."""

    def gather_full(self) -> Tensor:
        """Return the full mean gradient; all ranks must call."""

    def norm(self, order: float) -> Tensor:
        """Return the norm of the mean gradient; all ranks must call."""

    def note_access(self) -> None:
        """Note that the gradient may change. Local."""

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank; all ranks must call."""


class ShardedGrad(torch.Tensor):
    """Gradient of one parameter, of which this rank holds a part (1-d, fp32 or fp64, possibly empty)."""

    _source: weakref.ref[Any]

    @staticmethod
    def __new__(cls, param: nn.Parameter, source: GradSource) -> ShardedGrad:
        """Make a tensor with the shape, strides, gradient's dtype and device of ``param`` and no memory."""
        dtype = getattr(param, "grad_dtype", None) or param.dtype
        return torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=dtype, device=param.device
        )

    def __init__(self, param: nn.Parameter, source: GradSource) -> None:
        # Weak: a parameter holds its grad in C++, where the garbage collector sees no cycle.
        self._source = weakref.ref(source)

    @property
    def source(self) -> Any:
        """The slot behind this gradient."""
        source = self._source()
        if source is None:
            raise RuntimeError(
                "this gradient belonged to a zero_shard optimizer that has been deleted; call backward again"
            )
        return source

    @property
    def part(self) -> Tensor:
        """This rank's part of the mean gradient, an alias: 1-d, fp32 or fp64.

        If the gradient is pending all ranks must read it together; who changes it must do so on all ranks.
        """
        part = self.source.reduced_part()
        self.source.note_access()
        return part  # type: ignore[no-any-return]

    def full(self) -> Tensor:
        """Return the full averaged gradient in the parameter's shape and dtype. All ranks must call; communicates."""
        return self.source.gather_full().to(self.dtype)  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGrad(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"copying or pickling the sharded gradient of {self.source.name} is not available: each rank holds a "
            "part of it. Use grad.full() (all ranks call) for a plain copy"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handler = _HANDLERS.get(func)
        if handler is None:
            names = {grad.source.name for grad in _grads_in(args)}
            raise NotImplementedError(
                f"{func} is not available on the sharded gradient of {', '.join(sorted(names)) or 'a parameter'}: each "
                "rank holds a part of it. Use grad.full() (all ranks call) for a plain copy, grad.part for this rank's "
                "elements, optimizer.clip_grad_norm_() to clip"
            )
        return handler(func, *args, **(kwargs or {}))


def _grads_in(args: Any) -> list[ShardedGrad]:
    if isinstance(args, ShardedGrad):
        return [args]
    if isinstance(args, (list, tuple)):
        return [grad for item in args for grad in _grads_in(item)]
    return []


def _pointwise(func: Any, grad: ShardedGrad, *args: Any, **kwargs: Any) -> ShardedGrad:
    if any(isinstance(item, Tensor) and item.dim() > 0 for item in args):
        raise NotImplementedError(
            f"{func} with a full tensor is not available on the sharded gradient of {grad.source.name}; "
            "change grad.part, or use a number"
        )
    part = grad.part
    func(part, *(item.to(part.dtype) if isinstance(item, Tensor) else item for item in args), **kwargs)
    return grad


def _foreach_pointwise(func: Any, grads: list[ShardedGrad], *args: Any) -> None:
    parts = [grad.part for grad in grads]
    double = [part.dtype == torch.float64 for part in parts]
    for dtype, wanted in ((torch.float64, True), (torch.float32, False)):
        chosen = [part for part, is_double in zip(parts, double, strict=True) if is_double == wanted]
        if chosen:
            func(chosen, *(item.to(dtype) if isinstance(item, Tensor) else item for item in args))


def _vector_norm(
    func: Any,
    grad: ShardedGrad,
    order: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Tensor:
    if dim not in (None, []) or keepdim:
        raise NotImplementedError(
            f"a norm along dimensions of the sharded gradient of {grad.source.name}; use grad.full()"
        )
    return grad.source.norm(float(order)).to(device=grad.device, dtype=dtype or grad.dtype)  # type: ignore[no-any-return]


def _foreach_norm(func: Any, grads: list[ShardedGrad], order: float = 2, dtype: Any = None) -> list[Tensor]:
    return [_vector_norm(func, grad, order, dtype=dtype) for grad in grads]


def _unscale(func: Any, grads: list[ShardedGrad], found_inf: Tensor, inverse_scale: Tensor) -> None:
    parts = [grad.part for grad in grads]
    for dtype in {part.dtype for part in parts}:
        chosen = [part for part in parts if part.dtype == dtype]
        aten._amp_foreach_non_finite_check_and_unscale_(chosen, found_inf, inverse_scale)
    if parts and grads[0].source.any_rank(bool(found_inf.item())):
        found_inf.fill_(1.0)


def _alias(func: Any, grad: ShardedGrad) -> ShardedGrad:
    return grad  # there is no graph and no second form of it


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.detach_.default: _alias,
    aten.alias.default: _alias,
    aten.zero_.default: _pointwise,
    aten.neg_.default: _pointwise,
    aten.mul_.Tensor: _pointwise,
    aten.mul_.Scalar: _pointwise,
    aten.div_.Tensor: _pointwise,
    aten.div_.Scalar: _pointwise,
    aten.clamp_.default: _pointwise,
    aten.clamp_min_.default: _pointwise,
    aten.clamp_max_.default: _pointwise,
    aten.nan_to_num_.default: _pointwise,
    aten._foreach_zero_.default: _foreach_pointwise,
    aten._foreach_mul_.Scalar: _foreach_pointwise,
    aten._foreach_mul_.Tensor: _foreach_pointwise,
    aten._foreach_div_.Scalar: _foreach_pointwise,
    aten._foreach_div_.Tensor: _foreach_pointwise,
    aten._foreach_clamp_min_.Scalar: _foreach_pointwise,
    aten._foreach_clamp_max_.Scalar: _foreach_pointwise,
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
