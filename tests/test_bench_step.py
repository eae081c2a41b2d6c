"""The benchmarks run, and say what they have measured and what not. Nothing is asserted about times."""

from __future__ import annotations

import contextlib
import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_shard import ops
from zero_shard.selfcheck.case import Check

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # as when one of the scripts is run

import bench_overhead  # noqa: E402
import bench_step  # noqa: E402
import gpu_check  # noqa: E402
from step_bench import device_checks, loss_curve, names  # noqa: E402
from step_bench.groups import CPU_GROUPS, GPU_GROUPS  # noqa: E402
from step_bench.targets import cpu_targets  # noqa: E402
from step_bench.timing import Row, milliseconds  # noqa: E402
from step_bench.workload import make_workload, transformer_shapes  # noqa: E402

TINY = ["--quick", "--width", "24", "--layers", "1", "--small-tensors", "40", "--rounds", "2"]


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a quick run prints, and what it keeps."""
    out = tmp_path_factory.mktemp("bench") / "results" / "out.json"
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        bench_step.main([*TINY, "--threads", "1,2", "--out", str(out)])
    return stdout.getvalue(), json.loads(out.read_text())


def test_bench_overhead_compares_every_stage(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    bench_overhead.main(["--quick", "--rounds", "1", "--threads", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"].partition("stage ")[2] for row in rows] == ["", "0", "1", "2", "3"]
    assert rows[0]["ratio"] == 1 and all(row["median_ms"] > 0 for row in rows)


def test_bench_step_keeps_every_row(quick: tuple[str, dict[str, Any]]) -> None:
    text, report = quick
    assert [run["threads"] for run in report["runs"]] == [1, 2]
    for run in report["runs"]:
        found = {(row["group"], row["name"], row["clipping"]) for row in run["rows"]}
        assert {group for group, _, _ in found} == set(CPU_GROUPS)
        for key in (
            ("fp32", names.OURS, ""),
            ("fp32", names.OURS, names.BY_REDUCTION),
            ("fp32", names.OURS, names.BY_PASS),
            ("fp32", names.OUR_ADAMW, names.BY_CONFIG),
            ("fp32", names.FUSED, names.BY_TORCH),
            ("fp32-unfused", "torch for-loop", names.BY_TORCH),
            ("bf16-master", names.WITH_MASTER, ""),
            ("8-bit", names.OURS + names.EIGHT_BIT, ""),
            ("small", names.OURS + names.SMALL, ""),
            ("small", names.OURS, ""),
        ):
            assert key in found, key
        for row in run["rows"]:
            assert len(row["times_ms"]) == 2 and 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
            assert row["name"] in text
        # A package is either in the table or named as missing.
        for peer, group in ((names.DEEPSPEED, "fp32"), (names.TORCHAO, "8-bit")):
            assert ((group, peer, "") in found) != (peer in run["missing"])
        assert names.APEX in run["missing"]


def test_bench_step_times_kernels_that_compute_the_same(quick: tuple[str, dict[str, Any]]) -> None:
    """`diff` is against torch's for-loop in fp32, after a step of 1e-3."""
    for run in quick[1]["runs"]:
        for row in run["rows"]:
            has_16_bits = "16" in row["name"]
            if row["diff"] is not None and not row["name"].startswith("torchao"):
                assert row["diff"] < (1e-3 if has_16_bits else 1e-6), row["name"]
            if row["name"] == "zero_shard operators" and not row["clipping"]:
                assert row["moment_nbytes_per_param"] == 8 and row["nbytes_per_param"] == 28


def test_bench_step_reports_each_target(quick: tuple[str, dict[str, Any]]) -> None:
    text, report = quick
    for run in report["runs"]:
        missing = [target for target in run["targets"] if target["measured"] is None]
        for target in run["targets"]:
            assert target["line"] in text
            assert (target["is_met"] is None) == (target["measured"] is None)
        others = (names.DEEPSPEED, names.TORCHAO, names.BITSANDBYTES, names.LOOP)
        assert all(any(name in target["what"] for name in others) for target in missing), missing


