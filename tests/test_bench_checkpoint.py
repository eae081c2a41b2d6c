"""The benchmark of checkpoints runs, checks that what it loads goes on training as before, and says what is missing."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

import zero_shard

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # as when the script is run

import bench_checkpoint  # noqa: E402


def test_a_quick_run_measures_ours_and_fsdp2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    names = "Ours3,FSDP23,DeepSpeed2"
    bench_checkpoint.main(["--quick", "--out", str(out), "--only", names, "--directory", str(tmp_path)])
    text = capfd.readouterr().out
    report = json.loads(out.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert {"zero_shard, stage 3", "FSDP2 + DCP"} <= set(rows)
    assert (importlib.util.find_spec("deepspeed") is None) == ("DeepSpeed2" in report["missing"])
    for row in rows.values():
        assert len(row["save_ms"]) == len(row["load_ms"]) == 1 and min(row["save_ms"] + row["load_ms"]) > 0
        assert row["file_nbytes"] > 12 * report["num_params"], "all weights and moments are in the files"
        assert f"| {row['name']} | {row['save_ms'][0]:.1f} |" in text
    assert len(rows["FSDP2 + DCP"]["extra_ms"]) == 1
    has_async = hasattr(zero_shard, "async_save")
    assert len(rows["zero_shard, stage 3"]["extra_ms"]) == has_async
    assert ("has no async_save" in text) != has_async
    assert list(tmp_path.iterdir()) == [out], "what was written is gone"


def test_targets_are_ratios_in_the_same_round() -> None:
    def row(name: str, save_ms: list[float]) -> dict[str, object]:
        peaks = {f"{kind}_peak_nbytes": 9 * 2**20 for kind in ("save", "load")}
        times = {"load_ms": [1.0, 1.0, 1.0], "extra_ms": [1.0, 1.0, 1.0], "call_ms": [0.1, 0.1, 0.1]}
        return {"name": name, "save_ms": save_ms, "file_nbytes": 12_120, **peaks, **times}

    rows = [row("zero_shard, stage 3", [1.0, 20.0, 3.0]), row("FSDP2 + DCP", [2.0, 10.0, 6.0])]
    (line,) = bench_checkpoint.target_lines({"rows": rows, "num_params": 1000, "largest_numel": 2**18})
    assert "save / FSDP2 + DCP 0.500 (met: <= 1.0)" in line
    assert "files / tensors 1.010 (met: <= 1.01)" in line
    assert "save peak / allowed 1.000 (met" in line
    assert "async stall / save 0.033 (met" in line


def test_quick_keeps_no_result() -> None:
    given = bench_checkpoint.parse_arguments(["--quick", "--width", "48"])
    assert (given.out, given.rounds, given.width, given.layers) == (None, 1, 48, 2)
    assert bench_checkpoint.parse_arguments([]).out == bench_checkpoint.RESULTS
