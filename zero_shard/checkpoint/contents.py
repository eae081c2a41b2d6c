"""What a checkpoint holds of a model and its optimizer, and which rank writes what.

model.<name>                           weights, and what of the state dict is no parameter; a float32 master if split
optim.state.<name>.step                0-dim float32
optim.state.<name>.exp_avg, ...        moments as numbers, and ``low``: what a 16-bit weight's master has beyond it
optim.param_groups.<number>.<option>   and ``params``: the names of the group's parameters
extra.<key>                            what the user passed
random.<rank>                          random number generators
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from zero_shard.adamw import AdamW
from zero_shard.averaging import ExponentialMovingAverage
from zero_shard.block_codec import decode_blocks
from zero_shard.buffers import SCALE_NAMES, STATE_NAMES, Bucket
from zero_shard.checkpoint.parts import Source, Value
from zero_shard.checkpoint.random_states import random_states
from zero_shard.checkpoint.reader import reason_of
from zero_shard.groups import Groups
from zero_shard.held_state import HeldState, held_of
from zero_shard.layout import BLOCK_NUMEL, Segment
from zero_shard.module_names import plain_names
from zero_shard.number_formats import join_masters
from zero_shard.stages.slots import GradSlot

FORMAT_KEY = "zero_shard.version"
FORMAT_VERSION = 1
_NAMES_OF_GROUP = ("params", "param_names")
Copy = Callable[[Any, Tensor], Tensor]  # (key, tensor) -> what is written: the tensor itself, or a copy of it


class Contents(NamedTuple):
    """What this rank writes.

    Attributes:
        tree: Nested as DCP flattens it: sources, tensors and values.
        group_names: Names of the parameters of each group.
        aliases: Other key -> key: tied weights, which are written once.
    """

    tree: dict[str, Any]
    group_names: list[list[str]]
    aliases: dict[str, str]


class Names:
    """Names of a module's parameters and buffers without the traces of wrappers; tied parameters have several."""

    def __init__(self, module: nn.Module) -> None:
        plain = self.plain = plain_names(module)
        self.of_param: dict[nn.Parameter, list[str]] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            self.of_param.setdefault(param, []).append(plain(name))
        self.others: dict[str, Tensor] = {}  # buffers
        self.extra_states: dict[str, Any] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if name.rpartition(".")[2] == "_extra_state" or not isinstance(value, Tensor):
                self.extra_states[plain(name)] = value
            elif value not in self.of_param:
                self.others[plain(name)] = value

    def first(self, param: nn.Parameter) -> str:
        """Return the name under which a parameter is written.

        Raises:
            ValueError: It is not in the module.
        """
        if param not in self.of_param:
            raise ValueError("a parameter of the optimizer is not in the module; pass the module that owns all of them")
        return self.of_param[param][0]

    def everything(self) -> dict[str, None]:
        """Return the names of all parameters, buffers and extra states, in order."""
        of_params = [name for of_param in self.of_param.values() for name in of_param]
        return dict.fromkeys([*of_params, *self.others, *self.extra_states])

    def first_of_tied(self) -> dict[str, str]:
        """Return the first name of every parameter by its other ones."""
        return {other: first for first, *rest in self.of_param.values() for other in rest}

    def of_groups(self, groups: Groups) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        return [[self.first(param) for param in group["params"]] for group in groups]


def holders(module: nn.Module) -> list[HeldState]:
    """Return the held states of all optimizers of the module's parameters."""
    found = {id(held): held for param in module.parameters() if (held := held_of(param)) is not None}
    return list(found.values())


