"""A rank is killed in mid-run, and the run ends as if nothing had happened: by torchrun itself, or with fewer ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).parent
_CONFIG = """
[zero]
stage = 3
[model]
context = 32
width = 32
num_layers = 2
num_heads = 2
[train]
steps = 14
batch = 6
lr = 1e-2
warmup_steps = 3
checkpoint_every = 4
log_every = 1
held_out_windows = 30
sample_numel = 4
timeout_s = 20
[data]
pattern = "*.py"
"""


def _start(out: Path, num_ranks: int, *arguments: str, max_restarts: int = 0, dies_at: int = -1) -> tuple[int, str]:
    config = out.parent / "gpt.toml"
    config.write_text(_CONFIG)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [f"--max-restarts={max_restarts}", "--monitor-interval=0.1", str(_TESTS / "elastic_run.py")]
    command += ["--config", str(config), "--out", str(out), *arguments]
    python_path = os.pathsep.join(filter(None, [str(_TESTS.parent), os.environ.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "VICTIM": "1", "DIES_AT": str(dies_at)}
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def _history(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _losses(out: Path) -> list[tuple[float, float | None, float | None]]:
    return [(each["step"], each.get("train_loss"), each.get("held_out_loss")) for each in _history(out)]


def _weights(out: Path) -> Any:
    return json.loads((out / "summary.json").read_text())["weights_sha256"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    code, text = _start(out, 2)
    assert code == 0, text
    return out


def test_torchrun_restarts_and_the_run_ends_bit_for_bit(unbroken: Path, tmp_path: Path) -> None:
    code, text = _start(tmp_path / "run", 2, max_restarts=1, dies_at=10)
    assert code == 0, text
    assert re.search(r"resumed from the checkpoint in .* at step [48]\n", text), "the save of step 8 may be under way"
    assert _losses(tmp_path / "run") == _losses(unbroken)
    assert _weights(tmp_path / "run") == _weights(unbroken)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_it_goes_on_with_fewer_or_more_ranks_and_ends_with_the_same_loss(
    unbroken: Path, tmp_path: Path, num_ranks: int
) -> None:
    code, text = _start(tmp_path / "run", 2, dies_at=6)
    assert code != 0
    code, text = _start(tmp_path / "run", num_ranks, "--resume")
    assert code == 0, text
    assert "at step 4" in text
    assert "2 ranks before" in text
    for found, expected in zip(_losses(tmp_path / "run"), _losses(unbroken), strict=True):
        assert [each is None for each in found] == [each is None for each in expected]
        numbers = [pair for pair in zip(found, expected, strict=True) if None not in pair]
        assert [one for one, _ in numbers] == pytest.approx([other for _, other in numbers], rel=1e-4)
