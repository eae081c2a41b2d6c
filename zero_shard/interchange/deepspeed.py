"""Reads a checkpoint directory of DeepSpeed ZeRO 1, 2 or 3 without DeepSpeed, and without running code from it.

    stages 1, 2: every parameter group is one flat float32 vector, cut into equal ranges by rank

        group 0   | a a a a b b | b b b . . . |      . padding at the end, which may or may not be stored
                    rank 0        rank 1

    stage 3: every rank has, in one flat vector for each sub-group, its equal range of every parameter

        sub-group 0, rank 0   | a a a b b |     sub-group 0, rank 1   | a a . b . |

The moments lie as the weights do. Names and shapes, in the order of the vectors, are in the file of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from zero_shard.interchange.adam_groups import step_count, torch_group
from zero_shard.interchange.deepspeed_files import RankFile, load_ranks, tag_directory
from zero_shard.interchange.imported import Imported, lazy, lazy_parts
from zero_shard.interchange.inert_pickle import load_inert

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_MODEL_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler "
    "data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size "
    "mp_world_size checkpoint_parallel_dimensions universal_checkpoint_info ds_config ds_version".split()
)


class _Slice(NamedTuple):
    rank: int
    start: int
    stop: int


@dataclass
class _Vector:
    """One flat vector: all ranks' parts of the weights, and of the optimizer's state beside them."""

    masters: list[Tensor]  # by rank, 1-d
    states: list[dict[str, Any]]  # by rank
    shapes: dict[str, Sequence[int]]  # by name, in order
    paddings: Sequence[int]  # after each parameter
    group: int
    label: str


def read_deepspeed(path: str | Path, tag: str | None = None, verify: bool = True) -> Imported:
    """Read what DeepSpeed's ``save_checkpoint`` wrote under ZeRO 1, 2 or 3, at any number of ranks. Local.

    Memory is that of the pickles: tensors are mapped from the files, and each is read by its `LazyTensor.read`. Float32
    masters become the weights; frozen parameters and buffers stay as they are.

    Args:
        path: The directory with ``latest``, or one of its ``global_stepN``.
        tag: Which of them; default is what ``latest`` says.
        verify: Compare the checksum of every tensor in the files, which reads all of them once.
    Raises:
        FileNotFoundError: A file is missing, a rank's for instance; the text names it.
        ValueError: A file is damaged or does not fit the others, or holds what has no counterpart here (mixture of
            experts, tensor and pipeline parallelism, optimizers other than Adam); the text names it.
    """
    directory = tag_directory(Path(path), tag)
    ranks = load_ranks(directory, verify)
    stage = ranks[0].stage
    models = _load_models(directory, stage, len(ranks), verify)
    try:
        return _assemble(directory, ranks, models, stage)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"{directory} is not laid out as DeepSpeed does it ({type(error).__name__}: {error}); expected the files "
            "of one save_checkpoint under ZeRO 1 to 3"
        ) from error


def _assemble(directory: Path, ranks: list[RankFile], models: list[dict[str, Any]], stage: int) -> Imported:
    imported = Imported()
    vectors = _zero3_vectors(ranks, models[0]) if stage == 3 else _zero12_vectors(ranks, models[0])
    groups = _saved_groups(ranks[0], models[0], imported.notes)
    for vector in vectors:
        _add_vector(imported, vector, stage, groups)
    _add_groups(imported, vectors, groups)
    _add_untrained(imported, models, directory, stage)
    _add_notes(imported, models[0], ranks[0].state)
    return imported


def _load_models(directory: Path, stage: int, num_ranks: int, verify: bool) -> list[dict[str, Any]]:
    """Return the files of the model: one, or at stage 3 one of each rank."""
    name = "mp_rank_00_model_states.pt"
    names = [f"zero_pp_rank_{rank}_{name}" for rank in range(num_ranks)] if stage == 3 else [name]
    models = [load_inert(directory / each, verify) for each in names]
    for model, each in zip(models, names, strict=True):
        if not isinstance(model, dict) or not isinstance(model.get("module"), dict) or not model.get("param_shapes"):
            raise ValueError(f"{directory / each} has no param_shapes and module; ZeRO 1 to 3 did not write it")
    return models


def _zero12_vectors(ranks: list[RankFile], model: dict[str, Any]) -> list[_Vector]:
    shapes = model["param_shapes"]
    paddings = ranks[0].state.get("param_alignment_paddings") or [[0] * len(each) for each in shapes]
    masters = [_flat_tensors(rank, "single_partition_of_fp32_groups", len(shapes)) for rank in ranks]
    return [
        _Vector(
            masters=[each[number] for each in masters],
            states=[_state_of(rank, "base_optimizer_state", number) for rank in ranks],
            shapes=shapes[number],
            paddings=paddings[number],
            group=number,
            label=f"group {number}",
        )
        for number in range(len(shapes))
    ]


def _zero3_vectors(ranks: list[RankFile], model: dict[str, Any]) -> list[_Vector]:
    shapes = model["param_shapes"]
    masters = [_flat_tensors(rank, "fp32_flat_groups", len(shapes)) for rank in ranks]
    members = [group["params"] for group in ranks[0].state["optimizer_state_dict"]["param_groups"]]
    owners = {number: group for group, numbers in enumerate(members) for number in numbers}
    if sorted(owners) != list(range(len(shapes))):
        raise ValueError(f"{ranks[0].path} has {len(owners)} sub-groups in its groups, {len(shapes)} in its shapes")
    return [
        _Vector(
            masters=[each[number] for each in masters],
            states=[_state_of(rank, "optimizer_state_dict", number) for rank in ranks],
            shapes=shapes[number],
            paddings=[0] * len(shapes[number]),
            group=owners[number],
            label=f"sub-group {number}",
        )
        for number in range(len(shapes))
    ]


def _flat_tensors(rank: RankFile, key: str, count: int) -> list[Tensor]:
    found = rank.state.get(key)
    if not isinstance(found, list) or len(found) != count or not all(isinstance(each, Tensor) for each in found):
        raise ValueError(
            f"{rank.path} has no {key} for the {count} groups of the model's file; they do not belong together"
        )
    return [each.reshape(-1) for each in found]


def _state_of(rank: RankFile, key: str, number: int) -> dict[str, Any]:
    """Return the optimizer's state of one flat vector; elastic checkpoints have a list of them."""
    base = rank.state[key]
    found = base[number] if isinstance(base, list) else base["state"].get(number, {})
    return {**found, "path": rank.path}


