"""What the numbers depend on, the tables as text, and the file that keeps them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from step_bench import ROOT
from zero_shard import ops

PACKAGES = ("torch", "numpy", "deepspeed", "torchao", "bitsandbytes", "apex")


def environment(command: Sequence[str]) -> dict[str, Any]:
    """Return what the numbers depend on."""
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    cpu_info = Path("/proc/cpuinfo")
    models = [line for line in cpu_info.read_text().splitlines() if "model name" in line] if cpu_info.exists() else []
    gpu = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if torch.cuda.is_available() else "none"
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or "none",
        "command": shlex.join(["python", *command]),
        "cpu": models[0].partition(": ")[2] if models else platform.processor(),
        "num_cpus": os.cpu_count(),
        "gpu": gpu,
        "load_average": os.getloadavg()[0],  # before; more than a few tenths make the times worthless
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "kernels": ops.describe(),
        "versions": versions,
    }


def table_lines(run: dict[str, Any]) -> list[str]:
    """Return one run's table as text."""
    width = max([len(row["name"]) for row in run["rows"]], default=0)
    heads = f"{'ms':>8} {'min':>8} {'max':>8} {'ns/param':>8} {'B/param':>7} {'GB/s':>6} {'of 1st':>7}"
    lines = [
        f"{run['num_params'] / 1e6:.1f} M parameters in {run['num_tensors']} tensors"
        + (f", or {run['num_small_tensors']} small ones" if run["num_small_tensors"] else "")
        + f"; {run['threads']} threads",
        f"{'':{width}} {'clipping':23} {heads} {'moments':>7} {'diff':>7}",
    ]
    group = None
    for row in run["rows"]:
        if row["group"] != group:
            group = row["group"]
            lines.append(f"-- {group}")
        cells = [f"{row['name']:{width}} {row['clipping']:23}"]
        cells += [f"{row[name]:8.2f}" for name in ("median_ms", "min_ms", "max_ms")]
        cells += [f"{row['ns_per_param']:8.3f}", _cell(row["nbytes_per_param"], 7, ".4g")]
        cells += [_cell(row["gb_per_s"], 6, ".1f"), _cell(row["of_limit"], 7, ".1%")]
        cells += [_cell(row["moment_nbytes_per_param"] or None, 7, ".2f"), _cell(row["diff"], 7, ".0e")]
        lines.append(" ".join(cells))
    return lines + [f"not measured: {name}: {reason}" for name, reason in run["missing"].items()]


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}{form}}"


def keep(report: dict[str, Any], path: Path) -> None:
    """Write a report as JSON, each list of times on one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1)
    path.write_text(re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n")
