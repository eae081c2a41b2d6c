"""Times and weighs checkpoints of a GPT: ours, FSDP2 with torch.distributed.checkpoint, and DeepSpeed if installed.

    python benchmarks/bench_checkpoint.py            # 38 M parameters (456 MB a checkpoint), 2 processes, some minutes
    python benchmarks/bench_checkpoint.py --quick    # small: shows that everything runs, times mean nothing

Starts its processes by torchrun. All train the same fp32 model in the same processes, and take turns round after round;
the numbers to read are the medians, and the medians of the ratios to FSDP2 in the same round. `save` ends when the
call returns, `flush` is what fsync of its files takes then: what counts as written after a power cut is there after
both. `peak` is how far one call raises a rank's resident memory. `stall` is how long the call of
an asynchronous save stops training; `extra` is what the save costs in all where training keeps every core busy: the
call, the steps during it and the wait at the end, less the time that these steps take alone.
The files are read back while they are in the page cache.

Peer: pip install deepspeed==0.19.8. What is missing is named and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_bench import ROOT, child_variables
from step_bench.report import environment, keep

RESULTS = ROOT / "benchmarks" / "results" / "bench_checkpoint.json"
REFERENCE = "FSDP2 + DCP"
MIB = 2**20
NBYTES_PER_PARAM = 12
"""A float32 weight and two float32 moments."""
LIMIT_TIME, LIMIT_FILES, LIMIT_STALL, LIMIT_PEAK_MIB = 1.0, 1.01, 0.10, 8
GROUP_TIMEOUT = timedelta(minutes=5)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="default 7 (--quick: 1)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--width", type=int, help="of the transformer, default 512 (--quick: 32)")
    parser.add_argument("--layers", type=int, help="default 12 (--quick: 2)")
    parser.add_argument("--only", default="", help="e.g. Ours3,FSDP23,DeepSpeed2: contenders with their stages")
    parser.add_argument("--directory", type=Path, help="where to write checkpoints, default the temporary directory")
    parser.add_argument("--quick", action="store_true", help="small model, one round")
    parser.add_argument("--out", type=Path, help=f"JSON, default {RESULTS.relative_to(ROOT)} (--quick: nowhere)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # where rank 0 reports
    given = parser.parse_args(words)
    defaults = (1, 32, 2) if given.quick else (7, 512, 12)
    given.rounds, given.width, given.layers = (
        value or default for value, default in zip((given.rounds, given.width, given.layers), defaults, strict=True)
    )
    given.out = given.out or (None if given.quick else RESULTS)
    return given


def run_rank(given: argparse.Namespace) -> None:
    """Measure as one of the processes."""
    # Its imports take seconds, which the process that starts the others need not spend.
    from checkpoint_bench.rounds import GPTConfig, measure

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    config = GPTConfig(width=given.width, num_layers=given.layers, num_heads=max(1, given.width // 64))
    found = measure(config, given.directory, given.rounds, given.only)
    if dist.get_rank() == 0:
        given.child.write_text(json.dumps(found))
    dist.destroy_process_group()


def start_ranks(given: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Start the processes and return what they measured."""
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="bench_checkpoint_") as directory:
        path = Path(directory) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(given.processes), __file__, *words, "--directory", directory, "--child", str(path)]
        # Packages print while they are imported; the report keeps stdout to itself.
        subprocess.run(command, env=child_variables(1), stdout=sys.stderr, check=True)
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def table_lines(found: dict[str, Any], processes: int) -> list[str]:
    """Return the table as Markdown."""
    tensor_nbytes = found["num_params"] * NBYTES_PER_PARAM
    lines = [
        f"{found['num_params'] / 1e6:.1f} M float32 parameters on {processes} ranks; weights and moments take "
        f"{tensor_nbytes / MIB:.0f} MiB, the largest parameter {found['largest_numel'] * 4 / MIB:.1f} MiB",
        "",
        "| | save ms | flush ms | load ms | files / tensors | save peak MiB | load peak MiB | async stall ms "
        "| async extra ms | async peak MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        cells = [row["name"], *(_median(row[key]) for key in ("save_ms", "flush_ms", "load_ms"))]
        cells += [f"{row['file_nbytes'] / tensor_nbytes:.4f}"]
        cells += [_mib(row["save_peak_nbytes"]), _mib(row["load_peak_nbytes"])]
        cells += [_median(row["call_ms"]), _median(row["extra_ms"]), _mib(row["async_peak_nbytes"])]
        lines.append(f"| {' | '.join(cells)} |")
    notes = [f"- {row['name']}: {row['note']}" for row in found["rows"] if row["note"]]
    return lines + [""] * bool(notes) + notes + [f"- not measured: {k}: {why}" for k, why in found["missing"].items()]


def target_lines(found: dict[str, Any]) -> list[str]:
    """Return what is to be reached, and whether it is, for each of our rows."""
    rows = {row["name"]: row for row in found["rows"]}
    reference = rows.get(REFERENCE)
    tensor_nbytes = found["num_params"] * NBYTES_PER_PARAM
    peak_limit_nbytes = found["largest_numel"] * 4 + LIMIT_PEAK_MIB * MIB
    lines = []
    for name, row in rows.items():
        if not name.startswith("zero_shard"):
            continue
        checks = []
        if reference is not None:
            for kind in ("save", "load"):
                ratios = [a / b for a, b in zip(row[f"{kind}_ms"], reference[f"{kind}_ms"], strict=True)]
                checks.append((f"{kind} / {REFERENCE}", statistics.median(ratios), LIMIT_TIME))
        checks.append(("files / tensors", row["file_nbytes"] / tensor_nbytes, LIMIT_FILES))
        for kind in ("save", "load"):
            checks.append((f"{kind} peak / allowed", row[f"{kind}_peak_nbytes"] / peak_limit_nbytes, 1.0))
        if row["call_ms"]:
            ratios = [a / b for a, b in zip(row["call_ms"], row["save_ms"], strict=True)]
            checks.append(("async stall / save", statistics.median(ratios), LIMIT_STALL))
        words = (
            f"{what} {got:.3f} ({'met' if got <= limit else 'NOT met'}: <= {limit})" for what, got, limit in checks
        )
        lines.append(f"- {name}: {', '.join(words)}")
    return lines


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.1f}" if values else "-"


def _mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / MIB:.1f}"


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, keep."""
    arguments = list(sys.argv[1:] if words is None else words)
    given = parse_arguments(arguments)
    if given.child is not None:
        run_rank(given)
        return
    report: dict[str, Any] = {"environment": environment(["benchmarks/bench_checkpoint.py", *arguments])}
    report |= {"rounds": given.rounds, "processes": given.processes, **start_ranks(given, arguments)}
    facts = report["environment"]
    versions = f"torch {facts['versions']['torch']}, deepspeed {facts['versions']['deepspeed']}"
    print(f"{facts['date']}, commit {facts['commit']}, {versions}, load average {facts['load_average']:.1f}")
    print("\n".join([*table_lines(report, given.processes), "", *target_lines(report)]))
    if given.out is not None:
        keep(report, given.out)


if __name__ == "__main__":
    main()