class _Stored:
    """What this rank writes of one bucket: of the shard the part that it speaks for among replicas.

    Args:
        bucket: Whose memory is read.
        copy: Gives what is written for each tensor of it.
    """

    def __init__(self, bucket: Bucket, copy: Copy) -> None:
        self._bucket = bucket
        self._copy = copy
        self._tensors: dict[str, Tensor] = {}
        self.segments = {segment.slot: segment for segment in bucket.part_segments}

    def source(self, kind: str, position: int) -> Source | None:
        """Return a parameter's weights, or its state of a kind; None if this rank writes nothing of it."""
        bucket, segment = self._bucket, self.segments.get(position)
        if (kind != "weights" and getattr(bucket, kind) is None) or segment is None:
            return None
        for needed in self._needed(kind):
            self._tensor(needed)
        dtype = self._tensor("shard" if kind == "weights" else kind).dtype
        if (kind == "weights" and bucket.storage.is_split) or bucket.is_coded(kind):
            dtype = torch.float32
        return Source(bucket.views[position], segment, partial(self._read, kind, segment), dtype)

    def _needed(self, kind: str) -> list[str]:
        if kind == "weights":
            return ["shard", "low"] if self._bucket.storage.is_split else ["shard"]
        return [kind, f"{kind}_scale"] if self._bucket.is_coded(kind) else [kind]

    def _read(self, kind: str, segment: Segment) -> Tensor:
        first, *others = self._needed(kind)
        part = slice(segment.shard_start, segment.shard_start + segment.numel)
        numbers = self._tensor(first)[part]
        if not others:
            return numbers
        if kind == "weights":
            return join_masters(numbers, self._tensor("low")[part])
        return decode_blocks(numbers, self._tensor(others[0])[_blocks(part)])

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            own = self._bucket.part_range
            flat = getattr(self._bucket, name)[_blocks(own) if name in SCALE_NAMES else own]
            self._tensors[name] = self._copy((id(self._bucket), name), flat)
        return self._tensors[name]


