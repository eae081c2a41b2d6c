"""Trains a small Llama with Hugging Face's accelerate, and continues from its checkpoint.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py                # torch.optim.AdamW, in DDP
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --stage 3      # zero_shard.AdamW

The text is the source of Python's standard library. Needs accelerate and transformers: pip install 'zero-shard[hf]'.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from finetune import ByteLlama, read_source
from torch.utils.data import DataLoader, TensorDataset

import zero_shard
from zero_shard.integrations.accelerate import Accelerator  # in place of: from accelerate import Accelerator


def main() -> float:
    """Train, save after every epoch, and return the loss at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, help="0 to 3: zero_shard.AdamW; left out: torch.optim.AdamW")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1024, help="of 64 bytes, in an epoch")
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"))
    arguments = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)  # first: it joins the ranks
    torch.manual_seed(0)
    model = ByteLlama().to(accelerator.device)
    if arguments.stage is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    else:
        optimizer = zero_shard.AdamW(model.parameters(), lr=3e-3, module=model, config={"stage": arguments.stage})
    loader = DataLoader(TensorDataset(read_source()[0][: arguments.rows]), batch_size=8, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.epochs * len(loader) // 2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(arguments.epochs):
        for (ids,) in loader:
            with accelerator.accumulate(model):
                logits = model(ids[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        mean = float(accelerator.reduce(loss.detach(), "mean"))
        accelerator.print(f"epoch {epoch + 1}: loss {mean:.3f}")
        accelerator.save_state(str(arguments.out))

    accelerator.wait_for_everyone()
    accelerator.load_state(str(arguments.out))  # at any stage, and with any number of ranks
    weights = accelerator.get_state_dict(model)  # whole, on the main process
    accelerator.print(f"{sum(weight.numel() for weight in weights.values()):,} numbers saved in {arguments.out}")
    accelerator.end_training()
    return mean


if __name__ == "__main__":
    main()
