"""``zero-shard doctor``: which kernels run here and why, whether they are right, and what memory gives."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
import torch

import zero_shard
from zero_shard import apex_kernels, ops
from zero_shard.selfcheck import cases
from zero_shard.selfcheck.case import Check, check

_BANDWIDTH_NUMEL = 1 << 24  # of each fp32 tensor: 64 MiB
_BANDWIDTH_S = 0.1  # at least, for each of the two measurements
_MIN_REPEATS = 3
_TOOL_TIMEOUT_S = 10
_GROUP_BACKENDS = {"GLOO": "gloo", "NCCL": "nccl", "MPI": "mpi", "XCCL": "xccl"}


class Bandwidth(NamedTuple):
    """What memory gave to one kind of pass, median over the repetitions; reads and writes counted once each."""

    name: str
    nbytes: int
    gb_per_s: float


class Report(NamedTuple):
    """What the doctor found on one machine.

    Attributes:
        kernels: Device to "native (avx512)" or "PyTorch twins (why)".
        versions: Name to version.
        checks: Device to what became of each case.
        bandwidth: Device to the measured passes.
    """

    kernels: dict[str, str]
    versions: dict[str, str]
    gpu: str
    checks: dict[str, list[Check]]
    bandwidth: dict[str, list[Bandwidth]]

    @property
    def failures(self) -> list[Check]:
        """The cases that did not come out as they should."""
        return [each for checks in self.checks.values() for each in checks if not each.is_passed]


def run(is_json: bool = False) -> int:
    """Examine this machine, print the report, and return the exit code: 1 if a self-check failed."""
    report = examine()
    print(json.dumps(_as_dict(report), indent=2) if is_json else "\n".join(_lines(report)))
    return 1 if report.failures else 0


def examine() -> Report:
    """Look around, run the self-checks, and measure; takes a few seconds and about 300 MB."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return Report(
        kernels={kind: _active(kind) for kind in ("cpu", "cuda")},
        versions=_versions(),
        gpu=_gpu(),
        checks={device: self_check(device) for device in devices},
        bandwidth={device: measure_bandwidth(device, _BANDWIDTH_NUMEL) for device in devices},
    )


def self_check(device: str) -> list[Check]:
    """Run each case of each operator on ``device``, beside another form of the operators on the CPU.

    The native CPU operators are compared with the PyTorch twins, those on a GPU with whatever runs on the CPU.
    """
    kernels = ops.select("auto", device)
    other = ops.select("torch") if device == "cpu" else ops.select("auto", "cpu")
    has_other = other.name != kernels.name or device != "cpu"
    return [check(case, kernels, device, case.run(other, "cpu") if has_other else None) for case in cases()]


def _active(kind: str) -> str:
    reason = ops.missing_reason(kind)
    if reason is not None:
        return f"PyTorch twins ({reason})"
    return f"native ({ops.instruction_set()})" if kind == "cpu" else "native"


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none"
    properties = torch.cuda.get_device_properties(0)
    memory_gib = properties.total_memory / 2**30
    more = f", {torch.cuda.device_count()} of them" if torch.cuda.device_count() > 1 else ""
    return f"{properties.name}, sm_{properties.major}{properties.minor}, {memory_gib:.0f} GiB{more}"


def _versions() -> dict[str, str]:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), "")
    # As torch was built; the only public word on it that does not import the process groups.
    settings = torch.__config__.show()
    backends = [name for key, name in _GROUP_BACKENDS.items() if re.search(rf"\bUSE_{key}=(ON|1)\b", settings)]
    return {
        "zero_shard": zero_shard.__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "nvcc": _first_match([os.environ.get("CUDACXX") or "nvcc", "--version"], r"release ([\d.]+)"),
        "C++ compiler": _first_match([*compiler.split(), "--version"], r"^(.*)$"),
        "numpy": numpy.__version__,
        "process groups": ", ".join(backends) or "none",
        "apex": apex_kernels.status(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "threads": str(torch.get_num_threads()),
    }


def _first_match(command: Sequence[str], pattern: str) -> str:
    """Return the first group of ``pattern`` in what a command prints, "none" where there is no such command."""
    if not command or shutil.which(command[0]) is None:
        return "none"
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} does not run: {error}"
    found = re.search(pattern, result.stdout, re.MULTILINE)
    return found[1] if found else f"{command[0]}, of unknown version"


