"""A rank is killed in mid-run, and the run ends as if nothing had happened: by torchrun itself, or with fewer ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import elastic_run
import pytest
import ranks
from example_runs import example, free_port, main_as_rank, run_main

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


def _arguments(out: Path, *more: str) -> tuple[str, ...]:
    config = out.parent / "gpt.toml"
    config.write_text(_CONFIG)
    return ("--config", str(config), "--out", str(out), *more)


def _under_torchrun(out: Path, dies_at: int) -> tuple[int, str]:
    """Have torchrun start the ranks, once more when one dies; return its status and what all have printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", str(_TESTS / "elastic_run.py"), *_arguments(out)]
    python_path = os.pathsep.join(filter(None, [str(_TESTS.parent), os.environ.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "DIES_AT": str(dies_at)}
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def _die(arguments: tuple[str, ...], port: int) -> None:
    """All ranks: torchrun ends those that are left when one has died."""
    with mock.patch.object(example("train_gpt"), "take_step", elastic_run.dying_at(6, 0, 1)):
        main_as_rank("train_gpt", arguments, port)


def _history(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _losses(out: Path) -> list[tuple[float, float | None, float | None]]:
    return [(each["step"], each.get("train_loss"), each.get("held_out_loss")) for each in _history(out)]


def _weights(out: Path) -> Any:
    return json.loads((out / "summary.json").read_text())["weights_sha256"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    run_main("train_gpt", *_arguments(out))
    return out


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run has left that was killed in step 6."""
    out = tmp_path_factory.mktemp("killed") / "run"
    errors = ranks.run_expecting_errors(2, _die, _arguments(out), free_port())
    assert all(isinstance(error, ranks.RankDied) for error in errors), errors
    return out


def test_torchrun_restarts_and_the_run_ends_bit_for_bit(unbroken: Path, tmp_path: Path) -> None:
    code, text = _under_torchrun(tmp_path / "run", dies_at=10)
    assert code == 0, text
    assert re.search(r"resumed from the checkpoint in .* at step [48]\n", text), "the save of step 8 may be under way"
    assert _losses(tmp_path / "run") == _losses(unbroken)
    assert _weights(tmp_path / "run") == _weights(unbroken)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_it_goes_on_with_fewer_or_more_ranks_and_ends_with_the_same_loss(
    unbroken: Path, killed: Path, tmp_path: Path, num_ranks: int
) -> None:
    shutil.copytree(killed, tmp_path / "run")
    text = run_main("train_gpt", *_arguments(tmp_path / "run", "--resume"), num_ranks=num_ranks)
    assert "at step 4" in text
    assert "2 ranks before" in text
    for found, expected in zip(_losses(tmp_path / "run"), _losses(unbroken), strict=True):
        assert [each is None for each in found] == [each is None for each in expected]
        numbers = [pair for pair in zip(found, expected, strict=True) if None not in pair]
        assert [one for one, _ in numbers] == pytest.approx([other for _, other in numbers], rel=1e-4)
