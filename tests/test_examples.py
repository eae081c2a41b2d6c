"""The example on two processes, once as a user runs it, through torchrun; judged by what it prints and its files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from example_runs import example, free_port, main_as_rank

import zero_shard

EXAMPLES = Path(__file__).parent.parent / "examples"
NUM_RANKS = 2
LIMIT_S = 120
PADDING_NBYTES = 4096
"""The formula of the promise knows no alignment of slots; a tiny model shows it."""
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"

TINY = """
[zero]
stage = 3

[model]
context = 32
width = 32
num_layers = 3
num_heads = 2

[train]
steps = 30
batch = 8
lr = 1e-2
warmup_steps = 3
checkpoint_every = 10
log_every = 4
held_out_windows = 30
sample_numel = 24
sample_prompt = "class "

[data]
pattern = "*.py"
"""


def write_config(out: Path, text: str) -> str:
    """Write the configuration of a run beside its directory and return where it is."""
    path = out.parent / f"{out.name}.toml"
    path.write_text(text)
    return str(path)


class Outcome(NamedTuple):
    """What a run left behind."""

    out: Path
    stdout: str
    stderr: str

    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return content

    def history(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]


def run_example(out: Path, *arguments: str, config: str = TINY) -> Outcome:
    """Run the example on two rank processes into ``out``."""
    words = ("--config", write_config(out, config), "--out", str(out), *arguments)
    printed = ranks.run(NUM_RANKS, main_as_rank, "train_gpt", words, free_port(), limit_s=LIMIT_S)
    return Outcome(out, *map("".join, zip(*printed, strict=True)))


def run_under_torchrun(out: Path) -> Outcome:
    """Run the example as a user does; fail with its whole output unless it exits with 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    command += [str(EXAMPLES / "train_gpt.py"), "--config", write_config(out, TINY), "--out", str(out)]
    python_path = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    return Outcome(out, result.stdout, result.stderr)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The whole run at stage 3, under torchrun."""
    return run_under_torchrun(tmp_path_factory.mktemp("unbroken") / "run")


@pytest.fixture(scope="module")
def stopped_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same run at stage 1, ended after step 13 and continued."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    stopped = run_example(out, "--stage", "1", "--stop-after", "13")
    assert "stopped after step 13 of 30" in stopped.stdout
    assert not (out / "summary.json").exists()
    return run_example(out, "--stage", "1", "--resume")


@pytest.fixture(params=["unbroken", "stopped_and_resumed"])
def outcome(request: pytest.FixtureRequest) -> Outcome:
    """Both ways to get to the end, one after the other."""
    got = request.getfixturevalue(request.param)
    assert isinstance(got, Outcome)
    return got


def test_held_out_loss_drops(outcome: Outcome) -> None:
    summary = outcome.summary()
    assert summary["held_out_loss_before"] > 5.0  # a new model knows nothing: about log(256) = 5.55
    assert summary["held_out_loss_after"] < 0.8 * summary["held_out_loss_before"]


def test_chart_and_checkpoints_are_written(outcome: Outcome) -> None:
    assert (outcome.out / "loss.png").read_bytes().startswith(PNG_MAGIC)
    assert (outcome.out / "loss.png").stat().st_size > 10_000
    names = sorted(path.name for path in outcome.out.glob("checkpoint-*"))
    assert names == ["checkpoint-000020", "checkpoint-000030"]


def test_memory_and_traffic_are_as_promised(outcome: Outcome) -> None:
    usage = outcome.summary()["usage"]
    assert len(usage) == NUM_RANKS
    for each in usage:
        assert 0 < each["held_nbytes"] <= 1.02 * each["promised_nbytes"] + PADDING_NBYTES
        assert 0 < each["sent_nbytes"] <= 1.02 * each["floor_sent_nbytes"] + PADDING_NBYTES


def test_user_sees_table_sample_and_progress(outcome: Outcome) -> None:
    assert "model state per rank" in outcome.stdout
    assert "bytes sent per step" in outcome.stdout
    for rank, each in enumerate(outcome.summary()["usage"]):
        cells = [each[f"{name}_nbytes"] / 2**20 for name in ("promised", "held", "floor_sent", "sent")]
        row = r"\s+".join([str(rank), *(re.escape(f"{cell:.2f}") + " MiB" for cell in cells)])
        assert re.search(rf"^\s*{row}$", outcome.stdout, re.MULTILINE), outcome.stdout
    sample = re.search(r"sample after 'class ':\n(class .*)\n\nweights: sha256", outcome.stdout, re.DOTALL)
    assert sample is not None
    assert re.search(r"30/30 .*loss \d.*, [\d,]+ tokens/s, grad norm \d.*, memory per rank [\d.]+ MiB", outcome.stderr)
    assert "Warning" not in outcome.stderr


def test_rows_are_printed_once_and_not_per_rank(outcome: Outcome) -> None:
    assert outcome.stdout.count("parameters, stage") == 1
    assert outcome.stdout.count("weights: sha256") == 1


def test_other_stage_stopped_and_resumed_gives_same_bits(unbroken: Outcome, stopped_and_resumed: Outcome) -> None:
    assert unbroken.summary()["stage"] == 3
    assert stopped_and_resumed.summary()["stage"] == 1
    assert unbroken.summary()["weights_sha256"] == stopped_and_resumed.summary()["weights_sha256"]


def test_killed_run_resumes_bit_for_bit(unbroken: Outcome, tmp_path: Path) -> None:
    killed = tmp_path / "run"
    shutil.copytree(unbroken.out, killed)
    # What is left when the run dies after step 28: no checkpoint and no report of the end, but some metrics.
    shutil.rmtree(killed / "checkpoint-000030")
    (killed / "summary.json").unlink()
    lines = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 28))

    resumed = run_example(killed, "--resume")

    assert "at step 20" in resumed.stdout
    assert "not bit for bit" not in resumed.stdout
    assert resumed.summary()["weights_sha256"] == unbroken.summary()["weights_sha256"]
    assert _losses(resumed) == _losses(unbroken)


def _losses(outcome: Outcome) -> list[tuple[float, float | None, float | None]]:
    return [(each["step"], each.get("train_loss"), each.get("held_out_loss")) for each in outcome.history()]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the example's own modules importable."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def _import(name: str) -> ModuleType:
    return __import__(name)


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nstep = 3", "unknown key of \\[train\\].*'step', expected one like 'steps'"),
        ("[modle]\nwidth = 8", "unknown table.*'modle', expected one like 'model'"),
        ("[train]\naccumulate = 0", "accumulate must be at least 1, got 0"),
        ("[train]\nsteps = 0", "steps must be at least 1, got 0"),
        ("[model]\nwidth = 30", "width must be a multiple of num_heads=4, got 30"),
    ],
)
def test_settings_refuse_what_they_do_not_know(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        _import("settings").read_settings(path, stage=None, steps=None, seed=None)


@pytest.mark.usefixtures("examples")
def test_command_line_goes_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    settings = _import("settings").read_settings(path, stage=1, steps=7, seed=5)
    assert (settings.zero["stage"], settings.train.steps, settings.train.seed) == (1, 7, 5)


@pytest.mark.usefixtures("examples")
def test_ranks_read_disjoint_parts_of_one_batch_and_steps_differ(tmp_path: Path) -> None:
    corpus_module = _import("corpus")
    for index in range(40):
        (tmp_path / f"{index:02}.txt").write_bytes(bytes([index]) * 100)
    config = corpus_module.DataConfig(root=str(tmp_path), pattern="*.txt", held_out_every=20)
    corpus = corpus_module.read_corpus(config, window_numel=9)

    def batch(rows: range, step: int = 3, seed: int = 0) -> torch.Tensor:
        windows: torch.Tensor = corpus.training_windows(step, rows, 8, 9, seed)
        return windows

    whole = batch(range(8))
    assert whole.shape == (8, 9)
    assert torch.equal(torch.cat([batch(range(4)), batch(range(4, 8))]), whole)
    assert torch.equal(batch(range(8)), whole)
    assert not torch.equal(batch(range(8), step=4), whole)
    assert not torch.equal(batch(range(8), seed=1), whole)
    assert set(corpus.held_out.tolist()) == {0, 20}
    assert not {0, 20} & set(corpus.training.tolist())
    assert corpus.training.numel() == 38 * 100


def test_run_that_rolls_back_ends_with_every_step_logged_once(tmp_path: Path) -> None:
    """So narrow a band that a step lies above it, once step 10 has been saved."""
    rollback = "\n[rollback]\nwindow = 11\nspike_streak = 1\nspike_mads = 2.0\nmax_rollbacks = 1000\n"
    outcome = run_example(tmp_path / "run", "--steps", "20", config=TINY + rollback)
    assert re.search(r"step 1\d: a loss spike, loss \d.*; all ranks went back to .*/checkpoint-000010", outcome.stderr)
    steps = [entry["step"] for entry in outcome.history() if "train_loss" in entry]
    assert steps == sorted(set(steps)) and steps[-1] == 20
    assert sorted(path.name for path in outcome.out.glob("checkpoint-*")) == ["checkpoint-000010", "checkpoint-000020"]


def _one_step(root: Path, accumulate: int, stage: int) -> tuple[int, float, float, dict[str, torch.Tensor]]:
    """Number of backwards, this rank's loss, gradient norm and weights of a step of the example."""
    module, path = example("train_gpt"), root / f"{accumulate} {stage} {dist.get_rank()}.toml"
    path.write_text(TINY.replace("batch = 8", f"batch = 8\naccumulate = {accumulate}"))
    settings = module.read_settings(path, stage=stage, steps=None, seed=None)
    peers = module.Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    run, calls = module.build(settings, peers, root), []
    run.model.register_forward_hook(lambda *_: calls.append(1))
    loss, norm = module.take_step(run, 0)
    return len(calls), loss.item(), norm.item(), zero_shard.full_state_dict(run.model)


def _accumulate(root: Path) -> None:
    _, loss, norm, _ = _one_step(root, 1, 2)
    num_calls, accumulated_loss, accumulated_norm, weights = _one_step(root, 2, 2)
    assert num_calls == 2
    assert accumulated_loss == pytest.approx(loss, rel=1e-5)
    assert accumulated_norm == pytest.approx(norm, rel=1e-5)
    *_, other = _one_step(root, 2, 3)
    assert all(torch.equal(weights[name], other[name]) for name in weights), "equal bits at another stage"
    with pytest.raises(ValueError, match="accumulate must be at most the rows of a rank, 4, got 5"):
        _one_step(root, 5, 2)


def test_accumulation_is_the_same_step_in_parts(tmp_path: Path) -> None:
    ranks.run(NUM_RANKS, _accumulate, tmp_path, limit_s=120)
