"""Reads plain files of torch.save: a state dict of a model, alone or beside that of its torch.optim.AdamW or Adam."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_shard.interchange.adam_groups import names_by_number, step_count, torch_group
from zero_shard.interchange.imported import Imported, lazy
from zero_shard.interchange.inert_pickle import check_archive

MODEL_FILE, OPTIMIZER_FILE = "model.pt", "optimizer.pt"
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim")
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def read_torch(path: str | Path, names: Sequence[str] | None = None) -> Imported:
    """Read a model's state dict, and the optimizer's beside it. Local.

    Memory is that of the pickle: tensors are mapped from the file.

    Args:
        path: A file with a bare state dict, or with those of "model" and "optimizer"; or a directory with model.pt and
            optimizer.pt.
        names: Of the parameters, in the order in which the optimizer got them. Not needed where the file has
            "param_names", nor where all parameters are in one group in the order of the model.
    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, holds something else, or does not say which parameter has which number.
    """
    path = Path(path)
    found = load_torch(path)
    model, optimizer = _model_of(path, found), optimizer_of(found)
    imported = Imported()
    others = sorted(str(key) for key, each in found.items() if each is not model and each is not optimizer)
    if model is not found and others:
        imported.notes.append(f"dropped: {', '.join(others)}; pass what you need to zero_shard.save")
    first: dict[Any, str] = {}
    for name, value in model.items():
        if not isinstance(value, Tensor):
            imported.notes.append(f"{name} is dropped: it is no tensor")
            continue
        place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
        known = first.setdefault(place, name) if value.numel() else name
        if known != name:
            imported.aliases[name] = known
        else:
            imported.tensors[f"model.{name}"] = lazy(value)
    if optimizer is not None:
        _add_optimizer(imported, optimizer, names, path)
    return imported


def load_torch(path: Path) -> dict[str, Any]:
    """Return what a file holds, or both files of a directory, without running code.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or holds more than tensors, numbers, text and containers.
    """
    if path.is_dir():
        found = {"model": load_torch(path / MODEL_FILE)}
        if (path / OPTIMIZER_FILE).exists():
            found["optimizer"] = load_torch(path / OPTIMIZER_FILE)
        return found
    if not path.is_file():
        state = "is no file" if path.exists() else "is missing"
        raise FileNotFoundError(f"{path} {state}; expected a file of torch.save")
    try:
        check_archive(path, verify=True)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read with weights_only=True: {type(error).__name__}: {error}. It is damaged, or holds "
            "more than tensors, numbers and text; save only the state dicts of model and optimizer"
        ) from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, expected a state dict")
    return loaded


def optimizer_of(found: dict[str, Any]) -> dict[str, Any] | None:
    """Return the optimizer's state dict, None if there is none."""
    for each in (found, *(found.get(key) for key in _OPTIMIZER_KEYS)):
        if isinstance(each, dict) and isinstance(each.get("state"), dict) and "param_groups" in each:
            return each
    return None


def _model_of(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    for each in (*(found.get(key) for key in _MODEL_KEYS), found):
        if isinstance(each, dict) and each and any(isinstance(value, Tensor) for value in each.values()):
            return each
    raise ValueError(f"{path} has no state dict of a model; expected one alone, or under {', '.join(_MODEL_KEYS)}")


def _add_optimizer(imported: Imported, optimizer: dict[str, Any], names: Sequence[str] | None, path: Path) -> None:
    groups = optimizer["param_groups"]
    ordered = list(names) if names is not None else _names_in(optimizer) or _names_by_order(imported, len(groups))
    remedy = (
        "give the names in the order in which the optimizer got them (--names), or build it from named_parameters()"
    )
    name_of = names_by_number(groups, ordered, path, remedy)
    for index, group in enumerate(groups):
        own = [name_of[number] for number in group["params"]]
        imported.param_groups.append(torch_group(group, own, f"{path}: group {index}", imported.notes))
    for number, name in name_of.items():
        weight, entry = imported.tensors.get(f"model.{name}"), optimizer["state"].get(number, {})
        if weight is None:
            raise ValueError(f"{path} has optimizer state of {name} and no weight; check the names")
        moments = {kind: entry[kind] for kind in _MOMENTS if kind in entry}
        for kind, value in moments.items():
            if value.shape != weight.shape:
                raise ValueError(
                    f"{path}: {kind} of {name} has shape {tuple(value.shape)}, expected {tuple(weight.shape)}; give "
                    "the names in the order in which the optimizer got them (--names)"
                )
            imported.tensors[f"optim.state.{name}.{kind}"] = lazy(value)
        step = step_count(entry.get("step"))
        if moments and (step is None or not {"exp_avg", "exp_avg_sq"} <= moments.keys()):
            raise ValueError(f"{path} has no step, exp_avg and exp_avg_sq of {name}; no Adam wrote it")
        if moments and step is not None:
            imported.add_step(name, step)


def _names_in(optimizer: dict[str, Any]) -> list[str]:
    of_groups = optimizer.get("param_names") or [group.get("param_names", ()) for group in optimizer["param_groups"]]
    return [name for names in of_groups for name in names]


def _names_by_order(imported: Imported, num_groups: int) -> list[str]:
    """Return the names of a model's parameters in their order; with several groups it says nothing."""
    if num_groups != 1:
        return []
    imported.notes.append("parameters are numbered as the model's state dict has them: the file has no names")
    weights = [key.removeprefix("model.") for key in imported.tensors]
    return [name for name in weights if name.rpartition(".")[2] not in _BUFFERS]
