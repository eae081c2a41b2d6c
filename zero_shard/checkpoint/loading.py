"""Reading a checkpoint: everything is verified before anything live is touched, then read straight into place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

from zero_shard.adamw import AdamW
from zero_shard.averaging import ExponentialMovingAverage
from zero_shard.buffers import STATE_NAMES
from zero_shard.checkpoint.contents import Names, holders, is_stateful
from zero_shard.checkpoint.directory import MANIFEST
from zero_shard.checkpoint.index import Index
from zero_shard.checkpoint.opening import Source, opened, reader_of
from zero_shard.checkpoint.parts import LoadPlanner, Sink
from zero_shard.checkpoint.places import average_part, change, live_part, reset_low, there, write_masters
from zero_shard.checkpoint.random_states import set_random_states
from zero_shard.checkpoint.reader import Reader
from zero_shard.collectives import Agreements
from zero_shard.groups import check_amsgrad
from zero_shard.held_state import HeldState
from zero_shard.masters import note_weights
from zero_shard.number_formats import join_masters
from zero_shard.stages.slots import GradSlot
from zero_shard.state import clear_state


def load(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: AdamW | None = None,
    *,
    verify: bool = True,
    random_states: bool = True,
    **into: Any,
) -> dict[str, Any]:
    """Read a checkpoint of any stage and world size into model and optimizer. All ranks must call; blocks.

    Without an optimizer only weights and buffers are read, and a model that no zero_shard.AdamW trains needs no other
    rank. Reads what zero_shard, FSDP2 and others write with ``torch.distributed.checkpoint``, and the safetensors of
    pretrained models, which are weights alone. Each rank reads its own part, no code is run.

    Args:
        path: Of a checkpoint, or of a directory of checkpoints: the complete one that was written last is taken. Or of
            a safetensors file, or a directory with one, or with several and their index.
        verify: Compare every byte with the manifest first, each rank a share; False: names, shapes and lengths only.
        random_states: Let the random number generators go on as at the save, where this rank took part in it.
        into: Objects that were saved under these keys (a scheduler, an `ExponentialMovingAverage`), to be loaded into.
    Returns:
        The extras that were passed to `save`; of objects their state.
    Raises:
        FileNotFoundError: No complete checkpoint of this name, or a file of it is missing, by name.
        ValueError: A file is damaged, or the checkpoint is of another model; by name.
        RuntimeError: It failed on another rank, by number.
        In every case on all ranks, and weights, moments and step counts are as they were; but for a disk that fails
        after everything has been verified, or with ``verify=False``.
    """
    held = [optimizer.held] if optimizer is not None else holders(module)
    for each in held:
        each.check_in_charge()
    ranks = held[0].ranks if held else Agreements(None, None)
    label = f"loading {os.fspath(path)}"
    ranks.roll_call(label)
    with opened(Path(path), ranks, label) as source:
        with ranks.errors_on_all_ranks(label):
            if verify:
                source.verify(ranks.rank, ranks.num_ranks)
        with reader_of(source) as reader:
            with ranks.errors_on_all_ranks(label):
                job = _Job(module, optimizer, reader, source)
                job.check(into)
            with ranks.errors_on_all_ranks(label):
                job.set_extra_states()
            with ranks.errors_on_all_ranks(label):
                job.read()
            job.commit(random_states)
            with ranks.errors_on_all_ranks(label):
                return job.finish(into)


class _Job:
    """One load on this rank: checked, then read, then made visible."""

    def __init__(self, module: nn.Module, optimizer: AdamW | None, reader: Reader, source: Source) -> None:
        self._module, self._optimizer, self._reader = module, optimizer, reader
        self._names = Names(module)
        self._metadata: Metadata = reader.read_metadata()
        self._index = Index(self._metadata, reader, self._names.everything(), self._names.first_of_tied())
        if self._index.is_ours and not source.manifest["files"]:
            raise FileNotFoundError(f"{source.path / MANIFEST} is missing: the checkpoint is damaged")
        self._holders = holders(module)
        self._slots = [slot for held in self._holders for slot in held.slots if slot.param in self._names.of_param]
        self._own_buckets = set() if optimizer is None else set(optimizer.held.buckets)
        self._entries: dict[str, Any] = {}
        self._prepare: list[Callable[[], object]] = []  # before anything is read
        self._groups: list[dict[str, Any]] = []
        self._extras: dict[str, Any] = {}
        self._random: dict[str, Any] | None = None
        self._extra_states: list[tuple[Callable[[Any], None], Any]] = []  # of modules

    # ---- checks: nothing live is touched -------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def check(self, into: Mapping[str, Any]) -> None:
        """Find a place for everything.

        Raises:
            ValueError: The checkpoint is of another model, or something is missing.
            RuntimeError: The parameters belong to a later optimizer, or hold averages.
        """
        self._check_holders()
        if self._optimizer is not None:
            self._index.name_numbered(self._names.of_groups(self._optimizer.param_groups))
        keys = self._weight_keys()
        for slot in self._slots:
            if slot.param.numel():
                self._add_weights(slot, keys[slot.param])
        bucketed = {slot.param: None for slot in self._slots}
        for param, key in keys.items():
            if param not in bucketed and param.numel():
                self._add_plain(key, param.detach())
        for name, tensor in self._names.others.items():
            if name not in self._index.weights:
                raise ValueError(f"the checkpoint has no model.{name}; it was written for another model")
            if tensor.numel():
                self._add_plain(self._index.weights[name], tensor.detach())
        self._check_unexpected()
        self._add_extra_states()
        if self._optimizer is not None:
            self._add_state(self._optimizer)
        self._extras = {name: self._index.value(key) for name, key in self._index.extras.items()}
        for name, target in into.items():
            self._check_target(name, target)
        rank = 0 if self._optimizer is None else self._optimizer.held.ranks.rank
        self._random = self._index.random_states(rank) if self._optimizer is not None else None
        planner = LoadPlanner()
        planner.set_up_planner(self._entries, self._metadata, True)
        self._planner, self._plan = planner, planner.create_local_plan()
        self._reader.check(self._plan)

    def _check_holders(self) -> None:
        own = [] if self._optimizer is None else [self._optimizer.held]
        for held in (*own, *self._holders):
            held.check_in_charge()
            if held.is_lent:
                raise RuntimeError(
                    "the model holds averaged weights, and its own would come back over what is loaded; leave "
                    "ExponentialMovingAverage.applied() first"
                )
            held.take_back_replaced()

    def _weight_keys(self) -> dict[nn.Parameter, str]:
        found = {}
        for param, names in self._names.of_param.items():
            key = next((self._index.weights[name] for name in names if name in self._index.weights), None)
            if key is None and param.numel():
                raise ValueError(f"the checkpoint has no model.{names[0]}; it was written for another model")
            if key is not None:
                self._check_shape(key, param.shape)
                found[param] = key
        return found

    def _check_shape(self, key: str, expected: torch.Size) -> None:
        shape = self._index.shape_of(key)
        if shape != expected:
            found = "no tensor" if shape is None else f"shape {tuple(shape)}"
            raise ValueError(
                f"{key} has {found} in the checkpoint, expected shape {tuple(expected)}; it is of another model: build "
                "the one that was saved"
            )

    def _check_unexpected(self) -> None:
        known = self._names.everything()
        for name in self._index.weights:
            if name not in known:
                raise ValueError(
                    f"the checkpoint has model.{name}, which the model does not have; it is of another model"
                )

    def _add_extra_states(self) -> None:
        for prefix, each in self._module.named_modules():
            name = self._names.plain(f"{prefix}._extra_state" if prefix else "_extra_state")
            is_wrapper = type(each).set_extra_state is nn.Module.set_extra_state
            if name not in self._names.extra_states or is_wrapper:
                continue
            if name not in self._index.weights:
                raise ValueError(f"the checkpoint has no model.{name}; it was written for another model")
            self._extra_states.append((each.set_extra_state, self._index.value(self._index.weights[name])))

    def _check_target(self, name: str, target: Any) -> None:
        if name not in self._extras:
            raise ValueError(f"the checkpoint has no extra {name!r}; it has {sorted(self._extras)}")
        if isinstance(target, ExponentialMovingAverage):
            if not isinstance(self._extras[name], dict) or "num_updates" not in self._extras[name]:
                raise ValueError(f"{name}: the checkpoint has no averages of this name, but a value")
            self._add_averages(name, target)
        elif not is_stateful(target):
            raise TypeError(
                f"{name}: a {type(target).__name__} has no load_state_dict; use the value that load returns"
            )

    def _add_plain(self, key: str, tensor: Tensor) -> None:
        self._check_shape(key, tensor.shape)
        self._entries[key] = tensor

    # ---- weights -------------------------------------------------------------------------------------------

    def _add_weights(self, slot: GradSlot, key: str) -> None:
        bucket, position = slot.bucket, slot.position
        view, segment = bucket.views[position], bucket.segment_of.get(position)
        state = self._index.state.get(self._names.first(slot.param), {}) if self._optimizer is not None else {}
        low_key, storage = state.get("low"), bucket.storage
        if low_key is not None:
            self._check_shape(low_key, view.shape)
        if (
            not storage.is_split
            and self._index.dtype_of(key) == bucket.dtype
            and (low_key is None or self._index.dtype_of(low_key) == storage.low_dtype)
        ):
            self._entries[key] = Sink(view, segment, partial(bucket.local_part, bucket.shard, position))
            if low_key is not None:
                self._prepare.append(bucket.allocate_state)
                self._entries[low_key] = Sink(view, segment, lambda: bucket.local_part(there(bucket.low), position))
            elif self._optimizer is not None and bucket not in self._own_buckets and bucket.low is not None:
                # The checkpoint of one of several optimizers: equal weights keep what another's has brought.
                room = partial(torch.empty, 0 if segment is None else segment.numel, dtype=bucket.dtype)
                self._entries[key] = Sink(view, segment, partial(room, device=bucket.device), partial(change, slot))
            else:
                self._entries[key] = Sink(
                    view, segment, partial(bucket.local_part, bucket.shard, position), partial(reset_low, slot)
                )
            return
        if storage.low_dtype is not None and self._optimizer is not None:
            self._prepare.append(bucket.allocate_state)
        numel = 0 if segment is None else segment.numel
        weights: list[Tensor] = []
        if low_key is None:
            room = partial(torch.empty, numel, dtype=self._index.dtype_of(key), device=bucket.device)
            self._entries[key] = Sink(view, segment, room, partial(write_masters, slot))
            return
        room = partial(torch.empty, numel, dtype=self._index.dtype_of(key), device=bucket.device)
        self._entries[key] = Sink(view, segment, room, weights.append)
        room = partial(torch.empty, numel, dtype=self._index.dtype_of(low_key), device=bucket.device)
        self._entries[low_key] = Sink(
            view, segment, room, lambda low: write_masters(slot, join_masters(weights.pop(), low))
        )

    # ---- state ---------------------------------------------------------------------------------------------

    def _add_state(self, optimizer: AdamW) -> None:
        names, held = self._names, optimizer.held
        self._groups = self._index.groups(names.of_groups(optimizer.param_groups))
        check_amsgrad(self._groups, optimizer.config.state_dtype)
        present = {names.first(slot.param): slot for slot in held.slots}
        for name in self._index.state:
            if name not in present and self._index.steps_of(name) > 0:
                raise ValueError(
                    f"the checkpoint has optimizer state of {name}, which is frozen here or not in the optimizer; "
                    "unfreeze it first, or load without the optimizer"
                )
        self._steps = [self._index.steps_of(names.first(slot.param)) for slot in held.slots]
        for slot, steps in zip(held.slots, self._steps, strict=True):
            self._add_moments(slot, self._index.state.get(names.first(slot.param), {}) if steps > 0 else {})

    def _add_moments(self, slot: GradSlot, stored: Mapping[str, str]) -> None:
        bucket, position = slot.bucket, slot.position
        view, segment = bucket.views[position], bucket.segment_of.get(position)
        self._prepare.append(partial(clear_state, slot, dict.fromkeys((*stored, "low"))))
        for kind in STATE_NAMES:
            if kind not in stored:
                if kind != "max_exp_avg_sq" and stored and slot.param.numel():
                    raise ValueError(f"the checkpoint has no {kind} of {self._names.first(slot.param)}")
                continue
            if kind == "max_exp_avg_sq" and bucket.has_codes:
                continue
            key = stored[kind]
            self._check_shape(key, view.shape)
            self._prepare.insert(0, bucket.allocate_state)
            if kind == "max_exp_avg_sq":
                self._prepare.append(bucket.allocate_max_exp_avg_sq)
            if not slot.param.numel():
                continue
            if bucket.is_coded(kind):
                room = partial(torch.empty, 0 if segment is None else segment.numel, device=bucket.device)
                self._entries[key] = Sink(view, segment, room, partial(bucket.write_state, kind, position))
            else:
                self._entries[key] = Sink(view, segment, partial(live_part, slot, kind))

    def _add_averages(self, name: str, average: ExponentialMovingAverage) -> None:
        if average.optimizer is not self._optimizer:
            raise ValueError(f"{name} averages the parameters of another optimizer than the one that is loaded")
        keys = self._index.averages.get(name, {})
        for slot in average.optimizer.held.slots:
            key = keys.get(self._names.first(slot.param))
            is_averaged = slot.param.requires_grad and slot.param.numel() and self._extras[name]["num_updates"]
            if key is None and is_averaged:
                raise ValueError(f"the averages {name!r} of the checkpoint lack {self._names.first(slot.param)}")
            if key is not None and slot.param.numel():
                bucket, position = slot.bucket, slot.position
                self._check_shape(key, bucket.views[position].shape)
                self._prepare.append(partial(average.room, bucket))  # in one order on all ranks
                room = partial(average_part, average, slot)
                self._entries[key] = Sink(bucket.views[position], bucket.segment_of.get(position), room)

    # ---- reading -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def set_extra_states(self) -> None:
        """Hand modules what is theirs: first, as this is code of the user's, which may raise."""
        for set_extra_state, value in self._extra_states:
            set_extra_state(value)

    @torch.inference_mode(False)  # what it makes outlives the call
    @torch.no_grad()
    def read(self) -> None:
        """Read everything into place."""
        for held in self._holders:
            held.settle()
        for prepare in self._prepare:
            prepare()
        self._reader.read_data(self._planner.finish_plan(self._plan), self._planner).wait()

    @torch.inference_mode(False)
    @torch.no_grad()
    def commit(self, has_random_states: bool) -> None:
        """Make what was read visible. All ranks call."""
        for held in self._holders:
            if self._optimizer is not None and held is self._optimizer.held:
                held.load_groups(self._filled_groups(self._optimizer))
            _publish(held)
        if self._optimizer is not None:
            self._optimizer.held.set_step_counts(self._steps)
            if has_random_states and self._random is not None:
                set_random_states(self._random)

    def _filled_groups(self, optimizer: AdamW) -> list[dict[str, Any]]:
        return [
            {**{key: value for key, value in present.items() if key != "params"}, **loaded}
            for present, loaded in zip(optimizer.param_groups, self._groups, strict=True)
        ]

    def finish(self, into: Mapping[str, Any]) -> dict[str, Any]:
        """Load the user's objects, and return the extras."""
        for name, target in into.items():
            if isinstance(target, ExponentialMovingAverage):
                target.num_updates = self._extras[name]["num_updates"]
                if target.num_updates == 0:
                    target.load_state_dict({"num_updates": 0, "averages": {}})  # there may have been some before
            else:
                target.load_state_dict(self._extras[name])
        return self._extras


def _publish(held: HeldState) -> None:
    """Make shards that were written visible in the parameters. All ranks call."""
    held.before_publishing()
    params = []
    for bucket in held.buckets:
        held.publish(bucket)
        params += bucket.params
    held.finish_publishing()
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.graph.increment_version(params)
    for bucket in held.buckets:
        note_weights(bucket)
