"""Checks and times the CUDA operators, in one call on a machine with a GPU.

    python benchmarks/gpu_check.py                     # 1e9 parameters; needs about 100 GB of GPU memory
    python benchmarks/gpu_check.py --numel 1e8         # on a smaller GPU

1. Builds the extension with its CUDA part, if that is missing.
2. Compares every operator with the CPU, bit for bit, over sizes, precisions, special values and misaligned memory, in a
   CUDA graph, and beyond 2^31 elements; then runs tests/test_ops_cuda.py.
3. Repeats a part of that under compute-sanitizer, if it is on PATH.
4. Times the step with CUDA events, beside torch's fused AdamW, apex where it is installed, and a copy.

Exit code 0: all checks passed (targets that are not met do not change it); 1: a check failed, and nothing is timed;
2: there is no GPU. Then the operators of the CPU are checked instead, and no table is left behind.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from step_bench import ROOT, say
from step_bench.device_checks import SIZES, check_all
from step_bench.groups import GPU_GROUPS
from step_bench.report import environment, keep, table_lines
from step_bench.targets import gpu_targets
from step_bench.timing import Run, build_all, event_milliseconds, time_group
from step_bench.workload import gpu_workload

from zero_shard import ops
from zero_shard.selfcheck.case import Check

RESULTS = ROOT / "benchmarks" / "results" / "gpu_check.json"
NUM_REPEATS = 20
NUM_SHOWN = 20
REBUILT = "ZERO_SHARD_GPU_CHECK_REBUILT"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, default=1e9, help="parameters that are timed, default 1e9")
    parser.add_argument("--sizes", help=f"elements of the checked shards, default {','.join(map(str, SIZES))}")
    parser.add_argument("--operators-only", action="store_true", help="only compare the operators")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"JSON, default {RESULTS.relative_to(ROOT)}")
    given = parser.parse_args(arguments)
    given.sizes = [int(each) for each in given.sizes.split(",")] if given.sizes else list(SIZES)
    return given


def missing_cuda_part() -> str | None:
    """Return why there are no CUDA operators, after an attempt to build them; None: there are."""
    reason = ops.missing_reason("cuda")
    if reason is None or os.environ.get(REBUILT):
        return reason
    say(f"building the CUDA part ({reason})")
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "ZERO_SHARD_CUDA": "1"}, check=False)
    if result.returncode != 0:
        return f"the build failed, see above; before it: {reason}"
    # A library that was loaded cannot be loaded again in the same process.
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, REBUILT: "1"})


def measure(numel: int) -> Run:
    """Time all groups, one after the other, so that only one is in memory."""
    work = gpu_workload(numel)
    run = Run(torch.get_num_threads(), work.values.numel(), len(work.shapes), 0)
    for group, entries in GPU_GROUPS.items():
        say(f"timing {group}")
        timed = list(build_all([(entry, work) for entry in entries], run))
        run.rows += time_group(group, timed, NUM_REPEATS, event_milliseconds)
        del timed
        gc.collect()
        torch.cuda.empty_cache()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return run


def verdict_lines(checks: Sequence[Check]) -> list[str]:
    """Return what became of all checks, as text."""
    failures = [each for each in checks if not each.is_passed]
    lines = [f"{len(checks)} checks, {len(failures)} failed"]
    return lines + [f"  {each.line()}" for each in failures[:NUM_SHOWN]]


def report_lines(report: dict[str, Any]) -> list[str]:
    """Return the table and the targets as text."""
    facts = report["environment"]
    lines = [f"{facts['date']}, commit {facts['commit']}", facts["command"], f"GPU: {facts['gpu']}", facts["kernels"]]
    lines += ["", *table_lines(report["run"]), "", "targets: wanted / measured / met or not"]
    return lines + [f"  {each['line']}" for each in report["targets"]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, report; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    settings = parse_arguments(words)
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        say("there is no CUDA GPU here: the operators of the CPU are checked instead, and nothing is timed")
    elif (reason := missing_cuda_part()) is not None:
        say(f"there are no CUDA operators: {reason}")
        return 1
    checks = check_all("cuda" if has_gpu else "cpu", settings.sizes, settings.operators_only)
    print("\n".join(verdict_lines(checks)))
    if not has_gpu:
        return 2
    if not all(each.is_passed for each in checks):
        return 1
    if settings.operators_only:
        return 0
    run = measure(int(settings.numel))
    report = {
        "environment": environment(["benchmarks/gpu_check.py", *words]),
        "num_checks": len(checks),
        "run": asdict(run),
        "targets": [target.as_dict() for target in gpu_targets(run.rows)],
    }
    print("\n".join(report_lines(report)))
    keep(report, settings.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
