"""Checkpoints: an ordinary directory of torch.distributed.checkpoint (DCP) with true-shaped tensors.

Keys are ``model.<name>``, ``optim.state.<name>.exp_avg`` and so on; groups, step counts and the user's extras are in
``zero_shard.pt``. Every rank writes the rectangles of its own shards, so stage, bucket size and world size leave no
trace. The directory appears under its name only when all of it has been written.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from zero_shard.adamw import AdamW
from zero_shard.buffers import STATE_NAMES, Bucket
from zero_shard.construction import check_amsgrad
from zero_shard.groups import pack_groups
from zero_shard.masters import master_part, note_weights
from zero_shard.module_names import plain_named_parameters, plain_names
from zero_shard.number_formats import split_masters_
from zero_shard.stages.slots import GradSlot

_FACTS = "zero_shard.pt"
_SHARD_NAMES = (*STATE_NAMES, "low")


class Rectangle(NamedTuple):
    """A box of an n-d tensor that is one run of its memory."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # of the run, in elements from the start of the tensor's memory


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    """Cut the elements [start, stop) of a row-major tensor into boxes: part of a first row, whole rows, part of a last.

    For n dimensions at most 2 n - 1 boxes.
    """
    if start >= stop:
        return
    if not shape:
        yield Rectangle((), (), start)
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # all within one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, min(first * inner, stop))
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Rectangle((first, *zeros), (last - first, *shape[1:]), first * inner)
    yield from _in_row(shape, last, max(last * inner, start), stop)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Rectangle]:
    base = row * math.prod(shape[1:])
    for box in rectangles(shape[1:], start - base, stop - base):
        yield Rectangle((row, *box.offsets), (1, *box.sizes), base + box.start)


