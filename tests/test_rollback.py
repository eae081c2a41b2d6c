"""Rollback: NaN streaks and loss spikes end in the last good checkpoint, on all ranks, and in no other one."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_shard

_CONFIG = {"nonfinite_streak": 2, "spike_streak": 2, "window": 4}
_NUM_STEPS = 12
_BAD_STEPS = (7, 8)


class _Run:
    """A loop as a user writes it: a checkpoint at step 0 and every second one, a scheduler, dropout."""

    def __init__(self, out: str, stage: int, config: dict[str, Any], **zero: Any) -> None:
        torch.manual_seed(5)
        self.out = out
        self.model = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Dropout(0.1), nn.Linear(30, 3))
        self.optimizer = zero_shard.AdamW(
            self.model.parameters(), lr=1e-3, module=self.model, config={"stage": stage, **zero}
        )
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.rollback = zero_shard.Rollback(out, self.model, self.optimizer, config, scheduler=self.scheduler)
        self.seen: list[zero_shard.RolledBack] = []

    def save(self, step: int, is_async: bool = False) -> None:
        save = zero_shard.async_save if is_async else zero_shard.save
        save(f"{self.out}/step-{step:03}", self.model, self.optimizer, scheduler=self.scheduler, keep=4)

    def loss(self, step: int, poison: float) -> Tensor:
        """The mean over ranks is smooth in the steps; poison is a factor on the last rank's."""
        rows = torch.arange(24.0).view(4, 6).add(step + 100 * dist.get_rank()).sin()
        factor = poison if dist.get_rank() == dist.get_world_size() - 1 else 1.0
        return (1 + self.model(rows).square().mean()) * factor

    def step(self, step: int, poison: float = 1.0) -> Tensor:
        loss = self.loss(step, poison)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self, poison: float, saves_in_trouble: bool = False, leaves_out: bool = True) -> None:
        self.save(0)
        step = 0
        while step < _NUM_STEPS:
            step += 1
            if leaves_out and step in self.rollback.bad_steps:
                continue
            back = self.rollback.check(step, self.step(step, poison if step in _BAD_STEPS else 1.0))
            if back is not None:
                self.seen.append(back)
                step = back.step
            elif step % 2 == 0 and (self.rollback.is_well or saves_in_trouble):
                self.save(step, is_async=step == 6)
            elif saves_in_trouble and step in _BAD_STEPS:
                self.save(step)

    def digest(self) -> list[Tensor]:
        held = [t for b in self.optimizer.held.buckets for t in (b.shard, b.exp_avg, b.exp_avg_sq)]
        counts = torch.tensor(self.optimizer.held.step_counts())
        return [t.clone() for t in held if t is not None] + [counts, torch.rand(3)]


def _roll_back_and_compare(out: str, poison: float) -> list[tuple[Any, ...]]:
    found = []
    for stage in range(4):
        run = _Run(f"{out}/{stage}", stage, _CONFIG)
        run.train(poison)
        (back,), ours = run.seen, run.digest()
        reference = _Run(f"{out}/{stage}-again", stage, _CONFIG)
        zero_shard.load(back.path, reference.model, reference.optimizer, scheduler=reference.scheduler)
        for step in range(back.step + 1, _NUM_STEPS + 1):
            if step not in _BAD_STEPS:
                reference.step(step)
        assert reference.scheduler.state_dict() == run.scheduler.state_dict()
        theirs = reference.digest()
        assert len(ours) == len(theirs) > 3
        assert all(map(torch.equal, ours, theirs)), f"stage {stage}"
        found.append((back.step, back.bad_steps, back.reason, sorted(run.rollback.bad_steps)))
    return found


@pytest.mark.parametrize(("poison", "reason"), [(math.nan, "not finite, loss nan"), (1e4, "a loss spike, loss ")])
def test_poisoned_run_goes_on_as_one_that_never_saw_the_batches(tmp_path: Path, poison: float, reason: str) -> None:
    on_ranks = ranks.run(2, _roll_back_and_compare, str(tmp_path), poison)
    assert on_ranks[0] == on_ranks[1]
    for step, bad_steps, text, left_out in on_ranks[0]:
        assert (step, list(bad_steps), left_out) == (6, [7, 8], [7, 8])
        assert text.startswith(f"steps 7 to 8: {reason}")