def _blocks(part: slice) -> slice:
    """Return the blocks of 8-bit state in a range of elements that begins with one."""
    return slice(part.start // BLOCK_NUMEL, -(-part.stop // BLOCK_NUMEL))


class _Collector:
    """Builds the tree of what this rank writes."""

    def __init__(self, module: nn.Module, optimizer: AdamW, copy: Copy) -> None:
        self._module, self._optimizer, self._copy = module, optimizer, copy
        self._names = Names(module)
        self._ranks = optimizer.held.ranks
        self._slots = [slot for held in holders(module) for slot in held.slots if slot.param in self._names.of_param]
        buckets = dict.fromkeys(slot.bucket for slot in self._slots)
        self._stored = {bucket: _Stored(bucket, copy) for bucket in buckets}

    def contents(self, extra: Mapping[str, Any]) -> Contents:
        names = self._names
        group_names = names.of_groups(self._optimizer.param_groups)
        tree: dict[str, Any] = {
            "model": self._weights(),
            "optim": {"state": self._state()},
            "random": {str(self._ranks.rank): Value(random_states())},
        }
        averages = {key: each for key, each in extra.items() if isinstance(each, ExponentialMovingAverage)}
        tree["averages"] = {key: self._averages(key, average) for key, average in averages.items()}
        if self._ranks.rank == 0:
            for name, value in names.extra_states.items():
                is_tensor = isinstance(value, Tensor)
                tree["model"][name] = self._copy(name, value.detach()) if is_tensor else _safe(name, value)
            tree["optim"]["param_groups"] = [
                {key: _safe(f"option {key!r} of a group", group[key]) for key in group if key not in _NAMES_OF_GROUP}
                | {key: Value(of_group) for key in _NAMES_OF_GROUP if key in group}
                for group, of_group in zip(self._optimizer.param_groups, group_names, strict=True)
            ]
            tree["extra"] = {key: _safe(key, _state_of(key, each)) for key, each in extra.items()}
            tree["zero_shard"] = {"version": Value(FORMAT_VERSION)}
        aliases = {f"model.{other}": f"model.{first}" for other, first in names.first_of_tied().items()}
        return Contents({key: each for key, each in tree.items() if each}, group_names, aliases)

    def _weights(self) -> dict[str, Any]:
        weights: dict[str, Any] = {}
        for slot in self._slots:
            if slot.param.numel() == 0 and self._ranks.rank == 0:
                weights[self._names.first(slot.param)] = _empty_like(slot, slot.bucket.dtype)
            source = self._stored[slot.bucket].source("weights", slot.position)
            if source is not None:
                weights[self._names.first(slot.param)] = source
        # What lies in no bucket is the same on all ranks, which take turns; buffers are those of rank 0.
        bucketed = {slot.param: None for slot in self._slots}
        foreign = [param for param in self._names.of_param if param not in bucketed]
        for number, param in enumerate(foreign):
            if number % self._ranks.num_ranks == self._ranks.rank:
                weights[self._names.first(param)] = self._copy(self._names.first(param), param.detach())
        if self._ranks.rank == 0:
            weights |= {name: self._copy(name, each.detach()) for name, each in self._names.others.items()}
        return weights

    def _state(self) -> dict[str, dict[str, Any]]:
        state: dict[str, dict[str, Any]] = {}
        steps = self._optimizer.held.step_counts()
        for slot in self._optimizer.held.slots:
            if steps[slot.index] == 0:
                continue
            stored, entry = self._stored[slot.bucket], state.setdefault(self._names.first(slot.param), {})
            for kind in (*STATE_NAMES, *(() if slot.bucket.storage.is_split else ("low",))):
                source = stored.source(kind, slot.position)
                if source is not None:
                    entry[kind] = source
                elif slot.param.numel() == 0 and self._ranks.rank == 0 and getattr(slot.bucket, kind) is not None:
                    entry[kind] = _empty_like(slot, getattr(slot.bucket, kind).dtype)
            if slot.index % self._ranks.num_ranks == self._ranks.rank:
                entry["step"] = torch.tensor(steps[slot.index], dtype=torch.float32)
        return {name: entry for name, entry in state.items() if entry}

    def _averages(self, key: str, average: ExponentialMovingAverage) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for bucket, flat in average.shards():
            own = self._copy((id(bucket), "averages", key), flat[bucket.part_range])
            for segment in bucket.part_segments:
                part = own[segment.shard_start : segment.shard_start + segment.numel]
                name = self._names.first(bucket.params[segment.slot])
                found[name] = Source(bucket.views[segment.slot], segment, partial(_itself, part), part.dtype)
        return found


def _itself(part: Tensor) -> Tensor:
    return part


def _empty_like(slot: GradSlot, dtype: torch.dtype) -> Tensor:
    return torch.empty(slot.param.shape, dtype=dtype)


def collect(
    module: nn.Module, optimizer: AdamW, extra: Mapping[str, Any], copy: Copy = lambda _, tensor: tensor
) -> Contents:
    """Return what this rank writes of everything. Local; the sources read live memory unless ``copy`` copies it.

    Raises:
        ValueError: A parameter of the optimizer is not in the module.
        TypeError: An extra, or an option of a group, can't be loaded safely; by its key.
    """
    return _Collector(module, optimizer, copy).contents(extra)


def is_stateful(value: Any) -> bool:
    """Whether something is saved by its ``state_dict()`` and loaded by its ``load_state_dict()``."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _state_of(key: str, value: Any) -> Any:
    if isinstance(value, AdamW):
        raise TypeError(f"{key}: an extra is rank 0's, which has a part of this optimizer; save it under another path")
    if isinstance(value, ExponentialMovingAverage):
        return {"num_updates": value.num_updates}
    return value.state_dict() if is_stateful(value) else value


def _without_numpy(value: Any) -> Any:
    """Return numbers of NumPy's, which learning rates may have become, as those of Python, in containers, too."""
    if isinstance(value, numpy.generic):
        return value.item()
    if type(value) is dict:
        return {key: _without_numpy(each) for key, each in value.items()}
    return type(value)(map(_without_numpy, value)) if type(value) in (list, tuple) else value


def _safe(key: str, value: Any) -> Value:
    """Return a value that can be read back without running code.

    Raises:
        TypeError: It can't.
    """
    try:
        made = Value(_without_numpy(value))
        torch.load(io.BytesIO(made.content), weights_only=True)
    except Exception as error:  # pickling calls code of the user's
        raise TypeError(
            f"{key} can't be saved: {type(value).__name__} does not load with weights_only=True ({reason_of(error)}); "
            "pass numbers, strings, tensors and containers of them, or an object with state_dict()"
        ) from error
    return made
