"""Plan a run before it: memory, traffic and time of each configuration, from the real code on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zero_shard.adamw import AdamW
from zero_shard.config import load_config
from zero_shard.planning.links import Link, Links, fit_links
from zero_shard.planning.models import build_by_name, build_of_numbers
from zero_shard.planning.result import LARGEST_WORLD, Machine, Plan, Row, Times
from zero_shard.rehearsal import Skeleton, optimizer_maker, rehearse

STAGES = (0, 1, 2, 3)


def plan(
    model: nn.Module | Callable[[], nn.Module] | str,
    configs: Any = None,
    *,
    world_size: int,
    ranks_per_node: int = 8,
    memory_gib: float = 80.0,
    backend: str = "nccl",
    name: str = "",
    **machine: Any,
) -> Plan:
    """Return what each configuration would hold, send and take. Local: no process group is needed, no memory taken.

    A few steps of the real optimizer run on the meta device under a fake process group. The model's own forward does
    not run: a walk through its modules takes its place, so that no input is needed and activations are not included.

    Args:
        model: The model (any device; not changed), a function that builds it (called with the meta device as default),
            or "llama-3-8b", "llama-3-70b", "llama-3-405b" in bfloat16.
        configs: What ``AdamW`` takes as ``config``, or a list of that; None = stages 0 to 3.
        world_size: Ranks.
        ranks_per_node: Consecutive ranks that share a node; at most ``world_size``.
        memory_gib: Of one GPU.
        backend: "nccl" or "gloo": whose collectives.
        name: Of the model, for the table.
        machine: More fields of ``planning.Machine``: links, reserve, activations_gib, tokens, flops_per_s, ...
    Raises:
        ValueError, TypeError: A bad argument or config; the text names it.

    Example:
        >>> print(zero_shard.plan("llama-3-8b", world_size=8).table())
    """
    described = _machine(world_size, ranks_per_node, memory_gib, machine)
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"backend must be 'nccl' or 'gloo', got {backend!r}")
    loaded = [load_config(each) for each in _as_list(configs)]
    for config in loaded:
        if not isinstance(config.stage, int):
            raise ValueError(f"a plan needs the stages to compare, got stage={config.stage!r}; leave configs out")
        if config.shard_size is not None and world_size % config.shard_size:
            raise ValueError(f"shard_size must divide the {world_size} ranks, got {config.shard_size}")
    built = _build(model)
    lazy = next((key for key, each in built.named_parameters() if nn.parameter.is_lazy(each)), None)
    if lazy is not None:
        raise ValueError(f"{lazy} has no shape yet; give a model of plain modules, or one that has run a batch")
    num_params = sum(param.numel() for param in built.parameters())
    if num_params == 0:
        raise ValueError("the model has no parameters to plan for")
    rows = []
    for config in loaded:
        maker = optimizer_maker(AdamW, config)
        rehearsal = rehearse(
            maker, Skeleton(built), world_size, backend == "nccl", ranks_per_node=described.ranks_per_node
        )
        rows.append(Row(rehearsal, described, num_params))
    title = name or (model if isinstance(model, str) else type(built).__name__)
    return Plan(title, num_params, described, tuple(rows))


def _machine(world_size: int, ranks_per_node: int, memory_gib: float, more: Mapping[str, Any]) -> Machine:
    for key, value in (("world_size", world_size), ("ranks_per_node", ranks_per_node)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} must be an integer of at least 1, got {value!r}")
    if world_size > LARGEST_WORLD:
        raise ValueError(f"world_size must be at most {LARGEST_WORLD}, got {world_size}")
    ranks_per_node = min(ranks_per_node, world_size)
    if world_size % ranks_per_node:
        raise ValueError(f"ranks_per_node must divide the {world_size} ranks, got {ranks_per_node}")
    machine = Machine(world_size, ranks_per_node, memory_gib, **more)
    if not 0 < memory_gib < math.inf:
        raise ValueError(f"memory_gib must be positive and finite, got {memory_gib!r}")
    if not 0 <= machine.reserve < 1:
        raise ValueError(f"reserve must be at least 0 and below 1, got {machine.reserve!r}")
    if not 0 <= machine.activations_gib < math.inf:
        raise ValueError(f"activations_gib must be at least 0 and finite, got {machine.activations_gib!r}")
    if machine.tokens is not None and machine.tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {machine.tokens!r}; leave it out for no time of computation")
    if machine.usable_nbytes <= 0:
        raise ValueError(
            f"activations_gib must leave room in {(1 - machine.reserve) * memory_gib:.1f} of {memory_gib:g} GiB, "
            f"got {machine.activations_gib!r}; use smaller batches or checkpoint activations"
        )
    return machine


def _as_list(configs: Any) -> Sequence[Any]:
    if configs is None:
        return [{"stage": stage} for stage in STAGES]
    return list(configs) if isinstance(configs, (list, tuple)) else [configs]


def _build(model: Any) -> nn.Module:
    if isinstance(model, str):
        return build_by_name(model)
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise TypeError(f"model must be an nn.Module, a function that builds one, or a name, got {model!r}")
    with torch.device("meta"):
        built = model()
    if not isinstance(built, nn.Module):
        raise TypeError(f"the function must return an nn.Module, got {type(built).__name__}")
    return built


__all__ = [
    "Link",
    "Links",
    "Machine",
    "Plan",
    "Row",
    "Times",
    "build_by_name",
    "build_of_numbers",
    "fit_links",
    "plan",
]