def _saved_groups(rank: RankFile, model: dict[str, Any], notes: list[str]) -> list[dict[str, Any]]:
    base = rank.state["optimizer_state_dict" if rank.stage == 3 else "base_optimizer_state"]
    if isinstance(base, dict):
        return list(base["param_groups"])
    config = model.get("ds_config")
    config = config if isinstance(config, dict) else {}
    settings = config.get("optimizer") or {}
    notes.append("an elastic checkpoint has no settings of the groups; they are those of its ds_config, or torch's")
    step = rank.state.get("base_optimizer_state_step")
    return [{**(settings.get("params") or {}), "step": step} for _ in base]


def _add_vector(imported: Imported, vector: _Vector, stage: int, groups: list[dict[str, Any]]) -> None:
    """Cut one flat vector into parameters."""
    _check_lengths(vector, stage)
    kinds = _moments_of(vector)
    count = _steps_of(vector, groups[vector.group]) if kinds else None
    for name, shape, slices in _places(vector, stage):
        parts = [vector.masters[each.rank][each.start : each.stop] for each in slices]
        imported.tensors[f"model.{name}"] = lazy_parts(shape, parts)
        for kind in kinds:
            parts = [vector.states[each.rank][kind].reshape(-1)[each.start : each.stop] for each in slices]
            imported.tensors[f"optim.state.{name}.{kind}"] = lazy_parts(shape, parts)
        if count is not None:
            imported.add_step(name, count)


