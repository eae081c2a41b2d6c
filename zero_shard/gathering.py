"""Full parameters for reading, editing and saving, at any stage."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from zero_shard.buffers import Bucket, in_memory
from zero_shard.collectives import Communicator, default_rank
from zero_shard.masters import home_of, notice_edits
from zero_shard.number_formats import join_masters
from zero_shard.stages.base import Layer
from zero_shard.stages.parameters import ParameterSharding
from zero_shard.stages.released import ReleasedParameter
from zero_shard.stages.unit import Unit

_layers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def register_layer(param: nn.Parameter, layer: Layer) -> Layer | None:
    """Note which optimizer's stage holds a parameter; return the other one that has held it so far, if there is one."""
    former = layer_of(param)
    if former is layer:
        return None
    _layers[param] = weakref.ref(layer)
    return former


def layer_of(param: nn.Parameter) -> Layer | None:
    """Return the stage of the optimizer that holds a parameter."""
    reference = _layers.get(param)
    layer: Layer | None = None if reference is None else reference()
    return layer


@contextmanager
def gathered(
    module_or_params: nn.Module | nn.Parameter | Iterable[nn.Parameter], modify: bool = False
) -> Iterator[None]:
    """Hold full parameters for the duration of the context. All ranks must enter and leave it.

    Outside of stage 3 parameters are always whole and nothing happens.

    Args:
        module_or_params: A module (all its parameters), a parameter, or several.
        modify: Keep changes. Every rank must make the same ones: each keeps its own range of them.
    Raises:
        RuntimeError: The optimizer that shards the parameters has been deleted.
    """
    with ExitStack() as stack:
        for layer, params in _by_layer(_params_of(module_or_params)):
            stack.enter_context(layer.gathered(params, modify))
        yield


@torch.no_grad()
def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return what ``module.state_dict()`` would be, on the CPU of rank 0, {} elsewhere. All ranks must call.

    Communicates at stage 3, one unit at a time, so that no rank ever holds the whole model on its device. Parameters
    that ``param_dtype`` has cast come as the float32 that they were and train in, one bucket at a time.
    """
    entries = module.state_dict(keep_vars=True)
    layers = [layer for layer, _ in _by_layer(list(module.parameters()))]
    is_kept = all(layer.communicator.rank == 0 for layer in layers) if layers else default_rank() == 0
    copies: dict[int, Tensor] = {}
    for params in _unit_by_unit(module):
        with gathered(params):
            for param in params if is_kept else ():
                copies[id(param)] = param.detach().cpu().clone()
        _add_rests(params, copies)
    if not is_kept:
        return {}
    full: dict[str, Any] = {}
    for name, value in entries.items():
        if id(value) in copies:
            full[name] = copies[id(value)]
        else:
            full[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return full


def _add_rests(params: Sequence[nn.Parameter], copies: dict[int, Tensor]) -> None:
    """Make copies of 16-bit weights the float32 values that they are part of. All ranks call."""
    homes = [(param, home) for param in params if (home := home_of(param)) is not None]
    present: Bucket | None = None
    for param, (bucket, position) in sorted(homes, key=lambda pair: pair[1][0].index):
        if bucket is not present:
            present, full_low = bucket, _full_low(bucket, _layers[param]().communicator)
        if id(param) in copies:
            offset, numel = bucket.layout.slots[position]
            stride = bucket.views[position].stride()
            low = full_low[offset : offset + numel].cpu()
            master = join_masters(in_memory(copies[id(param)], stride), low)
            copies[id(param)] = master.as_strided(param.shape, stride)


def widen(params: Sequence[nn.Parameter]) -> None:
    """Make 16-bit parameters the float32 values that they are part of in another optimizer. All ranks call.

    Their gradients are dropped: that optimizer is about to lose them.
    """
    by_bucket: dict[int, tuple[Bucket, list[tuple[nn.Parameter, int]]]] = {}
    for param in params:
        home = home_of(param)
        if home is not None and param.dtype == home[0].dtype:
            by_bucket.setdefault(id(home[0]), (home[0], []))[1].append((param, home[1]))
    for bucket, places in by_bucket.values():
        full_low = _full_low(bucket, _layers[places[0][0]]().communicator)
        for param, position in places:
            offset, numel = bucket.layout.slots[position]
            view = bucket.views[position]
            master = join_masters(in_memory(param.detach(), view.stride()), full_low[offset : offset + numel])
            param.grad = None
            param.data = master.as_strided(view.shape, view.stride())


def _full_low(bucket: Bucket, communicator: Communicator) -> Tensor:
    if not bucket.is_released:
        bucket.take_back_replaced()
        notice_edits(bucket)
    assert bucket.low is not None
    full = bucket.low.new_empty(bucket.layout.numel)
    full[bucket.own_range] = bucket.low
    label = f"the masters of {bucket.label}"
    wire = full.view(torch.uint8)  # backends know no int16
    communicator.all_gather_(communicator.shards, wire, 3 * bucket.index + 2, label).wait()
    return full


def _unit_by_unit(module: nn.Module) -> list[list[nn.Parameter]]:
    params = list(module.parameters())
    units: dict[int, Unit] = {}
    for layer, _ in _by_layer(params):
        if isinstance(layer, ParameterSharding):
            units |= {id(p): unit for unit in layer.units for bucket in unit.buckets for p in bucket.params}
    parts: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        unit = units.get(id(param))
        parts.setdefault(None if unit is None else id(unit), []).append(param)
    return list(parts.values())


def _params_of(value: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    if isinstance(value, nn.Module):
        return list(value.parameters())
    if isinstance(value, nn.Parameter):
        return [value]
    return list(value)


def _by_layer(params: Sequence[nn.Parameter]) -> list[tuple[Layer, list[nn.Parameter]]]:
    found: dict[int, tuple[Layer, list[nn.Parameter]]] = {}
    for param in params:
        layer = layer_of(param)
        if layer is not None:
            found.setdefault(id(layer), (layer, []))[1].append(param)
        elif isinstance(param, ReleasedParameter):
            raise RuntimeError(
                f"{param!r} was sharded by a zero_shard.AdamW that has been deleted, and its shards with it; build "
                "the model anew and load a checkpoint"
            )
    return list(found.values())
