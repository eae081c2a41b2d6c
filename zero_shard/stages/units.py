"""Stage 3: which parameters are gathered together, and around the forward of which modules."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zero_shard.module_names import plain_named_parameters

TRAINABLE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SMALLEST_UNIT_NBYTES = 1 << 20  # outside of stacks, modules below this stay with the rest of the model
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_STACKS = (nn.ModuleList, nn.Sequential)


@dataclass
class UnitPlan:
    """Parameters that are gathered as one.

    Attributes:
        name: Name of the first module, "" for the rest of the model.
        modules: The unit is whole while any of these runs its forward.
        params: Name and parameter, each parameter in exactly one unit.
    """

    name: str
    modules: list[nn.Module]
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)


def stays_whole(param: nn.Parameter) -> bool:
    """Whether a parameter is only carried along: frozen, of a dtype that is not trained (indices, codes)."""
    return not param.requires_grad and param.dtype not in TRAINABLE_DTYPES


def find_units(module: nn.Module, units: str | Sequence[str], unit_nbytes: int) -> list[UnitPlan]:
    """Assign every parameter of ``module`` that does not stay whole to one unit, in the order of the modules.

    Parameters used by several units (tied weights) form a unit of their own that is whole around each of them; what
    lies outside of all units is whole while ``module`` runs.

    Args:
        units: "auto" or class names of the modules to gather as one.
        unit_nbytes: "auto": a module outside of stacks that is larger is split into its children.
    Raises:
        ValueError: No module of the model has one of the class names.
    """
    roots = _auto_roots(module, unit_nbytes) if units == "auto" else _named_roots(module, units)
    owners: dict[nn.Parameter, tuple[str, list[nn.Module]]] = {}
    _find_owners(module, "", module, {id(root) for root in roots}, owners)
    plans: dict[tuple[int, ...], UnitPlan] = {}
    sharded = [(name, param) for name, param in plain_named_parameters(module) if not stays_whole(param)]
    owners = {param: (name, owners[param][1]) for name, param in sharded}
    names = {id(each): name for name, each in module.named_modules()}
    for param, (name, modules) in owners.items():
        if any(each is module for each in modules):
            modules = [module]  # whole all the time that any of the others runs
        key = tuple(id(each) for each in modules)
        plans.setdefault(key, UnitPlan(names[id(modules[0])], modules)).params.append((name, param))
    order = {id(each): number for number, each in enumerate(module.modules())}
    return sorted(plans.values(), key=lambda plan: order[id(plan.modules[0])])


def _find_owners(
    module: nn.Module,
    prefix: str,
    root: nn.Module,
    roots: set[int],
    owners: dict[nn.Parameter, tuple[str, list[nn.Module]]],
) -> None:
    if id(module) in roots:
        root = module
    for name, param in module._parameters.items():
        if param is not None:
            modules = owners.setdefault(param, (prefix + name, []))[1]
            if not any(each is root for each in modules):
                modules.append(root)
    for name, child in module.named_children():
        _find_owners(child, f"{prefix}{name}.", root, roots, owners)


def _named_roots(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    classes = {type(each).__name__ for each in module.modules()}
    for name in names:
        if name not in classes:
            close = difflib.get_close_matches(name, sorted(classes), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(sorted(classes))}"
            raise ValueError(f"units names the module class {name!r}, which the model does not contain{hint}")
    return [each for each in module.modules() if type(each).__name__ in names]


def _auto_roots(module: nn.Module, unit_nbytes: int) -> list[nn.Module]:
    roots: list[nn.Module] = []
    _visit(module, _nbytes(module), unit_nbytes, roots)
    return roots


def _visit(parent: nn.Module, total_nbytes: int, unit_nbytes: int, roots: list[nn.Module]) -> None:
    # A ModuleDict has no forward that could gather what its children share.
    is_stack = isinstance(parent, (*_STACKS, nn.ModuleDict))
    for child in parent.children():
        if _nbytes(child) == 0:
            continue
        is_trunk = not is_stack or 2 * _nbytes(child) > total_nbytes  # an element that is most of the model is no unit
        if isinstance(child, _CONTAINERS) or (is_trunk and _has_stack(child)):
            _visit(child, total_nbytes, unit_nbytes, roots)
        elif is_stack:
            roots.append(child)
        elif _nbytes(child) >= _SMALLEST_UNIT_NBYTES:
            if _is_one(child, unit_nbytes):
                roots.append(child)
            else:
                _visit(child, total_nbytes, unit_nbytes, roots)


def _is_one(module: nn.Module, unit_nbytes: int) -> bool:
    """Whether a module outside of stacks is not split into its children."""
    has_children = any(_nbytes(each) for each in module.children())
    return _nbytes(module) <= unit_nbytes or not has_children or isinstance(module, nn.MultiheadAttention)


def _has_stack(module: nn.Module) -> bool:
    return any(isinstance(each, _STACKS) and _nbytes(each) for each in module.modules())


def _nbytes(module: nn.Module) -> int:
    return sum(param.numel() * param.element_size() for param in module.parameters())