def _save_in_trouble(out: str) -> tuple[int, list[str], list[str]]:
    run = _Run(out, 2, {**_CONFIG, "spike_streak": 3})
    run.save(0)
    run.save(500)  # of another run, from whose beginning this one goes on
    for step in range(1, 9):
        assert run.rollback.check(step, run.step(step, 1e4 if step > 6 else 1.0)) is None
        assert run.rollback.is_well == (step <= 6)
        if step > 4:
            zero_shard.async_save(f"{out}/step-{step:03}", run.model, run.optimizer, scheduler=run.scheduler)
    before = sorted(path.name for path in Path(out).glob("step-*"))
    back = run.rollback.check(9, run.step(9, 1e4))
    assert back is not None
    dist.barrier()
    return back.step, before, sorted(path.name for path in Path(out).glob("step-*"))


def test_checkpoint_saved_amid_the_spike_is_not_taken_and_goes(tmp_path: Path) -> None:
    for step, before, after in ranks.run(2, _save_in_trouble, str(tmp_path)):
        assert step == 6
        assert {"step-000", "step-005", "step-006", "step-007"} <= set(before)
        assert after == ["step-000", "step-005", "step-006", "step-500"], (
            "a restarted run must not find the bad ones either"
        )


def _use_up(out: str) -> list[int]:
    run = _Run(out, 1, {**_CONFIG, "max_rollbacks": 2})
    try:
        run.train(math.nan, leaves_out=False)
    except RuntimeError as error:
        error.args = (f"{error} went back to {[back.step for back in run.seen]}",)
        raise
    return []


def test_used_up_rollbacks_raise_on_all_ranks_with_what_happened(tmp_path: Path) -> None:
    errors = ranks.run_expecting_errors(2, _use_up, str(tmp_path))
    for error in errors:
        assert isinstance(error, RuntimeError)
        # The first step after step 6 is bad again, so those weights are doubted, and step 4's are taken.
        pattern = (
            r"after 2 rollbacks, and max_rollbacks is 2: steps 7 to 8: not finite, loss nan, back to step 6; steps 7 "
            r"to 8: not finite, loss nan, back to step 4; steps 7 to 8: .* went back to \[6, 4\]"
        )
        assert re.search(pattern, str(error)), error


def _damaged_weights(out: str) -> list[int]:
    """Save weights that are NaN already: no step shows it before the next one."""
    run = _Run(out, 3, _CONFIG)
    run.save(0)
    for step in range(1, 5):
        assert run.rollback.check(step, run.step(step)) is None
    run.save(4)
    run.loss(5, 1e4).mul(math.nan).backward()
    run.optimizer.step()
    assert run.rollback.check(5, 1.1) is None
    run.save(5)
    went_back, step = [], 5
    while len(went_back) < 2:
        step += 1
        if back := run.rollback.check(step, run.step(step)):
            went_back.append(back.step)
            step = back.step
    assert run.rollback.check(5, run.step(5)) is None
    return went_back


def test_checkpoint_whose_weights_are_damaged_is_given_up(tmp_path: Path) -> None:
    assert ranks.run(2, _damaged_weights, str(tmp_path)) == [[5, 4], [5, 4]]


def _no_checkpoint(out: str, has_later: bool) -> None:
    run = _Run(out, 0, {**_CONFIG, "nonfinite_streak": 1})
    if has_later:
        run.save(3)
    run.rollback.check(3, run.step(3, math.inf))


@pytest.mark.parametrize(("has_later", "names"), [(False, "none"), (True, "step-003")])
def test_no_checkpoint_from_before_is_a_clear_error_on_all_ranks(tmp_path: Path, has_later: bool, names: str) -> None:
    errors = ranks.run_expecting_errors(2, _no_checkpoint, str(tmp_path), has_later)
    text = (
        rf"training has gone wrong \(step 3: not finite, loss nan\), but {tmp_path} has no complete checkpoint from "
        rf"before step 3 to go back to; it has {names}\. Save one before the first step"
    )
    assert isinstance(errors[0], FileNotFoundError) and isinstance(errors[1], RuntimeError)
    assert all(re.search(text.replace("nan", "(nan|inf)"), str(error)) for error in errors)