def _places(vector: _Vector, stage: int) -> Iterator[tuple[str, Sequence[int], list[_Slice]]]:
    """Yield for each parameter where it lies on the ranks, without padding."""
    lengths, offset = [each.numel() for each in vector.masters], 0
    for (name, shape), padding in zip(vector.shapes.items(), vector.paddings, strict=True):
        numel = math.prod(shape)
        if stage == 3:
            part = -(-numel // len(lengths))
            own = [max(0, min(part, numel - rank * part)) for rank in range(len(lengths))]
            slices = [_Slice(rank, offset, offset + each) for rank, each in enumerate(own)]
            offset += part
        else:
            slices = _across(lengths, offset, offset + numel)
            offset += numel + padding
        yield name, shape, slices


def _across(lengths: list[int], start: int, stop: int) -> list[_Slice]:
    """Return where the elements [start, stop) lie in vectors that follow each other; at least one slice."""
    slices, first = [], 0
    for rank, length in enumerate(lengths):
        low, high = max(start - first, 0), min(stop - first, length)
        if low < high:
            slices.append(_Slice(rank, low, high))
        first += length
    return slices or [_Slice(0, 0, 0)]


def _check_lengths(vector: _Vector, stage: int) -> None:
    """Refuse vectors that are too short or too long for the parameters, of weights or of moments."""
    lengths, num_ranks = [each.numel() for each in vector.masters], len(vector.masters)
    numels = [math.prod(shape) for shape in vector.shapes.values()]
    if stage == 3:
        expected = sum(-(-numel // num_ranks) for numel in numels)
        wrong = [rank for rank, length in enumerate(lengths) if length != expected]
        found, wanted = lengths[wrong[0]] if wrong else 0, f"{expected}"
    else:
        expected = sum(numels) + sum(vector.paddings)
        wrong = [] if expected <= sum(lengths) < expected + 2 * num_ranks else [0]
        found, wanted = sum(lengths), f"{expected} on all ranks"
    if wrong:
        path = vector.states[wrong[0]]["path"]
        raise ValueError(
            f"{path}: {vector.label} has {found} elements, its parameters need {wanted}; the files do not belong "
            "together, or the weights were offloaded to NVMe"
        )


def _moments_of(vector: _Vector) -> list[str]:
    """Return the moments that are there; none before the first step."""
    kinds = [kind for kind in _MOMENTS if isinstance(vector.states[0].get(kind), Tensor)]
    for master, state in zip(vector.masters, vector.states, strict=True):
        present = [key for key in state if key not in ("path", "step")]
        if [kind for kind in _MOMENTS if isinstance(state.get(kind), Tensor)] != kinds or (present and len(kinds) < 2):
            raise ValueError(
                f"{state['path']}: {vector.label} has state {present}, expected exp_avg and exp_avg_sq of Adam"
            )
        for kind in kinds:
            if state[kind].numel() < master.numel():
                raise ValueError(
                    f"{state['path']}: {kind} of {vector.label} has {state[kind].numel()} elements, its weights have "
                    f"{master.numel()}; copy it again from where the checkpoint was written"
                )
    return kinds


def _steps_of(vector: _Vector, group: dict[str, Any]) -> float:
    """Return the step count of a vector, which all ranks must agree on: else their files are of different saves."""
    counts = [step_count(state.get("step"), group.get("step")) for state in vector.states]
    for state, count in zip(vector.states, counts, strict=True):
        if count is None or count != counts[0]:
            raise ValueError(
                f"{state['path']}: {vector.label} has taken {count} steps, on rank 0 {counts[0]}; "
                "the files were not written by one save"
            )
    return float(counts[0] or 0)


def _add_groups(imported: Imported, vectors: list[_Vector], groups: list[dict[str, Any]]) -> None:
    for number, group in enumerate(groups):
        names = [name for vector in vectors if vector.group == number for name in vector.shapes]
        imported.param_groups.append(torch_group(group, names, f"group {number}", imported.notes))


def _add_untrained(imported: Imported, models: list[dict[str, Any]], directory: Path, stage: int) -> None:
    """Add frozen and empty parameters, and buffers."""
    model, shared = models[0], models[0].get("shared_params") or {}
    frozen, buffers = model.get("frozen_param_shapes") or {}, set(model.get("buffer_names") or ())
    for name, value in model["module"].items():
        key = f"model.{name}"
        if not isinstance(value, Tensor):
            imported.notes.append(f"{name} of the module's state dict is dropped, as it is no tensor")
        elif key in imported.tensors or (stage == 3 and name not in buffers):
            continue  # 16-bit copies of the masters; at stage 3 nothing but a placeholder
        elif name not in shared or not value.numel():
            imported.tensors[key] = lazy(value)
    for name, shape in frozen.items() if stage == 3 else ():
        parts = [each["frozen_param_fragments"][name].reshape(-1) for each in models]
        lengths, numel = [part.numel() for part in parts], math.prod(shape)
        if sum(lengths) < numel:
            raise ValueError(f"{directory}: {name} has {sum(lengths)} elements on all ranks, expected {numel}")
        pieces = [parts[each.rank][each.start : each.stop] for each in _across(lengths, 0, numel)]
        imported.tensors[f"model.{name}"] = lazy_parts(shape, pieces)
    imported.aliases |= {name: first for name, first in shared.items() if f"model.{name}" not in imported.tensors}


def _add_notes(imported: Imported, model: dict[str, Any], state: dict[str, Any]) -> None:
    client = sorted(str(key) for key in model if key not in _MODEL_KEYS)
    if client:
        imported.notes.append(f"client state is dropped: {', '.join(client)}; pass what you need to zero_shard.save")
    for key in ("lr_scheduler", "data_sampler", "random_ltd"):
        if model.get(key):
            imported.notes.append(f"the state of {key} is dropped")
    if state.get("dynamic_loss_scale"):
        imported.notes.append("the loss scale is dropped: GradScaler finds its own")
    counters = [f"{key}={model[key]}" for key in ("global_steps", "global_samples", "skipped_steps") if key in model]
    imported.notes.append(f"counters are dropped: {', '.join(counters)}")
    grouped = {name for group in imported.param_groups for name in group["params"]}
    names = set(model.get("frozen_param_shapes") or {}) - grouped
    if names:
        imported.notes.append(f"frozen or empty, so in no group: {', '.join(sorted(names))}")
