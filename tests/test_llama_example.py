"""The Llama that is fine-tuned from safetensors: as in plain torch, and the file that it ends with loads there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from example_runs import example, run_main
from oracle import Tolerance, assert_snapshots_close, plain_snapshot, sharded_snapshot
from torch import Tensor, nn

import zero_shard

pytest.importorskip("transformers", reason="examples/llama.py needs transformers")

_STEPS, _LR, _CONTEXT = 3, 1e-3, 12


class _Corpus:
    """Bytes at random, of the example's form."""

    def training_windows(self, step: int, rows: range, num_rows: int, window_numel: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randint(50, (num_rows, window_numel), generator=generator)[rows.start : rows.stop]


def _write(weights: Path, is_tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, max_position_embeddings=16, tie_word_embeddings=is_tied, **sizes)
    LlamaForCausalLM(config).save_pretrained(weights, max_shard_size="20KB")
    assert len(list(weights.glob("*.safetensors"))) > 2


def _plain(weights: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What the example does, by torch alone on the rows of both ranks."""
    from transformers import AutoModelForCausalLM

    module = example("llama")
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LR, total_steps=_STEPS, pct_start=0.1)
    for step in range(_STEPS):
        module.next_byte_loss(model, _Corpus().training_windows(step, range(8), 8, _CONTEXT + 1, 0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model, optimizer


def _compare(weights: Path) -> None:
    from transformers import AutoModelForCausalLM

    module, want = example("llama"), plain_snapshot(*_plain(weights))
    loaded = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float64).state_dict()
    options = ("--steps", str(_STEPS), "--lr", str(_LR), "--micro-batch", "2", "--accumulate", "2")
    arguments = module.parse_arguments(*options, "--context", str(_CONTEXT))
    peers = module.Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    for stage in (3, 2, 0):
        model, optimizer = module.build(weights, {"stage": stage}, _LR, torch.float64)
        start: dict[str, Any] = zero_shard.full_state_dict(model)
        module.train(model, optimizer, _Corpus(), peers, arguments)
        got = sharded_snapshot(model, optimizer)
        if dist.get_rank() == 0:
            assert start.keys() == loaded.keys()
            assert all(torch.equal(start[name], loaded[name]) for name in loaded), "the weights of the files"
            assert_snapshots_close(got, want, Tolerance(1e-9, 1e-9), f"stage {stage}")


@pytest.mark.parametrize("is_tied", [False, True])
def test_trains_as_plain_torch_does_from_the_same_files(tmp_path: Path, is_tied: bool) -> None:
    _write(tmp_path / "weights", is_tied)
    ranks.run(2, _compare, tmp_path / "weights", limit_s=120)


def test_the_example_runs_and_what_it_saves_can_be_loaded(tmp_path: Path) -> None:
    printed = run_main("llama", "--out", str(tmp_path), "--steps", "12", "--context", "32", "--lr", "5e-3")
    before, after = map(float, re.findall(r"held-out loss: ([\d.]+) before, ([\d.]+) after", printed)[0])
    assert before > 5.0 and after < 0.8 * before
    assert printed.count("step ") == 3 and "tokens/s" in printed and "stage 3, 2 ranks on cpu over gloo" in printed

    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "pretrained"))
    zero_shard.load(tmp_path / "checkpoint", model)
    corpus = example("corpus")
    text = corpus.read_corpus(corpus.DataConfig(pattern="*.py"), window_numel=33)
    peers = example("processes").Ranks(0, 1, torch.device("cpu"))
    assert abs(example("llama").evaluate(model, text, peers, 32) - after) < 1e-3
