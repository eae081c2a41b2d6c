"""``zero-shard doctor``: it tells what runs here, and it notices when that is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_shard
from zero_shard import cli, doctor, ops, selfcheck
from zero_shard.ops import Kernels
from zero_shard.selfcheck.case import check, have_equal_bits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
OPERATORS = Kernels._fields[1:]
has_native = ops.missing_reason("cpu") is None


@pytest.fixture(autouse=True)
def _small_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_BANDWIDTH_NUMEL", 1 << 16)
    monkeypatch.setattr(doctor, "_BANDWIDTH_S", 0.001)


def json_report(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = cli.main(["doctor", "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, report


def test_doctor_finds_all_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all is well"
    text = "\n".join(lines)
    for title in ("kernels", "versions", "GPU", "self-check on cpu", "bandwidth on cpu"):
        assert title in lines
    for name in OPERATORS:
        assert f"\n  {name}" in text
    assert f"zero_shard         {zero_shard.__version__}" in text
    assert f"torch              {torch.__version__}" in text
    if has_native:
        assert f"cpu                native ({ops.instruction_set()})" in text
    assert "process groups     " in text and "gloo" in text


def test_doctor_json_has_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = json_report(capsys)
    assert code == 0 and report["is_well"] is True
    checks = report["checks"]["cpu"]
    assert {each["op"] for each in checks} == set(OPERATORS)
    assert len(checks) == len(list(selfcheck.cases()))
    for each in checks:
        assert each["is_passed"] and 0 <= each["error"] <= each["limit"], each
        assert each["has_equal_bits"] is (True if has_native else None), each
    assert [row["name"] for row in report["bandwidth"]["cpu"]] == ["copy", "adamw_ float32"]
    assert all(row["gb_per_s"] > 0 for row in report["bandwidth"]["cpu"])
    assert set(report["kernels"]) == {"cpu", "cuda"}


def first_changed(name: str, arguments: tuple[Any, ...]) -> torch.Tensor:
    """The first tensor that the operator changes and that is not empty."""
    changed = arguments[0] if name == "unflatten_" else [arguments[0]]
    return next(each for each in changed if each.numel())


def raises(name: str, arguments: tuple[Any, ...], call: Callable[..., None]) -> None:
    raise RuntimeError("illegal instruction")


def does_nothing(name: str, arguments: tuple[Any, ...], call: Callable[..., None]) -> None:
    """As an operator that was registered and never written."""


def is_slightly_off(name: str, arguments: tuple[Any, ...], call: Callable[..., None]) -> None:
    """One element, by more than any rounding."""
    call(*arguments)
    changed = first_changed(name, arguments)
    largest = changed.abs().argmax()
    changed.view(-1)[largest] *= 1.03


def leaves_a_nan(name: str, arguments: tuple[Any, ...], call: Callable[..., None]) -> None:
    call(*arguments)
    first_changed(name, arguments).view(-1)[0] = float("nan")


def break_operator(monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., None]) -> None:
    """Let ``ops.select("auto")`` hand out an operator with a fault; the twins stay right."""
    select = ops.select

    def broken_select(kernels: str = "auto", device: str = "cpu") -> Kernels:
        found = select(kernels, device)
        if kernels != "auto":
            return found
        return found._replace(**{name: lambda *arguments: fault(name, arguments, getattr(found, name))})

    monkeypatch.setattr(ops, "select", broken_select)


@pytest.mark.parametrize("fault", [raises, does_nothing, is_slightly_off, leaves_a_nan])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_broken_operator_is_found(
    name: str, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_operator(monkeypatch, name, fault)
    if name == "adamw_":  # the bandwidth pass would raise, too
        monkeypatch.setattr(doctor, "measure_bandwidth", lambda device, numel: [])
    code, report = json_report(capsys)
    assert code == 1 and report["is_well"] is False
    failed = [each for each in report["checks"]["cpu"] if not each["is_passed"]]
    assert {each["op"] for each in failed} == {name}
    # A case that asks for no change is passed by an operator that does nothing.
    assert len(failed) >= len([each for each in report["checks"]["cpu"] if each["op"] == name]) - 1
    for each in failed:
        assert ("illegal instruction" in each["message"]) == (fault is raises)
        if fault in (raises, leaves_a_nan):
            assert each["error"] == "inf"


def test_failures_are_listed_in_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    break_operator(monkeypatch, "sum_pairs_", raises)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "1 self-checks failed",
        "  sum_pairs_ (float64): RuntimeError: illegal instruction",
    ]
    monkeypatch.undo()
    break_operator(monkeypatch, "sum_pairs_", is_slightly_off)
    assert cli.main(["doctor"]) == 1
    assert "  sum_pairs_ (float64): largest error " in capsys.readouterr().out


@pytest.mark.skipif(not has_native, reason="there is only one form of the operators")
def test_other_bits_are_found_where_the_error_is_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_one_bit_off(name: str, arguments: tuple[Any, ...], call: Callable[..., None]) -> None:
        call(*arguments)
        if arguments[0].dtype == torch.float32 and arguments[1] is None:
            arguments[0].view(torch.int32)[arguments[0].abs().argmax()] += 1

    break_operator(monkeypatch, "adamw_", is_one_bit_off)
    code, report = json_report(capsys)
    failed = [each for each in report["checks"]["cpu"] if not each["is_passed"]]
    assert code == 1 and "float32" in {each["case"] for each in failed}
    by_bits = [each for each in failed if each["error"] <= each["limit"]]
    assert by_bits and all(each["has_equal_bits"] is False for each in by_bits)


# --- without the compiled part, and as a command ----------------------------------------------------------


def run_doctor(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(directory)}
    command = [sys.executable, "-W", "error", "-m", "zero_shard", "doctor", *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


def test_doctor_without_the_compiled_part(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "zero_shard", tmp_path / "zero_shard", ignore=shutil.ignore_patterns("_C*", "_build.json"))
    result = run_doctor(tmp_path, "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["kernels"]["cpu"].startswith("PyTorch twins (the extension was not built")
    assert {each["has_equal_bits"] for each in report["checks"]["cpu"]} == {None}
    assert "no compiled cpu kernels" in result.stderr


def test_python_m_zero_shard_doctor() -> None:
    result = run_doctor(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "all is well"


def test_the_console_script_is_declared() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"zero-shard": "zero_shard.cli:main"}


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["cure"], 2), (["--version"], 0), (["doctor", "-h"], 0)])
def test_command_line(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == code
    captured = capsys.readouterr()
    assert "zero-shard" in captured.out + captured.err or f"zero_shard {zero_shard.__version__}" in captured.out


def test_versions_of_missing_and_odd_tools(tmp_path: Path) -> None:
    assert doctor._first_match(["no-such-tool", "--version"], "(.*)") == "none"
    assert doctor._first_match([], "(.*)") == "none"
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho 'release 9.0, V9.0.176'\n")
    tool.chmod(0o755)
    assert doctor._first_match([str(tool)], r"release ([\d.]+)") == "9.0"
    assert doctor._first_match([str(tool)], r"version ([\d.]+)").endswith("tool, of unknown version")


# --- the cases themselves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 3, 17, 255, 256, 257])
@pytest.mark.parametrize("is_special", [False, True])
def test_cases_of_every_length_pass(numel: int, is_special: bool) -> None:
    kernels, twins = ops.select("auto"), ops.select("torch")
    for case in selfcheck.cases(numel, is_special):
        for shift in (0, 1):
            found = check(case, kernels, "cpu", case.run(twins, "cpu"), shift)
            assert found.is_passed, found


def test_cases_stay_as_they_are() -> None:
    """A case is run by two forms of the operators, which must see the same arguments."""
    for case in selfcheck.cases(300):
        before = case.run(ops.select("torch"), "cpu")
        assert have_equal_bits(case.run(ops.select("torch"), "cpu"), before)
