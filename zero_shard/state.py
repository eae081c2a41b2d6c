"""Optimizer state as dicts: this rank's part, and the whole, as ``torch.optim.AdamW`` writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_shard.block_codec import decode_blocks
from zero_shard.buffers import SCALE_NAMES, STATE_NAMES, Bucket
from zero_shard.collectives import Communicator
from zero_shard.groups import Groups, number_params, pack_groups
from zero_shard.masters import trust_next_weights
from zero_shard.number_formats import split_remainder
from zero_shard.ops import Kernels
from zero_shard.stages.slots import GradSlot

LAYOUT_KEY = "zero_shard"
_PART_NAMES = (*STATE_NAMES, "low")


class LoadedState(NamedTuple):
    """Checked state of one parameter, not copied anywhere yet."""

    slot: GradSlot
    step: float
    parts: dict[str, Tensor]  # this rank's part of each tensor, 1-d


def layout_entry(slots: Sequence[GradSlot], groups: Groups, communicator: Communicator) -> dict[str, Any]:
    """Return which part of each parameter this rank owns: index -> (start, numel, numel of the whole)."""
    numbers = _numbers(groups)
    parts = {}
    for slot in slots:
        segment = slot.bucket.segment_of.get(slot.position)
        start, numel = (segment.param_start, segment.numel) if segment is not None else (0, 0)
        if id(slot.param) in numbers:
            parts[numbers[id(slot.param)]] = (start, numel, slot.bucket.layout.slots[slot.position].numel)
    return {"rank": communicator.rank, "world_size": communicator.num_ranks, "parts": parts}


def low_parts(slots: Sequence[GradSlot], groups: Groups) -> dict[int, Tensor]:
    """Return this rank's part of the masters' low halves by parameter number, for 16-bit parameters (aliases)."""
    numbers = _numbers(groups)
    return {
        numbers[id(slot.param)]: slot.bucket.local_view(slot.bucket.low, slot.position)
        for slot in slots
        if slot.bucket.low is not None and id(slot.param) in numbers
    }


def pack_state(
    state: Mapping[Any, Any], slots: Sequence[GradSlot], groups: Groups, communicator: Communicator
) -> dict[str, Any]:
    """Return the state dict of this rank's part: entries of ``state`` by number, groups, and which part it is."""
    numbers = number_params(groups)
    packed: dict[Any, Any] = {
        numbers.get(id(key)) if isinstance(key, Tensor) else key: entry for key, entry in state.items()
    }
    packed.pop(None, None)  # of parameters that have left their group
    for number, low in low_parts(slots, groups).items():
        if number in packed:
            packed[number] = {**packed[number], "low": low}
    layout = layout_entry(slots, groups, communicator)
    return {"state": packed, "param_groups": pack_groups(groups), LAYOUT_KEY: layout}


def check_state_dict(state_dict: dict[str, Any], slots: Sequence[GradSlot], groups: Groups) -> list[LoadedState]:
    """Match a state dict with the slots of this rank. Local; changes nothing.

    Args:
        state_dict: What `AdamW.state_dict` of the same layout gave, or a full dict of plain AdamW or of NVIDIA apex's
            FusedAdam and DistributedFusedAdam (step counts beside the parameters; fp32 masters as ``param``).
    Raises:
        ValueError: An entry is missing or has the wrong shape, or the layout differs; the text names it.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"the state dict has no {key!r}; expected what an optimizer's state_dict() returns")
    saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    sizes = [len(group["params"]) for group in groups]
    if saved_sizes != sizes:
        raise ValueError(f"the state dict has groups of {saved_sizes} parameters, the optimizer has {sizes}")
    by_param = {id(slot.param): slot for slot in slots}
    layout = state_dict.get(LAYOUT_KEY)
    loaded = []
    saved_numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    steps = {n: group.get("step") for group in state_dict["param_groups"] for n in group["params"]}
    if not all(group.get("bias_correction", True) for group in state_dict["param_groups"]):
        raise ValueError("the state dict was written with bias_correction=False, which torch.optim.AdamW does not have")
    params = [param for group in groups for param in group["params"]]
    for number, param in zip(saved_numbers, params, strict=True):
        slot = by_param.get(id(param))
        entry = state_dict["state"].get(number)
        if entry and slot is not None:
            entry = _with_step(entry, steps[number], state_dict["state"])
            loaded.append(_check_entry(slot, number, entry, layout))
        elif entry:
            raise ValueError(
                f"the state dict has state for parameter {number}, which is frozen here; unfreeze it first"
            )
    return loaded


def _with_step(entry: dict[str, Any], group_step: Any, state: dict[Any, Any]) -> dict[str, Any]:
    """Return a parameter's entry with its step count, which apex keeps by group or once for all."""
    step = entry.get("step", state.get("step") if group_step is None else group_step)
    return entry if step is None else {**entry, "step": step}