def test_bench_step_tells_where_the_numbers_come_from(quick: tuple[str, dict[str, Any]]) -> None:
    facts = quick[1]["environment"]
    assert facts["command"].startswith("python benchmarks/bench_step.py --quick")
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["kernels"] == ops.describe()
    assert facts["date"] and facts["commit"] and facts["cpu"] is not None and facts["num_cpus"] >= 1
    assert facts["date"] in quick[0]


def test_targets_compare_medians() -> None:
    def row(group: str, name: str, clipping: str, ns: float, moments: float = 8.0) -> Any:
        nones = {"nbytes_per_param": None, "gb_per_s": None, "of_limit": None, "diff": None}
        times = {"median_ms": ns, "min_ms": ns, "max_ms": ns, "ns_per_param": ns, "times_ms": []}
        return Row(group=group, name=name, clipping=clipping, moment_nbytes_per_param=moments, **nones, **times)

    ours, fused = names.OURS, names.FUSED
    rows = [
        row("fp32", ours, "", 1.0),
        row("fp32", names.LOOP, "", 0.96),
        row("fp32", ours, names.BY_REDUCTION, 1.0),
        row("fp32", fused, names.BY_TORCH, 1.31),
        row("bf16-master", f"{ours} bf16", "", 1.0),
        row("bf16-master", names.WITH_MASTER, "", 1.5),
        row("bf16-master", names.WITH_MASTER_FLAT, "", 1.3),
        row("8-bit", ours + names.EIGHT_BIT, "", 1.0, 2.03),
        row("8-bit", ours, "", 1.0),
    ]
    found = {target.what: target for target in cpu_targets(rows)}
    assert found[f"{ours}: times as fast as {names.LOOP}"].is_met is False
    clipped = f"{ours} ({names.BY_REDUCTION}): times as fast as {fused} ({names.BY_TORCH})"
    assert found[clipped].is_met is True and found[clipped].measured == pytest.approx(1.31)
    # The best of torch's ways counts.
    assert found[f"{ours} bf16: times as fast as {names.WITH_MASTER}"].measured == pytest.approx(1.3)
    assert found[f"{ours}{names.EIGHT_BIT}: their bytes over those of fp32"].is_met is True
    assert found[f"{ours}: times as fast as {fused}"].line().endswith("not measured")


def test_loss_curve_says_why_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_curve, "ROOT", Path("/nonexistent"))
    with pytest.raises(FileNotFoundError):
        loss_curve.loss_curves(1)
    monkeypatch.undo()
    result = subprocess.CompletedProcess([], 1, "", "Traceback\nNotImplementedError: no int8")
    monkeypatch.setattr(loss_curve.subprocess, "run", lambda *args, **kwargs: result)
    curves = loss_curve.loss_curves(1)
    assert curves["missing"].endswith("failed: NotImplementedError: no int8")
    assert "not measured (examples/train_gpt.py" in loss_curve.loss_line(curves)


def test_unknown_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_step.main(["--only", "fp33"])
    assert "--only knows fp32, " in capsys.readouterr().err


# --- gpu_check.py -----------------------------------------------------------------------------------------


def test_check_operators_on_the_cpu() -> None:
    checks = device_checks.check_operators("cpu", (0, 1, 257))
    assert [each for each in checks if not each.is_passed] == []
    assert {each.op for each in checks} == set(ops.Kernels._fields[1:])
    if ops.missing_reason("cpu") is None:
        assert all(each.has_equal_bits for each in checks)


