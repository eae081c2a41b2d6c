"""Hugging Face accelerate: one loop with torch.optim.AdamW in DistributedDataParallel, and with zero_shard.AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from hugging_face import CLOSE, LIMIT_S, adamw, as_under_torchrun, needs, run_example, snapshot
from oracle import EXACT, assert_ranks_agree, assert_snapshots_close
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero_shard

pytestmark = needs("accelerate")

STAGES = (0, 1, 2, 3)
D = torch.float64


class _Net(nn.Module):
    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(torch.tanh(self.norm(self.first(x))))


class _Run(NamedTuple):
    accelerator: Any
    model: Any
    optimizer: Any
    scheduler: Any
    norms: list[float]


def _prepared(stage: int | None, seed: int = 0, dtype: torch.dtype = D, **options: Any) -> tuple[_Run, Any]:
    """Set everything up as the script does; ``stage`` None is plain torch and accelerate's own Accelerator."""
    import accelerate

    from zero_shard.integrations.accelerate import Accelerator

    accelerator_class = accelerate.Accelerator if stage is None else Accelerator
    accelerator = accelerator_class(gradient_accumulation_steps=2, **options)
    model = _Net(seed, dtype)
    optimizer = adamw(model, stage)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rows = torch.randn(52, 6, generator=torch.Generator().manual_seed(5), dtype=dtype)
    loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=4)  # 13 batches: 7 for each rank
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    return _Run(accelerator, model, optimizer, scheduler, []), loader


def _train(run: _Run, loader: Any) -> None:
    for x, y in loader:
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(nn.functional.mse_loss(run.model(x), y))
            if run.accelerator.sync_gradients:
                run.norms.append(float(run.accelerator.clip_grad_norm_(run.model.parameters(), 0.7)))
            run.optimizer.step()
            run.scheduler.step()
            run.optimizer.zero_grad()


def _assert_same(run: _Run, want: _Run, where: str) -> None:
    got, expected = (snapshot(each.accelerator.unwrap_model(each.model), each.optimizer) for each in (run, want))
    if dist.get_rank() == 0:
        assert_snapshots_close(got, expected, CLOSE, where)
    assert run.norms == pytest.approx(want.norms[-len(run.norms) :], rel=1e-9), where
    assert run.scheduler.get_last_lr() == want.scheduler.get_last_lr(), where


def _train_and_resume(out: Path) -> None:
    with as_under_torchrun():
        want, loader = _prepared(None)
        _train(want, loader)
        _train(want, loader)
        for stage in STAGES:
            run, loader = _prepared(stage)
            assert type(run.model) is _Net, "gradients are averaged once"
            _train(run, loader)
            run.accelerator.save_state(str(out / str(stage)))
            _train(run, loader)
            _assert_same(run, want, f"stage {stage}")
            weights = run.accelerator.get_state_dict(run.model)
            run.accelerator.save_model(run.model, str(out / f"model {stage}"))
            if dist.get_rank() == 0:
                for name, param in want.accelerator.unwrap_model(want.model).named_parameters():
                    torch.testing.assert_close(weights[name], param.detach(), rtol=1e-9, atol=1e-9)
            del run
            other = (stage + 1) % 4
            resumed, loader = _prepared(other, seed=1)
            resumed.accelerator.load_state(str(out / str(stage)))
            _train(resumed, loader)
            _assert_same(resumed, want, f"saved at stage {stage}, resumed at stage {other}")
            assert float(resumed.model.calls) == 2 * len(loader)


def test_a_plain_loop_with_accumulation_gives_the_same_model_and_resumes(tmp_path: Path) -> None:
    ranks.run(2, _train_and_resume, tmp_path, limit_s=LIMIT_S)


def _sent(is_told_the_model: bool, **options: Any) -> int:
    """Return the bytes of a step with two micro-batches."""
    with as_under_torchrun():
        run, loader = _prepared(2, **options)
        for x, y in list(loader)[:4]:
            with run.accelerator.accumulate(*([run.model] if is_told_the_model else [])):
                run.accelerator.backward(nn.functional.mse_loss(run.model(x), y))
                run.optimizer.step()
                run.optimizer.zero_grad()
        sent: int = run.optimizer.optimizer.usage().sent_nbytes
        return sent


def _accumulate() -> tuple[int, int, int]:
    return _sent(True), _sent(True, dynamo_backend="eager"), _sent(False)


def test_only_the_last_micro_batch_of_a_step_is_sent() -> None:
    for sent, compiled, in_full in ranks.run(2, _accumulate, limit_s=LIMIT_S):
        assert sent < 0.8 * in_full  # 2 against 3 times the parameters
        assert compiled == sent