def _check_entry(slot: GradSlot, number: int, entry: dict[str, Any], layout: Any) -> LoadedState:
    bucket, position = slot.bucket, slot.position
    segment = bucket.segment_of.get(position)
    numel = 0 if segment is None else segment.numel
    for name in ("step", "exp_avg", "exp_avg_sq"):
        if name not in entry:
            raise ValueError(f"the state of parameter {number} ({slot.name}) has no {name!r}")
    if layout is not None:
        start = 0 if segment is None else segment.param_start
        expected = (start, numel, bucket.layout.slots[position].numel)
        found = tuple(layout["parts"].get(number, ()))
        if found != expected:
            raise ValueError(
                f"the state dict holds elements {found[:2]} (start, count) of parameter {number} ({slot.name}), this "
                f"rank owns {expected[:2]}; it was written with another stage, world size or config. Use "
                "full_state_dict() or zero_shard.save, which load anywhere"
            )
    parts = {}
    for name in _PART_NAMES:
        if name not in entry:
            continue
        value = entry[name]
        if value.dtype in (torch.int8, torch.uint8) and (layout is None or f"{name}_scale" not in entry):
            raise ValueError(
                f"{name} of parameter {number} ({slot.name}) has 8-bit codes, and the state dict has lost its "
                f"{LAYOUT_KEY!r} entry or their scales; load it as state_dict() returned it"
            )
        if layout is not None:
            part = value.reshape(-1) if value.is_contiguous() else _in_memory_order(value, value.stride())
            scale = entry.get(f"{name}_scale")
            parts[name] = part if scale is None else decode_blocks(part, scale)
            continue
        parts[name] = _own_part(slot, number, name, value)
    if "low" not in parts and "param" in entry and bucket.storage.low_dtype is not None:
        parts["low"] = _low_of(slot, _own_part(slot, number, "param", entry["param"]))
    return LoadedState(slot, float(entry["step"]), parts)


def _own_part(slot: GradSlot, number: int, name: str, value: Tensor) -> Tensor:
    """Return this rank's part, 1-d in memory order, of a tensor that belongs to the whole parameter."""
    view, segment = slot.bucket.views[slot.position], slot.bucket.segment_of.get(slot.position)
    if value.shape != view.shape:
        raise ValueError(
            f"{name} of parameter {number} ({slot.name}) has shape {tuple(value.shape)}, expected {tuple(view.shape)}"
        )
    whole = _in_memory_order(value, view.stride())
    return whole[:0] if segment is None else whole[segment.param_start : segment.param_start + segment.numel]


def _low_of(slot: GradSlot, master: Tensor) -> Tensor:
    """Return what an fp32 master has beyond the 16-bit weight, 0 where it belongs to another weight."""
    master = master.to(device=slot.bucket.device, dtype=torch.float32)
    if slot.bucket.storage.low_dtype != torch.int16:
        return master
    high, remainder = split_remainder(master)
    weight = slot.bucket.local_part(slot.bucket.shard, slot.position)
    return remainder.masked_fill_(high.view(torch.int16) != weight.view(torch.int16), 0)


def copy_state(loaded: Sequence[LoadedState], slots: Sequence[GradSlot], steps: Tensor) -> None:
    """Copy checked state into the buckets; parameters without an entry start anew. Local.

    The state may alias the buckets: an optimizer may load its own state dict.
    """
    steps.zero_()
    for state in loaded:
        bucket = state.slot.bucket
        bucket.allocate_state()
        if "max_exp_avg_sq" in state.parts and not bucket.has_codes:
            bucket.allocate_max_exp_avg_sq()
    found = {state.slot.index: state.parts for state in loaded}
    for slot in slots:
        clear_state(slot, found.get(slot.index, {}))
    for state in loaded:
        steps[state.slot.index] = state.step
        for name, part in state.parts.items():
            if getattr(state.slot.bucket, name) is not None and part.numel():
                state.slot.bucket.write_state(name, state.slot.position, part)
                if name == "low":
                    trust_next_weights(state.slot.bucket)