class ShardedEntry:
    """This rank's part of one tensor, as DCP wants it: boxes of the true shape, without communication.

    Args:
        part: Gives the part, 1-d in memory order: an alias, or (to be written) decoded when it is asked for.
        dtype: Of the part.
        bucket: The bucket it belongs to.
        position: The parameter's place in the bucket.
    """

    def __init__(self, part: Callable[[], Tensor], dtype: torch.dtype, bucket: Bucket, position: int) -> None:
        view, segment = bucket.views[position], bucket.segment_of.get(position)
        self._shape, self._dtype, self._part = view.shape, dtype, part
        self._boxes: list[tuple[ChunkStorageMetadata, Rectangle]] = []
        self._place: list[int] = []
        if segment is None:
            return
        strides = view.stride()
        # In memory the dimensions lie in the order of their strides, which need not be that of the shape.
        order = sorted(range(view.dim()), key=lambda dim: (-strides[dim], view.shape[dim] == 1, dim))
        place = self._place = sorted(range(view.dim()), key=order.__getitem__)
        lengths = tuple(view.shape[dim] for dim in order)
        for box in rectangles(lengths, segment.param_start, segment.param_start + segment.numel):
            offsets, sizes = (torch.Size(each[dim] for dim in place) for each in (box.offsets, box.sizes))
            own = box._replace(start=box.start - segment.param_start)
            self._boxes.append((ChunkStorageMetadata(offsets, sizes), own))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes to be read."""
        return [chunk for chunk, _ in self._boxes]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Return the boxes to be written."""
        properties = TensorProperties(dtype=self._dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._shape),
            )
            for chunk, _ in self._boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the box at an offset."""
        box = next(box for chunk, box in self._boxes if chunk.offsets == index.offset)
        return self._part()[box.start : box.start + math.prod(box.sizes)].view(box.sizes).permute(self._place)


def _entry_of(flat: Tensor, bucket: Bucket, position: int) -> ShardedEntry:
    """Return the entry of one parameter in a shard-sized tensor."""
    return ShardedEntry(partial(bucket.local_part, flat, position), flat.dtype, bucket, position)


class _SavePlanner(DefaultSavePlanner):
    """Finds the boxes of sharded entries, which are no tensors."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        entry = self.state_dict[index.fqn]
        return entry.__get_tensor_shard__(index) if isinstance(entry, ShardedEntry) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    """Finds the boxes of sharded entries, which are no tensors."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default replaces every value that it does not know by None.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        entry = self.state_dict[index.fqn]
        return entry.__get_tensor_shard__(index) if isinstance(entry, ShardedEntry) else super().lookup_tensor(index)


def save(path: str | os.PathLike[str], module: nn.Module, optimizer: AdamW, **extra: Any) -> None:
    """Write a checkpoint that loads at any stage and world size. All ranks must call; blocks.

    Args:
        path: Directory; an older checkpoint of this name is replaced when the new one is complete.
        extra: Anything that ``torch.load(weights_only=True)`` reads; rank 0's is kept.
    Raises:
        RuntimeError: Writing failed on some rank, on all ranks; what stood at ``path`` before is untouched.
    """
    held, target = optimizer.held, Path(path)
    held.check_in_charge()
    held.take_back_replaced()
    temporary = target.with_name(target.name + ".incomplete")
    entries: dict[str, Any] = dict(_sharded_entries(module, optimizer))
    with held.ranks.errors_on_all_ranks(f"saving {target}"):
        if held.ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            entries |= {f"model.{name}": tensor.detach() for name, tensor in _plain_tensors(module, optimizer)}
            torch.save(_facts(module, optimizer) | {"extra": extra}, temporary / _FACTS)
    with _quiet_alone(optimizer):
        dcp_save(entries, checkpoint_id=temporary, planner=_SavePlanner(), **_group(optimizer))
    with held.ranks.errors_on_all_ranks(f"saving {target}"):
        if held.ranks.rank == 0:
            _replace(temporary, target)


def load(path: str | os.PathLike[str], module: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    """Read a checkpoint of any stage and world size into model and optimizer. All ranks must call; blocks.

    Returns:
        The extras that were passed to `save`.
    Raises:
        FileNotFoundError: No complete checkpoint of this name.
        ValueError: A tensor is missing or has another shape; nothing has been changed then.
    """
    held, source = optimizer.held, Path(path)
    held.check_in_charge()
    with held.ranks.errors_on_all_ranks(f"loading {source}"):
        if not (source / _FACTS).is_file():
            raise FileNotFoundError(f"no complete checkpoint at {os.fspath(source)!r}")
        facts = torch.load(source / _FACTS, weights_only=True)
        if facts["group_names"] != _group_names(module, optimizer):
            raise ValueError(
                f"the checkpoint's groups hold {facts['group_names']}, expected {_group_names(module, optimizer)}; "
                "build the optimizer with the same groups in the same order"
            )
        check_amsgrad(facts["param_groups"], optimizer.config.state_dtype)
        stored = FileSystemReader(source).read_metadata().state_dict_metadata
        plain = {name: torch.empty_like(tensor) for name, tensor in _plain_tensors(module, optimizer)}
        targets = _make_targets(module, optimizer, stored)
        entries: dict[str, Any] = {key: entry for target in targets for key, entry in target.entries.items()}
        entries |= {f"model.{name}": tensor for name, tensor in plain.items()}
        _check_stored(entries, stored)
    with _quiet_alone(optimizer):
        dcp_load(entries, checkpoint_id=source, planner=_LoadPlanner(), **_group(optimizer))
    _commit(module, optimizer, targets, plain, facts)
    return dict(facts["extra"])


class _Target(NamedTuple):
    """New shards of one bucket that a checkpoint is read into before anything live is touched."""

    bucket: Bucket
    shards: dict[str, Tensor]  # "shard" and the names of state -> [n]
    entries: dict[str, ShardedEntry]
    rests: list[int]  # positions of 16-bit weights with a ``low`` in the checkpoint


def _named_slots(module: nn.Module, optimizer: AdamW) -> Iterator[tuple[str, GradSlot]]:
    names = {param: name for name, param in plain_named_parameters(module)}
    for slot in optimizer.held.slots:
        if slot.param not in names:
            raise ValueError(f"{slot.name} is in the optimizer but not in the module; pass the module that owns it")
        yield names[slot.param], slot


def _sharded_entries(module: nn.Module, optimizer: AdamW) -> Iterator[tuple[str, ShardedEntry]]:
    steps = optimizer.held.step_counts()
    for name, slot in _named_slots(module, optimizer):
        bucket, position = slot.bucket, slot.position
        if optimizer.held.ranks.replicas.rank == 0:
            if bucket.storage.is_split:
                master = partial(master_part, bucket, position)
                yield f"model.{name}", ShardedEntry(master, torch.float32, bucket, position)
            else:
                yield f"model.{name}", _entry_of(bucket.shard, bucket, position)
            for kind in _SHARD_NAMES if steps[slot.index] > 0 else ():
                flat = getattr(bucket, kind)
                if kind == "low" and bucket.storage.is_split:
                    continue
                if flat is not None and bucket.is_coded(kind):
                    part = partial(bucket.read_part, kind, position)
                    yield f"optim.state.{name}.{kind}", ShardedEntry(part, torch.float32, bucket, position)
                elif flat is not None:
                    yield f"optim.state.{name}.{kind}", _entry_of(flat, bucket, position)


def _plain_tensors(module: nn.Module, optimizer: AdamW) -> Iterator[tuple[str, Tensor]]:
    """Yield what lies in no bucket: frozen or foreign parameters, and the buffers of the state dict."""
    bucketed = {id(slot.param) for slot in optimizer.held.slots}
    for name, param in plain_named_parameters(module):
        if id(param) not in bucketed:
            yield name, param
    params, plain = {id(param) for param in module.parameters()}, plain_names(module)
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in params:
            yield plain(name), value


def _facts(module: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    steps, plain = optimizer.held.step_counts(), plain_names(module)
    return {
        "param_groups": pack_groups(optimizer.param_groups),
        "group_names": _group_names(module, optimizer),
        "extra_states": {
            plain(name): value
            for name, value in module.state_dict(keep_vars=True).items()
            if not isinstance(value, Tensor)
        },
        "steps": {name: steps[slot.index] for name, slot in _named_slots(module, optimizer)},
    }


def _group_names(module: nn.Module, optimizer: AdamW) -> list[list[str]]:
    names = {param: name for name, param in plain_named_parameters(module)}
    return [[names.get(param, "?") for param in group["params"]] for group in optimizer.param_groups]


def _make_targets(module: nn.Module, optimizer: AdamW, stored: dict[str, Any]) -> list[_Target]:
    targets: dict[int, _Target] = {}
    for name, slot in _named_slots(module, optimizer):
        bucket = slot.bucket
        if bucket.index not in targets:
            # Float32 weights of the checkpoint become masters, without loss.
            dtype = bucket.dtype if bucket.storage.low_dtype is None else torch.float32
            targets[bucket.index] = _Target(bucket, {"shard": torch.zeros_like(bucket.shard, dtype=dtype)}, {}, [])
        target = targets[bucket.index]
        target.entries[f"model.{name}"] = _entry_of(target.shards["shard"], bucket, slot.position)
        for kind in _SHARD_NAMES:
            key = f"optim.state.{name}.{kind}"
            if key not in stored:
                continue
            if kind not in target.shards:
                dtype = stored[key].properties.dtype
                target.shards[kind] = torch.zeros(bucket.layout.shard_numel, dtype=dtype, device=bucket.device)
            if kind == "low":
                target.rests.append(slot.position)
            target.entries[key] = _entry_of(target.shards[kind], bucket, slot.position)
    return list(targets.values())


def _check_stored(entries: dict[str, Any], stored: dict[str, Any]) -> None:
    for key, entry in entries.items():
        found = stored.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"the checkpoint has no {key}; it was written for another model")
        expected = entry._shape if isinstance(entry, ShardedEntry) else entry.shape
        if found.size != expected:
            raise ValueError(f"{key} has shape {tuple(found.size)} in the checkpoint, expected {tuple(expected)}")


@torch.no_grad()
def _commit(
    module: nn.Module, optimizer: AdamW, targets: list[_Target], plain: dict[str, Tensor], facts: dict[str, Any]
) -> None:
    """Move what was read into the live model and optimizer. All ranks call."""
    for name, tensor in _plain_tensors(module, optimizer):
        tensor.copy_(plain[name])
    plain_name = plain_names(module)
    for name, each in module.named_modules():
        key = plain_name(f"{name}._extra_state" if name else "_extra_state")
        if key in facts["extra_states"]:
            each.set_extra_state(facts["extra_states"][key])
    optimizer.held.load_groups(facts["param_groups"])
    for bucket, shards, _, rests in targets:
        weights = shards.pop("shard")
        if shards:
            bucket.allocate_state()
        if bucket.low is None:
            bucket.shard.copy_(weights)
        else:
            split_masters_(weights, bucket.shard, bucket.low)
            note_weights(bucket)
        if "max_exp_avg_sq" in shards and not bucket.has_codes:
            bucket.allocate_max_exp_avg_sq()
        for kind in _SHARD_NAMES:
            live = getattr(bucket, kind)
            if live is not None and kind in shards and bucket.is_coded(kind):
                for position in bucket.segment_of:
                    bucket.write_state(kind, position, bucket.local_part(shards[kind], position))
            elif live is not None and kind in shards and kind != "low":
                live.copy_(shards[kind])
            elif live is not None and kind in shards:
                for position in rests if live.dtype == shards[kind].dtype else ():
                    bucket.write_state(kind, position, bucket.local_part(shards[kind], position))
            elif live is not None and kind != "low":
                live.zero_()
                if bucket.is_coded(kind):
                    getattr(bucket, f"{kind}_scale").zero_()
        optimizer.held.publish(bucket)
    optimizer.held.finish_publishing()
    steps = [float(facts["steps"].get(name, 0.0)) for name, _ in _named_slots(module, optimizer)]
    optimizer.held.set_step_counts(steps)


def _replace(temporary: Path, target: Path) -> None:
    """Give a complete directory its name; an older one of that name disappears last."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _quiet_alone(optimizer: AdamW) -> Iterator[None]:
    """Silence DCP's remark that there is only one process, where that is so."""
    with warnings.catch_warnings():
        if optimizer.held.ranks.num_ranks == 1:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _group(optimizer: AdamW) -> dict[str, Any]:
    ranks = optimizer.held.ranks
    return {"no_dist": True} if ranks.num_ranks == 1 else {"process_group": ranks.control}
