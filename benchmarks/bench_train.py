"""Times whole training steps of zero_shard and its peers in one process group, in turn: time, memory, bytes, weights.

    python benchmarks/bench_train.py --nproc 2 --model gpt-46m             # starts torchrun itself
    torchrun --nproc-per-node 8 benchmarks/bench_train.py --model llama-1b --precision bfloat16
    python benchmarks/bench_train.py --nproc 1,2,4,8 --scaling strong --model gpt2-124m
    python benchmarks/bench_train.py --merge a.json b.json --out both.json # one report of several runs

Every round builds each implementation anew from the same weights and trains it on the same data; a step is split into
forward, backward and step. Writes JSON (every sample), Markdown and charts side by side. `benchmarks/README.md` says
what each column means and how to run on several nodes. Peers that are not installed are named and left out:
pip install deepspeed; apex from source.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_bench import ROOT, say
from step_bench.report import environment, keep
from train_bench.contenders import BUILDERS, checked_names
from train_bench.launch import OneLineParser, is_rank, join_group, leave, public_command, run_ranks
from train_bench.models import SHAPES
from train_bench.report import markdown
from train_bench.rounds import Plan, Rounds

RESULTS = ROOT / "benchmarks" / "results" / "bench_train.json"


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line; bad ones end the process with one line and status 2."""
    parser = OneLineParser(
        prog="bench_train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt-46m", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--nproc", help="ranks to start on this machine, a number or several (1,2,4); not in torchrun")
    parser.add_argument("--scaling", choices=("weak", "strong"), default="weak", help="what --batch is: see there")
    parser.add_argument("--batch", type=int, help="samples: per rank (weak), or of all ranks together (strong)")
    parser.add_argument("--only", help=f"implementations, default all: {','.join(BUILDERS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps per implementation and round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of every block")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=1, help="of a rank on the CPU")
    parser.add_argument("--network-device", help="whose bytes are counted, default lo on the CPU")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that ranks wait for each other")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON; .md and .png go beside it")
    parser.add_argument("--merge", type=Path, nargs="+", help="JSON files to make one report of; measures nothing")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)  # where one world size reports
    given = parser.parse_args(words)
    _check(given, parser)
    return given


def _check(given: argparse.Namespace, parser: OneLineParser) -> None:
    """Refuse what can't be run, before anything is started."""
    given.names = checked_names(given.model, given.only, parser)
    for name, least in (("rounds", 1), ("steps", 1), ("warmup", 0), ("threads", 1), ("batch", 1)):
        value = getattr(given, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    for path in given.merge or ():
        if not path.is_file():
            parser.error(f"--merge found no file {path}")
    if given.device == "auto":
        given.device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU and a CUDA build of torch, and there is none; use --device cpu")
    if given.network_device is None:
        given.network_device = "lo" if given.device == "cpu" else ""
    if is_rank() and given.nproc:
        parser.error(f"--nproc starts torchrun, but this is a rank of one already: leave --nproc {given.nproc} away")
    try:
        given.worlds = [int(each) for each in (given.nproc or "1").split(",")]
    except ValueError:
        parser.error(f"--nproc must be a number of ranks or several (1,2,4), got {given.nproc!r}")
    if is_rank():
        given.worlds = [int(os.environ["WORLD_SIZE"])]
    if not is_rank() and not given.merge and not given.nproc:
        parser.error("start it by torchrun, or say with --nproc how many ranks to start")
    for world_size in given.worlds:
        if world_size < 1:
            parser.error(f"--nproc must be at least 1, got {world_size}")
        if given.scaling == "strong" and _samples(given) % world_size:
            parser.error(
                f"--batch must be a multiple of the {world_size} ranks (strong scaling), got {_samples(given)}"
            )
        if given.device == "cuda" and not is_rank() and world_size > torch.cuda.device_count():
            parser.error(f"--nproc asks for {world_size} ranks, but there are {torch.cuda.device_count()} GPUs")


def _samples(given: argparse.Namespace) -> int:
    if given.batch is not None:
        return int(given.batch)
    shape_batch = SHAPES[given.model].batch
    return shape_batch * max(given.worlds) if given.scaling == "strong" else shape_batch


def _without_nproc(words: Sequence[str]) -> list[str]:
    """Return the words for a rank: torchrun would take --nproc for an option of its own."""
    left, is_value = [], False
    for word in words:
        if not is_value and word != "--nproc" and not word.startswith("--nproc="):
            left.append(word)
        is_value = word == "--nproc"
    return left


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure one world size as one of its ranks; the result is that of rank 0."""
    if given.device == "cpu":
        torch.set_num_threads(given.threads)
    device, control = join_group(given.device, given.timeout)
    samples = _samples(given)
    plan = Plan(
        model=given.model,
        shape=SHAPES[given.model],
        batch=samples // dist.get_world_size() if given.scaling == "strong" else samples,
        names=given.names,
        rounds=given.rounds,
        warmup=given.warmup,
        steps=given.steps,
        is_half=given.precision == "bfloat16",
        is_recomputing=given.recompute,
        network_device=given.network_device,
    )
    return Rounds(plan, device, control).run()


def write(report: dict[str, Any], out: Path) -> None:
    """Write JSON, charts and Markdown, and print the last."""
    keep(report, out)
    charts: list[str] = []
    if find_spec("matplotlib") is None:
        say("no charts: matplotlib is not installed")
    else:
        # Here, because it would be in the memory of every rank that is measured.
        from train_bench.charts import draw_all

        charts = draw_all(report, out.with_suffix(""))
    text = markdown(report, charts)
    out.with_suffix(".md").write_text(text)
    print(text)


def _describe(given: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    facts = environment(public_command("bench_train.py", words))
    if is_rank():  # of a torchrun that somebody else has started
        nodes, ranks = os.environ.get("GROUP_WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE", "1")
        launcher = f"torchrun --nnodes {nodes} --nproc-per-node {ranks} "
        facts["command"] = launcher + facts["command"].removeprefix("python ")
    return {**facts, "threads": given.threads, "device": given.device, "scaling": given.scaling}


def main(words: Sequence[str] | None = None) -> None:
    """Measure as a rank, or start ranks for every world size; then write the report."""
    arguments = list(sys.argv[1:] if words is None else words)
    given = parse_arguments(arguments)
    if is_rank():
        facts = _describe(given, arguments)  # before the load is our own
        run = measure(given)
        if dist.get_rank() == 0:
            if given.as_rank is not None:
                given.as_rank.write_text(json.dumps(run))
            else:
                write({"environment": facts, "runs": [run]}, given.out)
        leave(0)
    if given.merge:
        parts = [json.loads(path.read_text()) for path in given.merge]
        report = {"environment": parts[0]["environment"], "runs": [run for part in parts for run in part["runs"]]}
    else:
        report = {"environment": _describe(given, arguments), "runs": []}
        for world_size in given.worlds:
            with tempfile.TemporaryDirectory() as directory:
                part = Path(directory) / "run.json"
                extra = ["--batch", str(_samples(given)), "--as-rank", str(part)]
                run_ranks(__file__, [*_without_nproc(arguments), *extra], world_size, given.threads)
                report["runs"].append(json.loads(part.read_text()))
    write(report, given.out)


if __name__ == "__main__":
    main()
