"""Fine-tunes a Llama from safetensors in a plain loop, at stage 3, without any rank ever holding the whole model.

    torchrun --standalone --nproc-per-node 2 examples/llama.py                     # a small one, made on the spot
    torchrun --standalone --nproc-per-node 2 examples/llama.py --weights DIR       # of save_pretrained, with its config

The model is built on the meta device, comes to life one unit at a time, and takes its weights from
``model-0000x-of-0000y.safetensors``: each rank reads its own part of each tensor. The text is the source of Python's
standard library, byte by byte. Needs transformers.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from corpus import Corpus, DataConfig, read_corpus
from processes import Ranks, joined
from report import MIB, peak_memory_mib
from torch import Tensor, nn

import zero_shard


def build(
    weights: Path, config: dict[str, Any], lr: float, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, zero_shard.AdamW]:
    """Return the pretrained model and its optimizer. All ranks call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(weights), dtype=dtype)
    for module in model.modules():
        if not hasattr(module, "reset_parameters"):  # norms, and the tables of rotary embeddings
            module.reset_parameters = partial(model._init_weights, module)
    optimizer = zero_shard.AdamW(model.parameters(), lr=lr, weight_decay=0.1, module=model, config=config)
    zero_shard.load(weights, model)
    return model, optimizer


def make_small(weights: Path) -> None:
    """Write a small random Llama over bytes, in several files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=128, use_cache=False, **sizes))
    model.save_pretrained(weights, max_shard_size="1MB")


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy of each next byte of windows [B, T]."""
    logits = model(input_ids=windows[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def train(
    model: nn.Module, optimizer: zero_shard.AdamW, corpus: Corpus, ranks: Ranks, arguments: argparse.Namespace
) -> None:
    """Take steps of several micro-batches each. All ranks call."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, total_steps=arguments.steps, pct_start=0.1)
    rows = arguments.micro_batch * arguments.accumulate  # of this rank
    for step in range(arguments.steps):
        start = time.perf_counter()
        own = range(ranks.rank * rows, (ranks.rank + 1) * rows)
        windows = corpus.training_windows(step, own, rows * ranks.world_size, arguments.context + 1, seed=0)
        total = torch.zeros((), device=ranks.device)
        for micro_batch in windows.to(ranks.device).split(arguments.micro_batch):
            loss = next_byte_loss(model, micro_batch) / arguments.accumulate
            loss.backward()
            total += loss.detach()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 10 == 0 or step in (0, arguments.steps - 1):
            speed = rows * ranks.world_size * arguments.context / (time.perf_counter() - start)
            ranks.say(
                f"step {step + 1:4d}  loss {ranks.mean(total):.4f}  gradient norm {float(norm):.3f}  "
                f"{speed:,.0f} tokens/s  peak memory {peak_memory_mib(ranks.device):,.0f} MiB"
            )


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus, ranks: Ranks, context: int) -> float:
    """Return the loss on held-out text. All ranks call."""
    return float(next_byte_loss(model, corpus.held_out_windows(32, context + 1).to(ranks.device)))


def parse_arguments(*given: str) -> argparse.Namespace:
    """Read the command line, or what is given in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="directory with config.json and safetensors; default: a small one")
    parser.add_argument("--out", type=Path, default=Path("runs/llama"), help="directory of the checkpoint")
    parser.add_argument("--stage", type=int, default=3, help="0 to 3")
    parser.add_argument("--param-dtype", help="bfloat16: compute in it, beside lossless float32 masters")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--micro-batch", type=int, default=4, help="rows of each rank per backward")
    parser.add_argument("--accumulate", type=int, default=2, help="backwards per step")
    parser.add_argument("--context", type=int, default=64, help="bytes of a row")
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args(given or None)


def main() -> None:
    """Fine-tune, say how much it helped, and save."""
    arguments = parse_arguments()
    config = {"stage": arguments.stage, "param_dtype": arguments.param_dtype}
    with joined(timeout_s=120) as ranks:
        weights = arguments.weights
        if weights is None:
            weights = arguments.out / "pretrained"
            if ranks.is_first:
                make_small(weights)
            ranks.barrier()
        model, optimizer = build(weights, config, arguments.lr)
        held_mib = optimizer.usage().held_nbytes / MIB
        ranks.say(f"stage {arguments.stage}, {ranks.describe()}, {held_mib:.1f} MiB of model state on this rank")
        corpus = read_corpus(DataConfig(pattern="*.py"), window_numel=arguments.context + 1)
        before = evaluate(model, corpus, ranks, arguments.context)
        train(model, optimizer, corpus, ranks, arguments)
        after = evaluate(model, corpus, ranks, arguments.context)
        checkpoint = arguments.out / "checkpoint"
        zero_shard.save(checkpoint, model, optimizer)
        ranks.say(
            f"held-out loss: {before:.3f} before, {after:.3f} after\nfor from_pretrained: "
            f"zero-shard ckpt export {checkpoint} {weights}-tuned --format safetensors, and a copy of config.json"
        )


if __name__ == "__main__":
    main()
