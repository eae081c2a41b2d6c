"""Stage 3: which units are found in a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from zero_shard.stages.units import UnitPlan, find_units


def _linear(numel: int = 64) -> nn.Module:
    return nn.Linear(numel, 1, bias=False)


class _Stack(nn.Module):
    """A model as most are: something before, blocks, something after."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm = nn.Embedding(5, 8), blocks, nn.LayerNorm(8)


class _Branches(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def _units(model: nn.Module, units: str | Sequence[str] = "auto", unit_nbytes: int = 1 << 30) -> dict[str, list[str]]:
    plans: list[UnitPlan] = find_units(model, units, unit_nbytes)
    return {plan.name: [name for name, _ in plan.params] for plan in plans}


def test_units_are_the_elements_of_a_module_list() -> None:
    found = _units(_Stack(nn.ModuleList(_mlp() for _ in range(3))))
    assert list(found) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert found["blocks.1"] == ["blocks.1.0.weight", "blocks.1.0.bias", "blocks.1.2.weight", "blocks.1.2.bias"]
    assert found[""] == ["embed.weight", "norm.weight", "norm.bias"]


def test_units_are_the_elements_of_a_sequential() -> None:
    found = _units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert list(found) == ["0", "2"]
    assert list(_units(_Stack(nn.Sequential(_linear(), _linear())))) == ["", "blocks.0", "blocks.1"]


def test_units_of_two_stacks_are_found_in_the_order_of_the_modules() -> None:
    model = _Branches(_Stack(nn.ModuleList([_mlp(), _mlp()])), _Stack(nn.ModuleList([_mlp()])))
    assert [name for name in _units(model) if name] == ["left.blocks.0", "left.blocks.1", "right.blocks.0"]


def test_units_outside_of_stacks_are_found_by_size() -> None:
    big = _linear(1 << 19)  # 2 MiB
    found = _units(_Branches(big, _linear()))
    assert found == {"": ["right.weight"], "left": ["left.weight"]}
    assert list(_units(_Branches(_Branches(big, _linear(1 << 19)), _linear()), unit_nbytes=3 << 20)) == [
        "",
        "left.left",
        "left.right",
    ]


def test_units_are_found_by_class_name() -> None:
    model = _Stack(nn.ModuleList(_mlp() for _ in range(2)))
    assert list(_units(model, ["Sequential"])) == ["", "blocks.0", "blocks.1"]
    assert list(_units(model, ["Linear"])) == ["", "blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]
    assert list(_units(model, ["Embedding", "Sequential"])) == ["", "embed", "blocks.0", "blocks.1"]
    with pytest.raises(ValueError, match=r"'Lniear'.*did you mean 'Linear'"):
        find_units(model, ["Lniear"], 1)


def test_a_module_in_two_places_is_one_unit() -> None:
    shared = _linear()
    found = _units(nn.Sequential(shared, _linear(), shared))
    assert found == {"0": ["0.weight"], "1": ["1.weight"]}


def test_a_weight_tied_across_units_is_a_unit_whole_around_both() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    plans = find_units(nn.Sequential(first, nn.Tanh(), second), "auto", 1)
    assert [[name for name, _ in plan.params] for plan in plans] == [["0.bias"], ["0.weight"], ["2.bias"]] or [
        sorted(name for name, _ in plan.params) for plan in plans
    ] == [["0.weight"], ["0.bias"], ["2.bias"]]
    tied = next(plan for plan in plans if plan.params[0][0] == "0.weight")
    assert [id(module) for module in tied.modules] == [id(first), id(second)]


@pytest.mark.parametrize("units", ["auto", ["Linear"], ["Sequential", "Linear"]], ids=str)
def test_every_parameter_is_in_exactly_one_unit(units: Any) -> None:
    inner = _Stack(nn.ModuleList([_mlp(), nn.Sequential(_mlp(), _mlp())]))
    model = _Branches(inner, nn.MultiheadAttention(8, 2))
    model.left.norm.weight = model.right.in_proj_bias  # type: ignore[assignment]
    params = [param for plan in find_units(model, units, 1 << 20) for _, param in plan.params]
    assert len({id(param) for param in params}) == len(params)
    assert {id(param) for param in params} == {id(param) for param in model.parameters()}
