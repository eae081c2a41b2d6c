"""Times one AdamW step on a CPU: ours, torch's, and those of other packages where they are installed.

    python benchmarks/bench_step.py                    # 98 M parameters, 1 and 2 threads: 12 GB, about 15 minutes
    python benchmarks/bench_step.py --only fp32        # one group of kernels
    python benchmarks/bench_step.py --quick            # small: shows that everything runs, times mean nothing

Kernels of one group are timed in turn, round after round, in one process, and beside them a C++ loop that reads and
writes memory as AdamW does and computes next to nothing: its bandwidth is what there is to get. Each thread count has
a process of its own. All have gradients, moments and weights of the same sizes, made by the same number of threads.
`of 1st` is a kernel's bandwidth over that of the loop, `moments` what these take per parameter in bytes, `diff` the
largest difference of the weights after the first step from torch's for-loop in fp32.

Peers: pip install torch==2.13.0 deepspeed==0.19.8 torchao==0.18.0 bitsandbytes. What is missing is named and left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from step_bench import ROOT, child_variables, say
from step_bench.groups import ALSO_LARGE, CPU_GROUPS
from step_bench.loss_curve import loss_curves, loss_line
from step_bench.names import APEX
from step_bench.report import environment, keep, table_lines
from step_bench.targets import cpu_targets
from step_bench.timing import Row, Run, build_all, milliseconds, time_group
from step_bench.workload import make_workload, small_shapes, transformer_shapes

RESULTS = ROOT / "benchmarks" / "results" / "bench_step.json"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", help="thread counts, default 1,2 (--quick: 1)")
    parser.add_argument("--rounds", type=int, help="default 15 (--quick: 3)")
    parser.add_argument("--width", type=int, help="of the transformer, default 768 (--quick: 48)")
    parser.add_argument("--layers", type=int, help="default 12 (--quick: 2)")
    parser.add_argument("--small-tensors", type=int, help="default 20000 (--quick: 300)")
    parser.add_argument("--only", help=f"groups: {','.join(CPU_GROUPS)}")
    parser.add_argument("--steps", type=int, help="of the GPT example, default as in gpt.toml (--quick: none)")
    parser.add_argument("--no-loss-curve", action="store_true", help="do not train the GPT example")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--out", type=Path, help=f"JSON, default {RESULTS.relative_to(ROOT)} (--quick: nowhere)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # where a process of one thread count reports
    given = parser.parse_args(arguments)
    defaults = {"threads": "1", "rounds": 3, "width": 48, "layers": 2, "small_tensors": 300}
    if not given.quick:
        defaults = {"threads": "1,2", "rounds": 15, "width": 768, "layers": 12, "small_tensors": 20_000}
        given.out = given.out or RESULTS
    for name, value in defaults.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    given.threads = [int(each) for each in given.threads.split(",")]
    given.only = given.only.split(",") if given.only else list(CPU_GROUPS)
    unknown = set(given.only) - set(CPU_GROUPS)
    if unknown:
        parser.error(f"--only knows {', '.join(CPU_GROUPS)}, got {', '.join(sorted(unknown))}")
    return given


def measure(threads: int, settings: argparse.Namespace) -> Run:
    """Time all groups in this process."""
    torch.set_num_threads(threads)
    large = make_workload(transformer_shapes(settings.width, settings.layers))
    small_sizes = small_shapes(large.values.numel(), settings.small_tensors)
    run = Run(threads, large.values.numel(), len(large.shapes), len(small_sizes))
    for group in settings.only:
        say(f"{threads} threads: {group}")
        small = make_workload(small_sizes) if group.startswith("small") else None
        entries = [(entry, small or large) for entry in CPU_GROUPS[group]]
        entries += [(entry, large) for entry in ALSO_LARGE.get(group, ())]
        contenders = list(build_all(entries, run))
        run.rows += time_group(group, contenders, settings.rounds, milliseconds)
        del contenders
        gc.collect()
    run.missing[APEX] = "runs on CUDA only; benchmarks/gpu_check.py measures it"
    return run


def report_lines(report: dict[str, Any]) -> list[str]:
    """Return the table and the targets as text."""
    facts = report["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [f"{facts['date']}, commit {facts['commit']}", f"{facts['command']}"]
    lines += [f"{facts['cpu']}, {facts['num_cpus']} CPUs, {facts['memory_gib']} GiB, {facts['system']}"]
    lines += [f"load average before the run {facts['load_average']:.1f}; GPU: {facts['gpu']}", versions]
    lines.append(facts["kernels"])
    for run in report["runs"]:
        lines += ["", *table_lines(run)]
    if report["loss_curve"] is not None:
        lines += ["", loss_line(report["loss_curve"])]
    for run in report["runs"]:
        lines += ["", f"targets, {run['threads']} threads: wanted / measured / met or not"]
        lines += [f"  {each['line']}" for each in run["targets"]]
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Start a process for each thread count, then print and keep what they measured."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    settings = parse_arguments(words)
    if settings.child is not None:
        settings.child.write_text(json.dumps(asdict(measure(settings.threads[0], settings))))
        return
    report: dict[str, Any] = {"environment": environment(["benchmarks/bench_step.py", *words]), "loss_curve": None}
    if not settings.no_loss_curve and (not settings.quick or settings.steps):
        report["loss_curve"] = loss_curves(settings.steps)
    report["runs"] = [_run_child(threads, words) for threads in settings.threads]
    print("\n".join(report_lines(report)))
    if settings.out is not None:
        keep(report, settings.out)


def _run_child(threads: int, words: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.json"
        command = [sys.executable, __file__, *words, "--threads", str(threads), "--child", str(path)]
        # Packages print while they are imported; the report keeps stdout to itself.
        subprocess.run(command, env=child_variables(threads), stdout=sys.stderr, check=True)
        run: dict[str, Any] = json.loads(path.read_text())
    run["targets"] = [target.as_dict() for target in cpu_targets([Row(**row) for row in run["rows"]])]
    return run


if __name__ == "__main__":
    main()
