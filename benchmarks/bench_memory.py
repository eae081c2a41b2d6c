"""Measures what a rank holds in each phase against what is promised, and the largest GPT that trains within a limit.

    python benchmarks/bench_memory.py                              # both parts, about ten minutes
    python benchmarks/bench_memory.py --part phases --worlds 1,2,4
    python benchmarks/bench_memory.py --part limit --limit-gib 2   # 2 ranks; see Note [Which limit] in limits.py

Every measurement has processes of its own, so that nothing that came before is in it. On the CPU memory is resident
memory, after the C library has been asked to give back what is free; on CUDA it is what the allocator has handed out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_bench import ROOT, say
from step_bench.report import environment, keep
from train_bench.contenders import BUILDERS, Setup, checked_names, missing_reason
from train_bench.launch import (
    OneLineParser,
    is_rank,
    join_group,
    leave,
    public_command,
    rank_variables,
    run_ranks,
    torchrun_command,
)
from train_bench.limits import deepest, has_run, limit_memory
from train_bench.models import SHAPES, deepened, make_batch, make_model
from train_bench.phases import POINTS, measure_phases
from train_bench.report import fact_lines, number, table

RESULTS = ROOT / "benchmarks" / "results" / "bench_memory.json"
STAGES = tuple(name for name in BUILDERS if name.startswith("zero_shard"))
MIB, GIB = 2**20, 2**30
NUM_STEPS_THAT_FIT = 3
PROBE_LIMIT_S = 300
MOST_LAYERS = 4096
TIMEOUT_S = 120


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line; bad ones end the process with one line and status 2."""
    parser = OneLineParser(
        prog="bench_memory.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("phases", "limit", "both"), default="both")
    parser.add_argument("--model", default="gpt-46m", help=f"one of {', '.join(SHAPES)}; the limit changes its depth")
    parser.add_argument("--batch", type=int, help="samples per rank; default 1, which leaves the memory to the state")
    parser.add_argument("--worlds", default="1,2,4", help="numbers of ranks (phases)")
    parser.add_argument("--nproc", type=int, default=2, help="ranks (limit)")
    parser.add_argument("--limit-gib", type=float, default=2.0, help="of each rank (limit)")
    parser.add_argument("--only", help=f"implementations, default all: {','.join(BUILDERS)}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON; .md goes beside it")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)  # where a rank reports
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)  # of a probe
    given = parser.parse_args(words)
    given.names = checked_names(given.model, given.only, parser)
    given.batch = 1 if given.batch is None else given.batch
    try:
        given.worlds = [int(each) for each in given.worlds.split(",")]
    except ValueError:
        parser.error(f"--worlds must be numbers of ranks such as 1,2,4, got {given.worlds!r}")
    for name, value in (("--batch", given.batch), ("--nproc", given.nproc), ("--worlds", min(given.worlds))):
        if value < 1:
            parser.error(f"{name} must be at least 1, got {value}")
    if not given.limit_gib > 0:
        parser.error(f"--limit-gib must be positive, got {given.limit_gib}")
    if is_rank() and given.as_rank is None:
        parser.error("start it without torchrun: it starts ranks itself, one group for each measurement")
    return given


# ---- as a rank -----------------------------------------------------------------------------------------------


def be_rank(given: argparse.Namespace) -> None:
    """Measure the phases of one implementation, or train a few steps within the limit."""
    torch.set_num_threads(1)
    name, shape = given.names[0], SHAPES[given.model]
    device, _ = join_group("cpu", TIMEOUT_S)
    if given.layers is None:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, measure_phases(name, shape, given.batch, device))
        if dist.get_rank() == 0:
            given.as_rank.write_text(json.dumps(found))
        return
    shape = deepened(shape, given.layers)
    idle_nbytes = limit_memory(int(given.limit_gib * GIB))
    contender = BUILDERS[name](make_model(shape, device), Setup(device, False, given.batch))
    for step in range(NUM_STEPS_THAT_FIT):
        batch = make_batch(shape, given.batch, step, dist.get_rank(), device)
        contender.backward(contender.forward(batch))
        contender.step()
        contender.zero_grad()
    dist.barrier()
    if dist.get_rank() == 0:
        given.as_rank.write_text(json.dumps(idle_nbytes))


# ---- as the one who starts them -------------------------------------------------------------------------------


