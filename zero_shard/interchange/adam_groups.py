"""Parameter groups of other Adam optimizers, with every option of torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DEFAULTS = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "amsgrad": False,
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
_NO_SETTINGS = frozenset({"params", "param_names", "step", "bias_correction"})


def torch_group(saved: dict[str, Any], names: Sequence[str], label: str, notes: list[str]) -> dict[str, Any]:
    """Return a group with ``names`` as its parameters, torch's default for what it lacks, and what the user added.

    Args:
        label: Of the group, for messages.
        notes: What is dropped is added here.
    Raises:
        ValueError: It was trained by something that AdamW cannot go on with.
    """
    if not saved.get("bias_correction", True):
        raise ValueError(f"{label} was trained with bias_correction=False, which torch.optim.AdamW does not have")
    if saved.get("use_muon", False):
        raise ValueError(f"{label} was trained by Muon; expected Adam or AdamW")
    group = dict(_DEFAULTS)
    for key, value in saved.items():
        if key in _NO_SETTINGS:
            continue
        if isinstance(value, Tensor | bool | int | float | str | None) or _is_numbers(value):
            group[key] = value.clone() if isinstance(value, Tensor) else value
        elif key in _DEFAULTS:
            raise ValueError(f"{label} has {key}={value!r}, expected a number")
        else:
            notes.append(f"{label}: {key} is dropped, as its class is not loaded")
    if not group["decoupled_weight_decay"]:
        group["decoupled_weight_decay"] = True
        if group["weight_decay"]:
            notes.append(f"{label}: weight_decay={group['weight_decay']} was L2 as in torch.optim.Adam, is now AdamW's")
    group["params"] = list(names)
    return group


def names_by_number(groups: Sequence[dict[str, Any]], names: Sequence[str], path: Path, remedy: str) -> dict[Any, str]:
    """Return the name of each parameter of saved groups by its number.

    Args:
        groups: As an optimizer's state dict has them, parameters by number.
        names: In the order in which the optimizer got the parameters.
        path: Of the file, for the message.
        remedy: What to do if they are not one name for each.
    Raises:
        ValueError: They are not.
    """
    numbers = [number for group in groups for number in group["params"]]
    if len(names) != len(numbers) or len(set(names)) != len(names):
        raise ValueError(f"{path} has {len(numbers)} parameters, got {len(set(names))} different names; {remedy}")
    return dict(zip(numbers, names, strict=True))


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, bool | int | float | Tensor) for each in value)


def step_count(*found: Any) -> float | None:
    """Return the first step count that is there: a number, or a tensor of one element."""
    for each in found:
        if isinstance(each, torch.Tensor | int | float):
            return float(each)
    return None