def test_check_operators_finds_an_operator_that_ignores_the_upper_half_of_an_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As 32-bit arithmetic would: of the long parameter's segments and of the far elements."""
    select = ops.select

    def cut_select(kernels: str = "auto", device: Any = "cpu") -> Any:
        found = select(kernels, device)
        if kernels == "torch":
            return found

        def adamw_(*arguments: Any) -> None:
            segments = arguments[9].clone()
            segments[:, 3] &= (1 << 32) - 1
            found.adamw_(*arguments[:9], segments, *arguments[10:])

        return found._replace(adamw_=adamw_)

    monkeypatch.setattr(ops, "select", cut_select)
    failed = [each for each in device_checks.check_operators("cpu", (257,)) if not each.is_passed]
    assert {each.case.partition(", 257")[0] for each in failed} >= {"bfloat16, stochastic"}
    assert all(each.has_equal_bits is False for each in failed)


def test_far_elements_have_the_bits_of_their_number() -> None:
    one = device_checks.check_far_elements("cpu", 100_000)
    assert one.is_passed and one.has_equal_bits
    first = device_checks.TAIL_NUMEL
    kernels = ops.select("auto")
    near, far = (device_checks.end_of_step(first, "cpu", kernels, start)["param"] for start in (0, 1 << 32))
    assert not torch.equal(near, far), "the test sees the number"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    result = run_script("gpu_check.py", "--sizes", "3,257", "--out", str(out))
    assert result.returncode == 2, result.stderr
    assert "no CUDA GPU here" in result.stderr
    assert result.stdout.splitlines()[-1].endswith("checks, 0 failed")
    assert not out.exists()


@pytest.mark.parametrize("code", [0, 1])
def test_processes_of_gpu_check_count_as_checks(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sanitizer's, and that of the operators' tests."""
    commands = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append([*command, options["env"].get("ZERO_SHARD_TEST_DEVICE")])
        return subprocess.CompletedProcess(command, code, "Invalid __global__ write", "")

    monkeypatch.setattr(device_checks.subprocess, "run", run)
    monkeypatch.setattr(device_checks.shutil, "which", lambda name: f"/opt/{name}")
    checks = [*device_checks.run_op_tests("cuda"), *device_checks.run_sanitizer()]
    assert [each.is_passed for each in checks] == [code == 0] * 4
    assert all("Invalid __global__ write" in each.message for each in checks if not each.is_passed)
    assert commands[0][-1] == "cuda" and commands[1][:3] == ["/opt/compute-sanitizer", "--tool", "memcheck"]


def test_gpu_check_stops_at_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Check("adamw_", "float32", math.inf, 0.0, None, "illegal address")
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "missing_cuda_part", lambda: None)
    monkeypatch.setattr(gpu_check, "check_all", lambda *_: [bad])
    assert gpu_check.main([]) == 1
    monkeypatch.setattr(gpu_check, "missing_cuda_part", lambda: "no nvcc")
    assert gpu_check.main([]) == 1


def test_gpu_table_is_made_of_every_group(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The same code with tensors on the CPU; the table goes to a temporary directory."""
    work = make_workload(transformer_shapes(24, 1))
    monkeypatch.setattr(gpu_check, "gpu_workload", lambda numel: work)
    monkeypatch.setattr(gpu_check, "event_milliseconds", milliseconds)
    monkeypatch.setattr(gpu_check, "check_all", lambda *_: [])
    monkeypatch.setattr(gpu_check, "missing_cuda_part", lambda: None)
    monkeypatch.setattr(gpu_check, "NUM_REPEATS", 2)
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "environment", lambda words: {**bench_environment, "command": "pytest"})
    bench_environment = {"date": "today", "commit": "none", "gpu": "none", "kernels": ops.describe()}
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--out", str(out)]) == 0
    report = json.loads(out.read_text())
    rows = {(row["group"], row["name"], row["clipping"]) for row in report["run"]["rows"]}
    assert ("fp32", names.OURS, names.BY_REDUCTION) in rows
    assert {group for group, _, _ in rows} == set(GPU_GROUPS)
    assert names.APEX in report["run"]["missing"], "apex is no part of the test environment"
    text = capsys.readouterr().out
    assert all(target["line"] in text for target in report["targets"])
    assert [target for target in report["targets"] if "apex" in target["what"] and target["measured"] is not None] == []
