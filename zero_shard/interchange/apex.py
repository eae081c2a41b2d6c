"""Reads optimizer states of NVIDIA apex: DistributedFusedAdam's second format, and FusedAdam's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_shard.interchange.adam_groups import names_by_number, step_count, torch_group
from zero_shard.interchange.imported import Imported, lazy
from zero_shard.interchange.inert_pickle import check_archive

_MOMENTS = ("exp_avg", "exp_avg_sq")


def read_apex(path: str | Path, names: Sequence[str] | None = None) -> Imported:
    """Read a file of torch.save with an apex optimizer's state dict, alone or in a dict beside the model's. Local.

    DistributedFusedAdam's dict has the whole float32 master of every parameter, which becomes its weight; FusedAdam's
    has none, so the weights are those of the model's dict. Memory is that of the pickle: tensors are mapped.

    Args:
        names: Of the parameters, in the order in which the optimizer got them (apex numbers them so); not needed where
            the optimizer was built from named parameters.
    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, is of DistributedFusedAdam's first format, or does not fit ``names``.
    """
    path = Path(path)
    optimizer, model, notes = _find_dicts(path, _load(path))
    imported = Imported(notes=notes)
    groups = optimizer["param_groups"]
    ordered = list(names) if names is not None else [name for group in groups for name in group.get("param_names", ())]
    remedy = "pass names= in the order in which the optimizer got the parameters"
    name_of = names_by_number(groups, ordered, path, remedy)
    for index, group in enumerate(groups):
        own = [name_of[number] for number in group["params"]]
        imported.param_groups.append(torch_group(group, own, f"{path}: group {index}", imported.notes))
        for number in group["params"]:
            entry = optimizer["state"].get(number, {})
            step = step_count(entry.get("step"), group.get("step"), optimizer["state"].get("step"))
            _add_parameter(imported, name_of[number], entry, step, model, path)
    for name, value in model.items():
        imported.tensors.setdefault(f"model.{name}", lazy(value))
    if not model:
        imported.notes.append("the file has no state dict of the model: frozen parameters and buffers are not in it")
    return imported


def _load(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; expected a file of torch.save")
    try:
        check_archive(path, verify=True)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read with weights_only=True: {type(error).__name__}: {error}. It is damaged, or holds "
            "more than tensors, numbers and text; save only the state dicts of model and optimizer"
        ) from error


def _find_dicts(path: Path, found: Any) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Return the optimizer's dict, the model's (empty where there is none), and what is left out."""
    parts = {"": found} if _is_optimizer(found) else dict(found) if isinstance(found, dict) else {}
    if "gathered_states" in parts or any(isinstance(e, dict) and "gathered_states" in e for e in parts.values()):
        raise ValueError(f"{path} is of DistributedFusedAdam's first format; write it with state_dict_format=2")
    optimizers = [key for key, value in parts.items() if _is_optimizer(value)]
    models = [key for key, value in parts.items() if _is_model(value)]
    if len(optimizers) != 1 or len(models) > 1:
        raise ValueError(
            f"{path} has {len(optimizers)} state dicts of optimizers and {len(models)} of models, expected one and at "
            "most one; save them into a file of their own"
        )
    optimizer = parts[optimizers[0]]
    if optimizer.get("format", 2) != 2 or "buckets" in optimizer["state"]:
        raise ValueError(f"{path} is of DistributedFusedAdam's first format; write it with state_dict_format=2")
    others = sorted(str(key) for key in parts if key not in (*optimizers, *models))
    notes = [f"dropped: {', '.join(others)}; pass what you need to zero_shard.save"] if others else []
    return optimizer, parts[models[0]] if models else {}, notes


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("state"), dict) and "param_groups" in value


def _is_model(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(each, Tensor) for each in value.values())


def _add_parameter(
    imported: Imported, name: str, entry: dict[str, Any], step: float | None, model: dict[str, Tensor], path: Path
) -> None:
    weight = entry.get("param", model.get(name))
    if weight is None:
        raise ValueError(
            f"{path} has no weight of {name}: neither a float32 master nor an entry in a state dict of the model; save "
            "both state dicts in one file, and check names="
        )
    for kind, value in {"model": model.get(name), **{kind: entry.get(kind) for kind in _MOMENTS}}.items():
        if value is not None and value.shape != weight.shape:
            raise ValueError(
                f"{path}: {kind} of {name} has shape {tuple(value.shape)}, expected {tuple(weight.shape)}; check the "
                "order of names="
            )
    imported.tensors[f"model.{name}"] = lazy(weight)
    if not any(kind in entry for kind in _MOMENTS) or step == 0:
        return
    missing = [kind for kind in _MOMENTS if kind not in entry] + ["step"] * (step is None)
    if missing:
        raise ValueError(f"{path} has no {' and no '.join(missing)} of {name}; apex's Adam did not write it")
    for kind in _MOMENTS:
        imported.tensors[f"optim.state.{name}.{kind}"] = lazy(entry[kind])
    imported.add_step(name, float(step or 0))
