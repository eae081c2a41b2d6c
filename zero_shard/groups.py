"""Parameter groups: what is refused in them, and how state dicts have them, with numbers for parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

Groups = Sequence[dict[str, Any]]

_APEX_KEYS = ("bias_correction", "step")


def number_params(groups: Groups) -> dict[int, int]:
    """Return the number of each parameter by its id; one that comes twice has its first."""
    numbers: dict[int, int] = {}
    for number, param in enumerate(p for group in groups for p in group["params"]):
        numbers.setdefault(id(param), number)
    return numbers


def pack_groups(groups: Groups) -> list[dict[str, Any]]:
    """Return the groups with numbers in place of parameters; the settings are aliases."""
    numbers = number_params(groups)
    packed = []
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        packed.append({**settings, "params": [numbers[id(param)] for param in group["params"]]})
    return packed


def unpack_groups(saved: Groups, present: Groups) -> list[dict[str, Any]]:
    """Return copies of saved groups with the parameters of the present ones, and their names unless some were saved.

    Those of NVIDIA apex have a step count and not all of the settings; the rest stay as they are.
    """
    groups = []
    for old, new in zip(copy.deepcopy(list(saved)), present, strict=True):
        settings = {key: value for key, value in old.items() if key not in _APEX_KEYS}
        if len(settings) < len(old):
            settings = {**new, **settings}
        if "param_names" in new:
            settings.setdefault("param_names", new["param_names"])
        groups.append({**settings, "params": new["params"]})
    return groups


def check_settings(groups: Sequence[dict[str, Any]], state_dtype: torch.dtype) -> None:
    """Refuse settings that the update does not know, whenever they come. Local."""
    for number, group in enumerate(groups):
        if not group.get("decoupled_weight_decay", True) or group.get("differentiable"):
            name, remedy = "differentiable=True", "torch.optim.AdamW"
            if not group.get("decoupled_weight_decay", True):
                name, remedy = "decoupled_weight_decay=False", "torch.optim.Adam, or weight_decay=0 here"
            raise NotImplementedError(f"{name} (param_groups[{number}]) is not available; use {remedy}")
    check_amsgrad(groups, state_dtype)


def check_amsgrad(groups: Sequence[dict[str, Any]], state_dtype: torch.dtype) -> None:
    """Refuse amsgrad, which may be switched on at any time, where moments have 8 bits. Local."""
    if state_dtype == torch.int8 and any(group.get("amsgrad") for group in groups):
        raise NotImplementedError(
            "amsgrad is not available with state_dtype='int8'; use state_dtype='bfloat16', or amsgrad=False"
        )
