"""Compare ranks before the first collective that could hang or mix them up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zero_shard.collectives import Communicator
from zero_shard.config import ZeroConfig


def build_on_all_ranks(communicator: Communicator, build: Callable[[], dict[str, str]]) -> None:
    """Run ``build`` and compare what it returns over the ranks. All ranks call; blocks.

    Args:
        build: Validates the input of this rank without communicating; returns facts by name.
    Raises:
        Whatever ``build`` raised here. RuntimeError: Another rank failed. ValueError: Ranks differ; the text names the
        first fact that differs, and each rank's value.
    """
    with communicator.errors_on_all_ranks("the building of zero_shard.AdamW"):
        facts = build()
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    if len(set(communicator.gather_objects(digest, "the comparison of ranks at the start"))) > 1:
        _raise_difference(communicator.gather_objects(facts, "the comparison of ranks in detail"))


def _raise_difference(facts_of: Sequence[dict[str, str]]) -> None:
    names = dict.fromkeys(name for facts in facts_of for name in facts)
    # A parameter that only a later rank has says more than the size of its group.
    for name in sorted(names, key=lambda name: not name.startswith(("config", "parameter "))):
        values = [facts.get(name, "missing") for facts in facts_of]
        if len(set(values)) > 1:
            shown = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:8]))
            raise ValueError(f"ranks differ in {name}: {shown}. All ranks must build the same model, groups and config")
    raise ValueError("ranks differ in the order of their parameters. All ranks must build the same model")


def facts_of(
    config: ZeroConfig, named_params: Sequence[tuple[str, nn.Parameter]], groups: Sequence[dict[str, Any]]
) -> dict[str, str]:
    """Return by name what must be equal on all ranks that build an optimizer."""
    facts = {"config.check": repr(config.check)}
    if config.check == "off":
        return facts
    facts |= {f"config.{name}": repr(value) for name, value in vars(config).items()}
    facts |= {f"parameter {name}": describe_param(param) for name, param in named_params}
    facts |= {f"param_groups[{number}]": describe_group(group) for number, group in enumerate(groups)}
    facts["the order of parameters"] = ", ".join(name for name, _ in named_params)
    return facts


def facts_of_group(group: dict[str, Any]) -> dict[str, str]:
    """Return by name what must be equal on all ranks that add a parameter group."""
    facts = {"the added group": describe_group(group)}
    return facts | {f"parameter {number}": describe_param(param) for number, param in enumerate(group["params"])}


def describe_param(param: nn.Parameter) -> str:
    """Return what must be equal on all ranks about a parameter."""
    kind = "trainable" if param.requires_grad else "frozen"
    return f"{tuple(param.shape)} {str(param.dtype).removeprefix('torch.')} strides {tuple(param.stride())} {kind}"


def describe_group(group: dict[str, Any]) -> str:
    """Return what must be equal on all ranks about a parameter group."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return f"{len(group['params'])} parameters, {sorted(options.items(), key=lambda item: item[0])}"