def phases(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each of our stages and each world size."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rank.json"
        words = ["--model", given.model, "--batch", str(given.batch), "--as-rank", str(path)]
        for world_size in given.worlds:
            for name in [name for name in STAGES if name in given.names]:
                say(f"phases: {name}, {world_size} ranks")
                run_ranks(__file__, [*words, "--only", name], world_size, 1)
                yield {"name": name, "world_size": world_size, "ranks": json.loads(path.read_text())}


def limits(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield for each implementation the deepest model that trains."""
    for name in given.names:
        reason = missing_reason(name, torch.device("cpu"))
        row: dict[str, Any] = {"name": name, "layers": 0, "num_params": 0, "missing": reason}
        row |= {"idle_nbytes": 0, "tried": []}
        if not reason:
            try:
                row["layers"] = deepest(lambda layers, row=row: _fits(given, row, layers), 16, MOST_LAYERS)
                row["num_params"] = _num_params(given.model, row["layers"])
            except RuntimeError as error:  # a line in the report
                row["missing"] = str(error)
                say(f"left out: {name}: {error}")
        yield row


def _fits(given: argparse.Namespace, row: dict[str, Any], layers: int) -> bool:
    words = ["--model", given.model, "--batch", str(given.batch), "--limit-gib", str(given.limit_gib)]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rank.json"
        words += ["--layers", str(layers), "--only", row["name"], "--as-rank", str(path)]
        command = torchrun_command(__file__, words, given.nproc)
        settings: dict[str, Any] = {"env": rank_variables(1), "capture_output": True, "text": True, "check": False}
        try:
            result = subprocess.run(command, timeout=PROBE_LIMIT_S, **settings)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"{layers} layers have not trained {NUM_STEPS_THAT_FIT} steps in {PROBE_LIMIT_S} s"
            ) from None
        fits = has_run(result)
        row["idle_nbytes"] = json.loads(path.read_text()) if fits else row["idle_nbytes"]
    row["tried"].append([layers, fits])
    say(f"limit: {row['name']}, {layers} layers: {'fits' if fits else 'too large'}")
    return fits


def _num_params(model: str, layers: int) -> int:
    shape, meta = SHAPES[model], torch.device("meta")
    return sum(param.numel() for param in make_model(deepened(shape, layers), meta).parameters()) if layers else 0


# ---- the report -----------------------------------------------------------------------------------------------


def markdown(report: dict[str, Any]) -> str:
    """Return the report."""
    lines = ["# Memory", "", *fact_lines(report["environment"]), ""]
    if report["phases"]:
        lines += [f"## What a rank holds, {report['model']}, MiB", ""]
        lines += ["`held`: the optimizer's count of model state; `resident`: of the process, above its start.", ""]
        heads = ["", "ranks", "promised", *(f"held: {point}" for point in POINTS), "most / promised"]
        lines += [*table(heads, [_held_cells(row) for row in report["phases"]]), ""]
        heads = ["", "ranks", "promised", *(f"resident: {point}" for point in POINTS), "peak"]
        lines += [*table(heads, [_resident_cells(row) for row in report["phases"]]), ""]
    if report["limits"]:
        lines += [f"## The largest {report['model']} by depth in {report['limit_gib']:g} GiB per rank, ", ""]
        lines[-2] += f"{report['nproc']} ranks"
        lines += ["The limit is RLIMIT_DATA of the process, Python and torch included (`MiB before`).", ""]
        cells = [
            [
                row["name"],
                str(row["layers"]),
                number(row["num_params"] / 1e6, ".1f"),
                _of_first(report["limits"], row),
                number(row["idle_nbytes"] / MIB or None, ".0f"),
            ]
            for row in report["limits"]
            if not row["missing"]
        ]
        lines += [*table(["implementation", "layers", "M parameters", "to the first", "MiB before"], cells), ""]
        lines += [f"- {row['name']}: not measured: {row['missing']}" for row in report["limits"] if row["missing"]]
    return "\n".join([*lines, ""])


def _fullest(row: dict[str, Any], kind: str) -> list[float]:
    return [max(rank[kind][point] for rank in row["ranks"]) / MIB for point in POINTS]


def _held_cells(row: dict[str, Any]) -> list[str]:
    promised, held = max(rank["promised_nbytes"] for rank in row["ranks"]) / MIB, _fullest(row, "held_nbytes")
    cells = [row["name"], str(row["world_size"]), number(promised, ".1f"), *(number(each, ".1f") for each in held)]
    return [*cells, number(max(held) / promised, ".3f")]


def _resident_cells(row: dict[str, Any]) -> list[str]:
    promised = max(rank["promised_nbytes"] for rank in row["ranks"]) / MIB
    resident = [number(each, ".1f") for each in _fullest(row, "resident_nbytes")]
    peak = max(rank["peak_nbytes"] for rank in row["ranks"]) / MIB
    return [row["name"], str(row["world_size"]), number(promised, ".1f"), *resident, number(peak, ".1f")]


def _of_first(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> str:
    first = next(each for each in rows if not each["missing"])
    return number(row["num_params"] / first["num_params"], ".2f") if first["num_params"] else "-"


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, keep."""
    arguments = list(sys.argv[1:] if words is None else words)
    given = parse_arguments(arguments)
    if given.as_rank is not None:
        be_rank(given)
        leave(0)
    facts = {**environment(public_command("bench_memory.py", arguments)), "threads": 1}
    report: dict[str, Any] = {"environment": facts, "model": given.model, "batch": given.batch}
    report |= {"limit_gib": given.limit_gib, "nproc": given.nproc}
    report |= {"phases": [], "limits": []}
    for part, rows, measure in (("phases", report["phases"], phases), ("limit", report["limits"], limits)):
        for row in measure(given) if given.part in (part, "both") else ():
            rows.append(row)
            keep(report, given.out)  # after every row: all take long, and any may be the one that is interrupted
            given.out.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
