"""What ``param.grad`` is while the gradient is sharded: the parameter's shape, but only this rank's part of it.

A ShardedGrad behaves like the full averaged gradient for what training loops do with one. Three rules, no list:

    pointwise, in place or not    on the own part; with numbers, full tensors, and what was computed from it
    reduced to one number         over the ranks, to a plain 0-dim tensor: all ranks must call
    everything else               raises, and names the way out

It is pending while the gradient has not been reduced yet (stage 1, ``no_sync``): the first read reduces it, so all
ranks must read. What a pointwise operator returns is a ShardedGrad too, with numbers of its own; put into
``param.grad`` it is the mean gradient, and is not averaged again.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from zero_shard.grad_source import GradSource
from zero_shard.part_reductions import REDUCTIONS, reduce_parts

aten = torch.ops.aten

_DROPPED = (
    "this reference to the gradient of {} was taken before the gradient was dropped (zero_grad, p.grad = None). "
    "Read p.grad anew, or take p.grad.clone() of what is to outlive it"
)
_REMEDY = (
    "each rank holds a part of it. Use grad.full() (all ranks call) for a plain copy, grad.part for this rank's "
    "elements, optimizer.clip_grad_norm_() to clip"
)


class ShardedGrad(torch.Tensor):
    """Gradient of one parameter, or a tensor computed from it, of which this rank holds a part (1-d, maybe empty)."""

    _source: weakref.ref[Any]
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls, like: Tensor, source: GradSource, value: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> ShardedGrad:
        """Make a tensor with the shape, strides, dtype (of a gradient) and device of ``like`` and no memory."""
        dtype = dtype or getattr(like, "grad_dtype", None) or like.dtype
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device
        )

    def __init__(
        self, like: Tensor, source: GradSource, value: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        # Weak: a parameter holds its grad in C++, where the garbage collector sees no cycle.
        self._source = weakref.ref(source)
        self._value = value  # None: the numbers are the gradient itself
        self.generation = source.generation

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
    def is_value(self) -> bool:
        """Whether it has numbers of its own, computed from a gradient, instead of being the gradient."""
        return self._value is not None

    def check_current(self) -> None:
        """Raise if it stands for a gradient that has been dropped. Local."""
        if self._value is None and self.generation != self.source.generation:
            raise RuntimeError(_DROPPED.format(self.source.name))

    @property
    def data(self) -> Tensor:
        """The gradient itself, as there is no graph; setting it copies (``p.grad.data = p.grad.data * 0.5``)."""
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:
            self.copy_(value)

    @property
    def part(self) -> Tensor:
        """This rank's part, an alias: 1-d, of a gradient fp32 or fp64.

        If the gradient is pending all ranks must read it together; who changes it must do so on all ranks.
        """
        if self._value is not None:
            return self._value
        source = self.source
        self.check_current()
        part: Tensor = source.reduced_part()
        self.check_current()  # reducing may find that the user had taken it out of param.grad
        source.note_access()
        return part

    def full(self) -> Tensor:
        """Return the full averaged gradient in the parameter's shape and dtype. All ranks must call; communicates."""
        return self.source.gather_full(self.part).to(self.dtype)  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        source = self._source()
        name = "a deleted optimizer" if source is None else source.name
        return f"ShardedGrad({name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set elements of the own part; index and value are the same on all ranks and may be anything torch takes."""
        if isinstance(index, ShardedGrad):
            mask: Tensor = index
        else:
            mask = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
            mask[index] = True
        if isinstance(value, Tensor) and value.dim() > 0:
            if not isinstance(value, ShardedGrad):
                full = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
                full[index] = value
                value = full
            self.copy_(torch.where(mask, value, self))
        else:
            self.masked_fill_(mask, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"pickling the sharded gradient of {self.source.name} is not available: each rank holds a "
            "part of it. Use grad.full() (all ranks call) for a plain copy"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handler = _handler_of(func)
        if handler is None:
            _refuse(func, args)
        return handler(func, *args, **(kwargs or {}))


def _refuse(func: Any, args: Any, why: str = "") -> NoReturn:
    names = {grad.source.name for grad in _grads_in(args)}
    raise NotImplementedError(
        f"{func}{why} is not available on the sharded gradient of {', '.join(sorted(names)) or 'a parameter'}: "
        + _REMEDY
    )


def _grads_in(args: Any) -> list[ShardedGrad]:
    if isinstance(args, ShardedGrad):
        return [args]
    if isinstance(args, (list, tuple)):
        return [grad for item in args for grad in _grads_in(item)]
    return []


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of parts of a tensor of this dtype."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else dtype


def _on_meta(item: Any) -> Any:
    """Return what has the shape and dtype of a tensor, but no numbers."""
    if isinstance(item, Tensor):
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
    return [_on_meta(each) for each in item] if isinstance(item, (list, tuple)) else item


def _as_part(func: Any, item: Any, grad: ShardedGrad) -> Any:
    """Return what an argument of a pointwise operator is to the own part of ``grad``."""
    if isinstance(item, ShardedGrad):
        if item.source is not grad.source:
            _refuse(func, [grad, item], " of gradients of two parameters")
        return item.part
    if not isinstance(item, Tensor):
        return item
    part = item if item.dim() == 0 and grad.dim() > 0 else grad.source.own_part(item)
    return part.to(grad.part.dtype) if item.dtype.is_floating_point and grad.dtype.is_floating_point else part


def _without_layout(func: Any, grad: ShardedGrad, kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("device") not in (None, grad.device) or kwargs.get("pin_memory"):
        _refuse(func, [grad], " to another device")
    return {key: value for key, value in kwargs.items() if key not in ("device", "layout", "memory_format")}


def _pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    grad = _grads_in(args)[0]
    kwargs = _without_layout(func, grad, kwargs)
    if func._schema.is_mutable:
        if args[0] is not grad:
            _refuse(func, args, " into a plain tensor")
        func(*(_as_part(func, item, grad) for item in args), **kwargs)
        _note_changes([grad])
        return grad
    like = func(*_on_meta(args), **kwargs)
    if not isinstance(like, Tensor) or like.shape != grad.shape:
        _refuse(func, args)
    return _valued(grad, func(*(_as_part(func, item, grad) for item in args), **kwargs), like.dtype)


def _note_changes(grads: Sequence[Tensor | None]) -> None:
    for grad in grads:
        if isinstance(grad, ShardedGrad) and not grad.is_value:
            grad.source.note_change()


def _valued(grad: ShardedGrad, part: Tensor, dtype: torch.dtype) -> ShardedGrad:
    return ShardedGrad(grad, grad.source, part.to(_wide(dtype)), dtype)


def _foreach(func: Any, tensors: Sequence[Tensor], *others: Any, **kwargs: Any) -> Any:
    """Do a pointwise operator on lists; a row of plain tensors among them stays what it is."""
    args = (tensors, *others)
    is_listed = [isinstance(arg, (list, tuple)) and isinstance(next(iter(arg), None), Tensor) for arg in args]
    grads: list[ShardedGrad | None] = []
    rows: list[list[Any]] = [[] for _ in args]
    for number in range(len(tensors)):
        row = [arg[number] for arg, listed in zip(args, is_listed, strict=True) if listed]
        grad = next(iter(_grads_in(row)), None)
        if grad is not None and func._schema.is_mutable and row[0] is not grad:
            _refuse(func, row, " into a plain tensor")
        grads.append(grad)
        for place, item in zip((i for i, listed in enumerate(is_listed) if listed), row, strict=True):
            rows[place].append(item if grad is None else _as_part(func, item, grad))
    dtype = rows[0][0].dtype
    parts = [
        row if listed else arg.to(dtype) if isinstance(arg, Tensor) and arg.dim() == 0 else arg
        for row, listed, arg in zip(rows, is_listed, args, strict=True)
    ]
    found = func(*parts, **kwargs)
    if func._schema.is_mutable:
        return _note_changes(grads)
    likes = func(*(_on_meta(arg) for arg in args), **kwargs)
    return [
        part if grad is None else _valued(grad, part, like.dtype)
        for grad, part, like in zip(grads, found, likes, strict=True)
    ]


# ---- down to one number ----------------------------------------------------------------------------------------


def _reduced(kind: str, parts: Sequence[Tensor], grads: Sequence[ShardedGrad]) -> Tensor:
    counted = [grad.source.counted_part(part) for grad, part in zip(grads, parts, strict=True)]
    return reduce_parts(kind, counted, grads[0].source.from_all_ranks)


def _reduction(func: Any, grad: ShardedGrad, *args: Any, **kwargs: Any) -> Tensor:
    like = func(_on_meta(grad), *_on_meta(args), **kwargs)
    if not isinstance(like, Tensor) or like.dim() > 0:
        _refuse(func, [grad], " along some dimensions")
    kind = func._schema.name.removeprefix("aten::")
    total = _reduced(kind, [grad.part], [grad])[0]
    return (total / grad.numel() if kind == "mean" else total).to(like.dtype)


def _variance(func: Any, grad: ShardedGrad, *args: Any, **kwargs: Any) -> Tensor:
    like = func(_on_meta(grad), *args, **kwargs)
    if like.dim() > 0:
        _refuse(func, [grad], " along some dimensions")
    correction = kwargs.get("correction")
    part = grad.part.double()
    mean = _reduced("sum", [part], [grad])[0] / grad.numel()
    squares = _reduced("sum", [(part - mean).square()], [grad])[0]
    variance = squares / max(grad.numel() - (1 if correction is None else correction), 0)
    return (variance.sqrt() if "std" in func._schema.name else variance).to(like.dtype)


def _vector_norm(
    func: Any, grad: ShardedGrad, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    if dim not in (None, []) or keepdim:
        _refuse(func, [grad], " along some dimensions")
    if grad.is_value:
        norm: Tensor = grad.source.norm_of_part(grad.part, float(order))
    else:
        grad.check_current()
        norm = grad.source.norm(float(order))
    return norm.to(device=grad.device, dtype=dtype or grad.dtype)


def _all_sharded(func: Any, grads: Sequence[Tensor]) -> None:
    if not all(isinstance(grad, ShardedGrad) for grad in grads):
        why = " with plain tensors beside, which count as this rank's gradients and are averaged in step(),"
        _refuse(func, grads, why)


def _foreach_norm(func: Any, grads: list[ShardedGrad], order: float = 2, dtype: Any = None) -> list[Tensor]:
    _all_sharded(func, grads)
    return [_vector_norm(func, grad, order, dtype=dtype) for grad in grads]


def _foreach_max(func: Any, grads: list[ShardedGrad]) -> list[Tensor]:
    _all_sharded(func, grads)
    found = _reduced("max", [grad.part for grad in grads], grads).unbind()
    return [each.to(grad.dtype) for each, grad in zip(found, grads, strict=True)]


def _unscale(func: Any, grads: list[ShardedGrad], found_inf: Tensor, inverse_scale: Tensor) -> None:
    _all_sharded(func, grads)
    parts = [grad.part for grad in grads]
    for dtype in {part.dtype for part in parts}:
        func([part for part in parts if part.dtype == dtype], found_inf, inverse_scale)
    _note_changes(grads)
    if parts:
        found_inf.fill_(grads[0].source.from_all_ranks(found_inf.view(1)).amax())


# ---- the rest --------------------------------------------------------------------------------------------------


def _alias(func: Any, grad: ShardedGrad) -> ShardedGrad:
    return grad  # there is no graph and no second form of it


def _equal(func: Any, left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and bool((left == right).all())


def _allclose(func: Any, left: Tensor, right: Tensor, *args: Any) -> bool:
    return bool(torch.isclose(left, right, *args).all())


def _item(func: Any, grad: ShardedGrad) -> Any:
    return grad.full().item()


def _random(func: Any, grad: ShardedGrad, *args: Any, **kwargs: Any) -> ShardedGrad:
    """Draw for the whole tensor, as plain torch does, and keep the own part."""
    if _grads_in(args):
        _refuse(func, [grad])
    plain = torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device)
    full = func(plain, *args, **_without_layout(func, grad, kwargs))
    if func._schema.is_mutable:
        return _pointwise(aten.copy_.default, grad, full)  # type: ignore[no-any-return]
    return _valued(grad, grad.source.own_part(full).clone(), full.dtype)


def _new(func: Any, grad: ShardedGrad, *args: Any, **kwargs: Any) -> Tensor:
    return func(torch.empty(0, dtype=grad.dtype, device=grad.device), *args, **kwargs)  # type: ignore[no-any-return]


_Handler = Callable[..., Any]
_BY_OVERLOAD: dict[Any, _Handler] = {
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._foreach_max.default: _foreach_max,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.var.correction: _variance,
    aten.std.correction: _variance,
    aten.equal.default: _equal,
    aten.allclose.default: _allclose,
    aten._local_scalar_dense.default: _item,
}
_BY_NAME: dict[str, _Handler] = {
    **dict.fromkeys(("detach", "detach_", "alias"), _alias),
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), _new),
    **dict.fromkeys(("rand_like", "randn_like", "randint_like", "normal_", "uniform_", "bernoulli_"), _random),
    # Pointwise, but torch does not say so.
    **dict.fromkeys(
        ("zero_", "fill_", "copy_", "_to_copy", "abs_", "masked_fill_", "masked_fill", "isclose"), _pointwise
    ),
    **dict.fromkeys(("empty_like", "zeros_like", "ones_like", "full_like"), _pointwise),
    **dict.fromkeys(REDUCTIONS, _reduction),
}


@functools.cache
def _handler_of(func: Any) -> _Handler | None:
    """Return what does an operator, None if nothing does."""
    name = func._schema.name.removeprefix("aten::")
    if func in _BY_OVERLOAD:
        return _BY_OVERLOAD[func]
    if any(argument.is_out for argument in func._schema.arguments):
        return None
    if torch.Tag.pointwise in func.tags:  # max and min of two tensors, too
        return _pointwise
    if name.startswith("_foreach_") and name not in ("_foreach_norm", "_foreach_powsum"):
        return _foreach
    return _BY_NAME.get(name)
