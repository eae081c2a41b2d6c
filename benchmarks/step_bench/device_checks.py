"""Whether the operators of a device are right: against the CPU, in a graph, beyond 2^31, under the sanitizer."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from step_bench import ROOT, say
from zero_shard import ops
from zero_shard.selfcheck import cases
from zero_shard.selfcheck.case import Check, check, have_equal_bits

SIZES = (0, 1, 3, 17, 255, 256, 257, 4099, (1 << 20) + 1)
LARGE_NUMEL = 10_000
"""From here on special values only: bits are compared, and the references in float64 are left to the small sizes."""
SANITIZER_SIZES = (257, 4099)
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck")
SHIFTS = (0, 1, 3)
BEYOND_32_BITS = (1 << 31) + 257
TAIL_NUMEL = 257


def check_all(device: str, sizes: Sequence[int], is_operators_only: bool) -> list[Check]:
    """Run the checks that this device allows."""
    say(f"checking the operators on {device}")
    checks = check_operators(device, sizes)
    if device == "cpu" or is_operators_only:
        return checks
    checks += check_graph(device)
    # Four tensors of bf16, and room for the temporaries of their creation.
    if torch.cuda.mem_get_info()[0] > 5 * 2 * BEYOND_32_BITS:
        checks.append(check_far_elements(device, BEYOND_32_BITS))
        torch.cuda.empty_cache()
    else:
        say(f"{BEYOND_32_BITS} elements do not fit the free memory; left out")
    return [*checks, *run_op_tests(device), *run_sanitizer()]


def check_operators(device: torch.device | str, sizes: Sequence[int] = SIZES) -> list[Check]:
    """Compare each operator on ``device`` with the CPU, bit for bit, and with float64 references.

    On the CPU itself the compiled operators are compared with their PyTorch twins.
    """
    kernels = ops.select("auto", device)
    is_cpu = torch.device(device).type == "cpu"
    other = ops.select("torch") if is_cpu else ops.select("auto", "cpu")
    found = []
    for numel in sizes:
        for is_special in (True,) if numel >= LARGE_NUMEL else (False, True):
            for case in cases(numel, is_special):
                expected = case.run(other, "cpu")
                what = f"{case.name}, {numel} elements" + (", special values" if is_special else "")
                for shift in SHIFTS:
                    one = check(case, kernels, device, expected, shift)
                    found.append(one._replace(case=f"{what}, misaligned by {shift}" if shift else what))
    found.append(check_far_elements(device, TAIL_NUMEL + 10_000))
    return found


def check_far_elements(device: torch.device | str, numel: int) -> Check:
    """Update a bf16 shard of ``numel`` elements in one segment, and compare its end with a short shard on the CPU.

    Stochastic rounding takes its bits from the element's number, so a number that was cut to 32 bits shows.
    """
    first = numel - TAIL_NUMEL
    actual = end_of_step(numel, device, ops.select("auto", device))
    expected = end_of_step(TAIL_NUMEL, "cpu", ops.select("auto", "cpu"), param_start=first)
    has_moved = bool((actual["exp_avg"] != 0).all())
    name = f"bfloat16, stochastic, the last of {numel} elements"
    return Check("adamw_", name, 0.0 if has_moved else float("inf"), 0.0, have_equal_bits(actual, expected))


def end_of_step(
    numel: int, device: torch.device | str, kernels: ops.Kernels, param_start: int = 0
) -> dict[str, Tensor]:
    """Take a step over a shard and return the end of weight and moments, on the CPU."""
    values = torch.linspace(-1.0, 1.0, TAIL_NUMEL).bfloat16().to(device) + 0.01
    shard = [torch.zeros(numel, dtype=torch.bfloat16, device=device) for _ in range(4)]
    for tensor in shard[:2]:
        tensor[numel - TAIL_NUMEL :] = values
    param, grad, exp_avg, exp_avg_sq = shard
    hyper = [[1e-2, 0.9, 0.999, 1e-8, 0.1, 0.0, 0.0]]
    tables = [torch.tensor([[0, numel, 0, param_start]]), torch.ones(1), torch.ones(1, dtype=torch.uint8)]
    tables += [torch.zeros(1, dtype=torch.int32), torch.tensor([7]), torch.tensor(hyper, dtype=torch.float64)]
    moments = (exp_avg, exp_avg_sq, None, None, None)
    kernels.adamw_(param, None, [grad], [0], *moments, *(table.to(device) for table in tables), None, None, True)
    results = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return {name: tensor[numel - TAIL_NUMEL :].cpu() for name, tensor in results.items()}


def check_graph(device: torch.device | str) -> list[Check]:
    """Capture each operator in a CUDA graph, replay it, and compare with a plain call."""
    found = []
    kernels = ops.select("auto", device)
    for case in cases(257):
        changes: dict[str, Any] = {case.op: _captured(getattr(kernels, case.op))}
        one = check(case, kernels._replace(**changes), device, case.run(kernels, device))
        found.append(one._replace(case=f"{case.name}, in a CUDA graph"))
    return found


def _captured(operator: Callable[..., None]) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            operator(*arguments)
        graph.replay()
        torch.cuda.synchronize()

    return call


def run_sanitizer() -> list[Check]:
    """Check a few sizes in a process of their own under each tool of compute-sanitizer."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        say("compute-sanitizer is not on PATH; left out")
        return []
    own = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--operators-only"]
    own += ["--sizes", ",".join(map(str, SANITIZER_SIZES))]
    # Else a read past the end of a tensor lands in torch's own pool, and is no error.
    variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return [
        _run_check(f"compute-sanitizer {tool}", [sanitizer, "--tool", tool, "--error-exitcode", "9", *own], variables)
        for tool in SANITIZER_TOOLS
    ]


def run_op_tests(device: str) -> list[Check]:
    """Run the test suite's own tests of the operators on this device, in a process of their own."""
    tests = ROOT / "tests" / "test_ops_cuda.py"
    if importlib.util.find_spec("pytest") is None or not tests.exists():
        say("pytest or the tests are missing; they are left out")
        return []
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(tests)]
    return [_run_check(tests.name, command, {"ZERO_SHARD_TEST_DEVICE": device})]


def _run_check(name: str, command: list[str], variables: dict[str, str]) -> Check:
    """Run a process that checks all operators; exit code 0 is a pass."""
    variables = {**os.environ, **variables}
    result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    lines = (result.stdout + result.stderr).strip().splitlines()
    message = "" if result.returncode == 0 else f"exit code {result.returncode}: {' | '.join(lines[-5:])}"
    return Check("all", name, 0.0, 0.0, None, message)
