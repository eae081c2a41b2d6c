"""Parameter groups as state dicts have them: parameters by number, in the order of the groups, as torch counts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

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