def write_entry(slot: GradSlot, changed: Mapping[str, Any], is_new: bool) -> float | None:
    """Copy what the user has put into a parameter's entry of ``optimizer.state`` into its bucket. Local.

    Args:
        changed: Values by name, of the shape of the parameter or of this rank's part; other names are left alone.
        is_new: The parameter had no state, and must be given all of it.
    Returns:
        The step count, if it is among them.
    Raises:
        ValueError: A value of another shape; a new entry lacks one.
    """
    bucket, position = slot.bucket, slot.position
    for name in ("step", "exp_avg", "exp_avg_sq") if is_new else ():
        if name not in changed:
            raise ValueError(f"optimizer.state of {slot.name} has no {name!r}; give all of it, or remove the entry")
    bucket.allocate_state()
    if "max_exp_avg_sq" in changed and not bucket.has_codes:
        bucket.allocate_max_exp_avg_sq()
    for name in (*STATE_NAMES, *SCALE_NAMES):
        target = bucket.state_part(name, position)
        if name not in changed or target is None:
            continue
        value = torch.as_tensor(changed[name])
        if name in SCALE_NAMES or (bucket.is_coded(name) and value.dtype == target.dtype):
            target.copy_(value.reshape(-1))
        elif value.shape == target.shape and target.numel() < bucket.views[position].numel():
            bucket.write_state(name, position, value)
        else:
            bucket.write_state(name, position, _own_part(slot, slot.index, name, value))
    return float(changed["step"]) if "step" in changed else None


def clear_state(slot: GradSlot, keep: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Zero this rank's part of the moments and of the master's low half, but for those named in ``keep``. Local."""
    for name in (*_PART_NAMES, *SCALE_NAMES):
        part = slot.bucket.state_part(name, slot.position)
        if name == "low" and slot.bucket.storage.is_split:
            continue  # it belongs to the weight
        if part is not None and name.removesuffix("_scale") not in keep:
            part.zero_()


def full_state(
    slots: Sequence[GradSlot],
    buckets: Sequence[Bucket],
    groups: Groups,
    steps: Tensor,
    kernels: Kernels,
    communicator: Communicator,
) -> dict[int, dict[str, Tensor]]:
    """Return the whole state by parameter number, on the CPU of rank 0, {} elsewhere. All ranks call.

    Communicates one bucket at a time.
    """
    numbers, counts = _numbers(groups), steps.tolist()
    state: dict[int, dict[str, Tensor]] = {}
    for bucket in buckets:
        members = slots[bucket.slots.start : bucket.slots.stop]
        wanted = [s for s in members if counts[s.index] > 0 and id(s.param) in numbers]
        if not wanted:
            continue
        for slot in wanted:
            state[numbers[id(slot.param)]] = {"step": torch.tensor(counts[slot.index], dtype=torch.float32)}
        for name in STATE_NAMES:
            shard = bucket.read_state(name)
            if shard is None:
                continue
            full = shard.new_empty(bucket.layout.numel)
            full[bucket.own_range] = shard
            label = f"{name} of {bucket.label}"
            communicator.all_gather_(communicator.shards, full, 3 * bucket.index + 2, label).wait()
            if communicator.rank != 0:
                continue
            wholes = [torch.empty_like(bucket.views[slot.position], dtype=full.dtype, device="cpu") for slot in wanted]
            ordered = [bucket.in_memory_order(slot.position, each) for slot, each in zip(wanted, wholes, strict=True)]
            offsets = [bucket.layout.slots[slot.position].offset for slot in wanted]
            kernels.unflatten_(ordered, full.cpu(), offsets, None)
            for slot, whole in zip(wanted, wholes, strict=True):
                state[numbers[id(slot.param)]][name] = whole
    return dict(sorted(state.items())) if communicator.rank == 0 else {}


def _in_memory_order(value: Tensor, stride: Sequence[int]) -> Tensor:
    """Return the elements, 1-d, as a tensor of these (dense) strides has them in memory."""
    copy = torch.empty_strided(value.shape, tuple(stride), dtype=value.dtype, device=value.device).copy_(value)
    return copy.as_strided((value.numel(),), (1,))


def _numbers(groups: Groups) -> dict[int, int]:
    """Number parameters by group, as torch does."""
    return {id(param): number for number, param in enumerate(p for group in groups for p in group["params"])}