def _overflow(out: str) -> tuple[int, bool]:
    """The loss is finite, the gradient is not: the step is skipped, and only the norm tells."""
    run = _Run(out, 2, {**_CONFIG, "nonfinite_streak": 3})
    run.save(0)
    for step in range(1, 4):
        loss = run.loss(step, 1.0)
        loss.register_hook(lambda grad: grad * math.inf)
        loss.backward()
        norm = run.optimizer.clip_grad_norm_(1.0)
        run.optimizer.zero_grad()
        back = run.rollback.check(step, loss, norm)
    return (-1, False) if back is None else (back.step, run.rollback.is_well)


def test_gradient_norm_tells_of_overflows_that_leave_the_loss_finite(tmp_path: Path) -> None:
    assert ranks.run(2, _overflow, str(tmp_path)) == [(0, True)] * 2


def test_an_outlier_a_fall_and_a_plateau_are_no_spikes(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = zero_shard.AdamW(model.parameters(), module=model)
    rollback = zero_shard.Rollback(tmp_path, model, optimizer, {"window": 10})
    falling = [5 * 0.97**step + 0.05 * math.sin(7 * step) for step in range(100)]
    flat = [0.2] * 20 + [0.21, 0.2, 0.21] + [50.0, 0.2, math.nan, 0.2, 50.0, 50.0, 0.2]
    for step, loss in enumerate(falling + flat):
        assert rollback.check(step, loss) is None
    assert rollback.is_well
    never = zero_shard.Rollback(tmp_path, model, optimizer, {"window": 10, "spike_mads": math.inf})
    assert all(never.check(step, 10.0 ** max(step, 20)) is None for step in range(40))


def test_one_rank_without_a_group_goes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    optimizer = zero_shard.AdamW(model.parameters(), module=model)
    zero_shard.save(tmp_path / "checkpoint-1", model, optimizer, note="here")
    rollback = zero_shard.Rollback(tmp_path, model, optimizer, {"nonfinite_streak": 1})
    with caplog.at_level(logging.WARNING, "zero_shard"):
        back = rollback.check(2, torch.tensor(math.nan))
    assert back is not None and back.extra["note"] == "here" and back.path == tmp_path / "checkpoint-1"
    assert "step 2: not finite, loss nan; all ranks went back to" in caplog.text


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"nonfinite_strek": 3}, ValueError, "unknown config key 'nonfinite_strek'.*did you mean 'nonfinite_streak'"),
        ({"window": 3}, ValueError, "window must be an integer of at least 4, got 3"),
        ({"window": 10.0}, TypeError, r"window must be an integer of at least 4, got 10\.0"),
        ({"max_rollbacks": True}, TypeError, "max_rollbacks must be an integer of at least 0, got True"),
        ({"spike_mads": -1}, ValueError, "spike_mads must be a positive number, got -1"),
        ({"spike_mads": "10"}, TypeError, "spike_mads must be a positive number, got '10'"),
        (7, TypeError, "config must be a RollbackConfig, a mapping or a path, got int: 7"),
    ],
)
def test_bad_settings_are_refused_by_name(tmp_path: Path, config: Any, error: type[Exception], text: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = zero_shard.AdamW(model.parameters(), module=model)
    with pytest.raises(error, match=text):
        zero_shard.Rollback(tmp_path, model, optimizer, config)


def test_a_loss_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    rollback = zero_shard.Rollback(tmp_path, model, zero_shard.AdamW(model.parameters(), module=model))
    with pytest.raises(TypeError, match="NoneType"):
        rollback.check(1, None)  # type: ignore[arg-type]


def test_settings_come_from_a_table_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[zero]\nstage = 1\n[rollback]\nspike_mads = inf\nnonfinite_streak = 5\n")
    model = nn.Linear(2, 2)
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config=tmp_path / "run.toml")
    rollback = zero_shard.Rollback(tmp_path, model, optimizer, tmp_path / "run.toml")
    assert rollback.config == zero_shard.RollbackConfig(nonfinite_streak=5, spike_mads=math.inf)