def _train_in_bf16(out: Path) -> None:
    with as_under_torchrun():
        snapshots = []
        for stage in (None, *STAGES):
            run, loader = _prepared(stage, dtype=torch.float32, mixed_precision="bf16")
            _train(run, loader)
            snapshots.append(snapshot(run.accelerator.unwrap_model(run.model), run.optimizer))
        if dist.get_rank() == 0:
            plain, first, *others = snapshots
            assert plain["first.weight"]["param"].dtype == torch.float32
            for stage, other in enumerate(others, start=1):
                assert_snapshots_close(other, first, EXACT, f"stage {stage}")
            for name, entry in plain.items():  # each gradient is rounded to 8 bits on its way
                for key, value in entry.items():
                    torch.testing.assert_close(first[name][key], value, rtol=0.05, atol=2e-3, msg=f"{key} of {name}")


def test_bf16_is_the_same_at_every_stage(tmp_path: Path) -> None:
    ranks.run(2, _train_in_bf16, tmp_path, limit_s=LIMIT_S)


def _train_two_models(out: Path) -> None:
    """Two models of two optimizers, and a third that plain torch trains in DistributedDataParallel."""
    from zero_shard.integrations.accelerate import Accelerator

    with as_under_torchrun():

        def build(seed: int) -> tuple[Any, list[Any], list[Any]]:
            accelerator = Accelerator()
            models = [_Net(seed + number, D) for number in range(3)]
            optimizers = [adamw(model, stage) for model, stage in zip(models, (3, 1, None), strict=True)]
            prepared = accelerator.prepare(*models, *optimizers)
            return accelerator, list(prepared[:3]), list(prepared[3:])

        def step(models: list[Any], optimizers: list[Any]) -> None:
            x = torch.ones(2, 6, dtype=D) * (1 + dist.get_rank())
            sum(model(x).square().sum() for model in models).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        accelerator, models, optimizers = build(seed=0)
        assert [type(model) is _Net for model in models] == [True, True, False]
        step(models, optimizers)
        accelerator.save_state(str(out))
        step(models, optimizers)
        want = [snapshot(accelerator.unwrap_model(m), o) for m, o in zip(models, optimizers, strict=True)]
        accelerator, models, optimizers = build(seed=10)
        accelerator.load_state(str(out))
        step(models, optimizers)
        got = [snapshot(accelerator.unwrap_model(m), o) for m, o in zip(models, optimizers, strict=True)]
        if dist.get_rank() == 0:
            for number in range(3):
                assert_snapshots_close(got[number], want[number], EXACT, f"model {number}")
        for model in models:
            assert_ranks_agree(accelerator.unwrap_model(model))


def test_several_models_beside_one_that_plain_torch_trains(tmp_path: Path) -> None:
    ranks.run(2, _train_two_models, tmp_path, limit_s=LIMIT_S)


def _refuse() -> None:
    from zero_shard.integrations.accelerate import Accelerator

    groups = [dist.new_group([rank]) for rank in range(2)]
    with as_under_torchrun():
        accelerator = Accelerator()
        model = _Net(0, D)
        optimizer = zero_shard.AdamW(model.parameters(), process_group=groups[dist.get_rank()])
        with pytest.raises(ValueError, match=r"built for 1 ranks, accelerate runs 2; make the Accelerator .* before"):
            accelerator.prepare(model, optimizer)
        accelerator = Accelerator()
        model = _Net(0, D)
        accelerator.prepare(zero_shard.AdamW(model.parameters()))
        with pytest.raises(RuntimeError, match=r"no prepared model belongs to .*zero_shard_0; pass it to prepare"):
            accelerator.save_state("unused")


def test_ranks_that_do_not_train_together_and_models_that_would_not_be_saved_are_refused(tmp_path: Path) -> None:
    ranks.run(2, _refuse, limit_s=LIMIT_S)


def _run_the_example(out: Path) -> list[float]:
    with as_under_torchrun():
        return [
            run_example("accelerate_loop", *stage, "--epochs", "1", "--rows", "64", "--out", str(out / "-".join(stage)))
            for stage in ((), ("--stage", "3"))
        ]


def test_the_example_runs_and_both_ways_agree(tmp_path: Path) -> None:
    losses = ranks.run(2, _run_the_example, tmp_path, limit_s=LIMIT_S)
    for plain, ours in losses:
        assert ours == pytest.approx(plain, rel=1e-3)
        assert ours < 5.6  # ln 256 = 5.55 is where it begins