# --- bandwidth --------------------------------------------------------------------------------------------


def measure_bandwidth(device: str, numel: int) -> list[Bandwidth]:
    """Time a copy, and one fp32 step of our own: what is read and written, over the median time."""
    values = [torch.zeros(numel, device=device) for _ in range(4)]
    param, grad, exp_avg, exp_avg_sq = values
    hyper = [[1e-3, 0.9, 0.999, 1e-8, 0.01, 0.0, 0.0]]
    tables = [torch.tensor([[0, numel, 0, 0]]), torch.ones(1), torch.ones(1, dtype=torch.uint8)]
    tables += [torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.tensor(hyper).double()]
    tables = [table.to(device) for table in tables]
    kernels = ops.select("auto", device)

    def copy() -> None:
        param.copy_(grad)

    def step() -> None:
        moments = (exp_avg, exp_avg_sq, None, None, None)
        kernels.adamw_(param, None, [grad], [0], *moments, *tables, None, None, False)

    passes: list[tuple[str, Callable[[], None], int]] = [("copy", copy, 8), ("adamw_ float32", step, 28)]
    return [
        Bandwidth(name, numel * nbytes, numel * nbytes / _median_s(call, device) / 1e9) for name, call, nbytes in passes
    ]


def _median_s(call: Callable[[], None], device: str) -> float:
    call()  # touches the memory
    times: list[float] = []
    while len(times) < _MIN_REPEATS or sum(times) < _BANDWIDTH_S:
        _wait_for(device)
        start = time.perf_counter()
        call()
        _wait_for(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


# --- printing ---------------------------------------------------------------------------------------------


def _as_dict(report: Report) -> dict[str, Any]:
    return {
        "is_well": not report.failures,
        "kernels": report.kernels,
        "versions": report.versions,
        "gpu": report.gpu,
        "checks": {
            device: [{**each._asdict(), "error": _finite(each.error), "is_passed": each.is_passed} for each in checks]
            for device, checks in report.checks.items()
        },
        "bandwidth": {device: [each._asdict() for each in rows] for device, rows in report.bandwidth.items()},
    }


def _finite(number: float) -> float | str:
    return number if abs(number) < float("inf") else str(number)  # JSON knows no infinity


def _lines(report: Report) -> list[str]:
    lines = ["kernels", *_columns(report.kernels), "versions", *_columns(report.versions), "GPU", f"  {report.gpu}"]
    for device, checks in report.checks.items():
        lines += [f"self-check on {device}", *_check_lines(checks, _bits_title(device))]
    for device, rows in report.bandwidth.items():
        lines.append(f"bandwidth on {device}")
        lines += [f"  {row.name:18} {row.gb_per_s:9.1f} GB/s   ({row.nbytes / 2**20:.0f} MiB)" for row in rows]
    failures = report.failures
    if not failures:
        return [*lines, "all is well"]
    return [*lines, f"{len(failures)} self-checks failed", *(f"  {each.line()}" for each in failures)]


def _columns(values: dict[str, str]) -> list[str]:
    return [f"  {name:18} {value}" for name, value in values.items()]


def _bits_title(device: str) -> str:
    return "bits of twins" if device == "cpu" else "bits of cpu"


def _check_lines(checks: Sequence[Check], bits_title: str) -> list[str]:
    """One line for each precision of the update, and for each other operator its case that is nearest to its limit."""
    lines = [f"  {'operator':58} {'error':>8}  {'allowed':>8}  {bits_title}"]
    together: dict[str, list[Check]] = {}
    for each in checks:
        together.setdefault(f"{each.op} {each.case}" if each.op == "adamw_" else each.op, []).append(each)
    for label, own in together.items():
        worst = max(own, key=lambda each: each.error / each.limit if each.limit else each.error)
        bits = {each.has_equal_bits for each in own}
        word = "no" if False in bits else "yes" if True in bits else "-"
        name = label if len(own) == 1 else f"{label} ({len(own)} cases)"
        lines.append(f"  {name:58} {worst.error:8.1e}  {worst.limit:8.1e}  {word}")
    return lines
