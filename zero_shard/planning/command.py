"""``zero-shard plan``: a plan for a model that is given by its config, by a function, by name or by numbers."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from zero_shard.planning import Link, Links, Plan, plan
from zero_shard.planning.chart import check_chart, write_chart
from zero_shard.planning.sources import Source, UnusableError, find_source, number_of

_RANKS_PER_NODE = 8
_EPILOG = """examples:
  zero-shard plan llama-3-70b --nodes 4 --memory 80
  zero-shard plan path/to/hf_model --world-size 8 --stage 2 3 --option state_dtype=int8,master=stochastic
  zero-shard plan mymodels:build --world-size 16 --json
  zero-shard plan --params 70e9 --layers 80 --nodes 1 --chart plan.png"""


def register(commands: Any) -> None:
    """Add the subcommand to those of ``zero-shard``."""
    parser = commands.add_parser(
        "plan",
        help="memory, traffic and time of each stage before a run, from the real code on fake tensors",
        description="Exits with 0, or with 2 and one line if the input can't be used. Takes no memory and no GPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", help="directory with a Hugging Face config.json, module:function, or llama-3-8b, ...")
    add("--params", help="plain numbers in place of a model: parameters, as 70e9 or 70b")
    add("--layers", type=int, help="with --params: equal layers")
    add("--dtype", help="of the weights; default: as the model is, bfloat16 for names and plain numbers")
    add("--world-size", type=int, help="ranks; default: 8 per node")
    add("--nodes", type=int, help="nodes; default: 8 ranks each")
    add("--memory", type=float, default=80.0, metavar="GIB", help="of one GPU (80)")
    add("--activations", type=float, default=0.0, metavar="GIB", help="of one rank, measured by you (0)")
    add("--tokens", type=int, help="per rank and step, for the time of the computation")
    add("--stage", type=int, nargs="+", default=[0, 1, 2, 3], help="stages to compare (0 1 2 3)")
    add("--option", action="append", default=[], metavar="KEY=VALUE[,...]", help="one more row per stage with these")
    add("--within", type=float, metavar="GB/S", help="bandwidth of a rank within its node (360)")
    add("--between", type=float, metavar="GB/S", help="bandwidth of a rank between nodes (40)")
    add("--backend", choices=["nccl", "gloo"], default="nccl", help="whose collectives (nccl)")
    add("--json", action="store_true", help="print JSON")
    add("--chart", type=Path, metavar="FILE.png", help="also draw the memory of each row (needs matplotlib)")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print the plan."""
    if given.chart is not None:
        check_chart(given.chart)
    made = _make(given)
    if given.chart is not None:
        write_chart(made, given.chart)
    print(json.dumps(made.to_dict(), indent=2) if given.json else made.table())
    return 0


def _make(given: argparse.Namespace) -> Plan:
    world_size, ranks_per_node = _ranks(given.world_size, given.nodes)
    configs = [{"stage": stage} for stage in given.stage]
    configs += [{"stage": stage, **_options(text)} for text in given.option for stage in given.stage]
    source = _source(given)
    return plan(
        source.model,
        configs,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        memory_gib=given.memory,
        backend=given.backend,
        name=source.name,
        links=_links(given),
        activations_gib=given.activations,
        tokens=given.tokens,
    )


def _source(given: argparse.Namespace) -> Source:
    if (given.model is None) == (given.params is None):
        raise UnusableError("give either a model or --params and --layers")
    if (given.params is None) != (given.layers is None):
        raise UnusableError("--params and --layers belong together, as in --params 70e9 --layers 80")
    return find_source(given.model, given.params, given.layers, given.dtype)


def _ranks(world_size: int | None, num_nodes: int | None) -> tuple[int, int]:
    for name, value in (("--world-size", world_size), ("--nodes", num_nodes)):
        if value is not None and value < 1:
            raise UnusableError(f"{name} must be at least 1, got {value}")
    if world_size is None:
        if num_nodes is None:
            raise UnusableError("say how many ranks there are: --world-size, or --nodes of 8 ranks each")
        return num_nodes * _RANKS_PER_NODE, _RANKS_PER_NODE
    if num_nodes is not None:
        if world_size % num_nodes:
            raise UnusableError(f"--world-size must be a multiple of --nodes {num_nodes}, got {world_size}")
        return world_size, world_size // num_nodes
    ranks_per_node = min(_RANKS_PER_NODE, world_size)
    if world_size % ranks_per_node:
        raise UnusableError(f"--world-size {world_size} is not a multiple of 8; say how many --nodes there are")
    return world_size, ranks_per_node


def _links(given: argparse.Namespace) -> Links:
    links = Links()
    for name in ("within", "between"):
        value = getattr(given, name)
        if value is not None and not 0 < value < math.inf:
            raise UnusableError(f"--{name} must be positive and finite, got {value}")
    within = Link(links.within.alpha_s, given.within * 1e9) if given.within else links.within
    between = Link(links.between.alpha_s, given.between * 1e9) if given.between else links.between
    return Links(within, between, links.host)


def _options(text: str) -> dict[str, Any]:
    """Read "state_dtype=int8,prefetch=2"."""
    options = {}
    for pair in text.split(","):
        key, separator, value = pair.partition("=")
        if not separator or not key.strip() or not value.strip():
            raise UnusableError(f"--option must be KEY=VALUE[,KEY=VALUE], got {text!r}")
        if key.strip() == "stage":
            raise UnusableError("the stages are given by --stage, not by --option")
        options[key.strip()] = _value(value.strip())
    return options


def _value(text: str) -> Any:
    known: dict[str, Any] = {"true": True, "false": False, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    number = number_of(text)
    return text if number is None else number
