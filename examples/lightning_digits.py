"""Trains the vision transformer of vit.py with Lightning's Trainer, at any stage.

    python examples/lightning_digits.py --stage 3                      # Lightning starts the ranks
    torchrun --standalone --nproc-per-node 2 examples/lightning_digits.py --stage 3

``--resume`` goes on from the last checkpoint, at another stage if asked. Needs lightning and scikit-learn.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from vit import NUM_HELD_OUT, VisionTransformer, read_digits

import zero_shard
from zero_shard.integrations.lightning import ZeroShardStrategy


class Digits(LightningModule):
    """A classifier of pictures, as any LightningModule is written."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.model, self.lr = VisionTransformer(), lr

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        is_right = self.model(batch[0]).argmax(1) == batch[1]
        self.log("accuracy", is_right.double().mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        config = self.trainer.strategy.config
        optimizer = zero_shard.AdamW(self.parameters(), lr=self.lr, weight_decay=0.05, module=self, config=config)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 60))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    """Train, validate after each epoch, keep the best checkpoint and the last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, help="0 to 3")
    parser.add_argument("--epochs", type=int, default=18)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, default=Path("runs/lightning_digits"), help="directory of checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    arguments = parser.parse_args()
    seed_everything(0, verbose=False)
    pictures, digits = read_digits()
    training = TensorDataset(pictures[NUM_HELD_OUT:], digits[NUM_HELD_OUT:])
    held_out = TensorDataset(pictures[:NUM_HELD_OUT], digits[:NUM_HELD_OUT])
    trainer = Trainer(
        accelerator="auto" if torch.cuda.device_count() > 1 else "cpu",
        devices=2,
        strategy=ZeroShardStrategy(stage=arguments.stage),
        max_epochs=arguments.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(arguments.out, monitor="accuracy", mode="max", save_last=True)],
    )
    trainer.fit(
        Digits(arguments.lr),
        DataLoader(training, batch_size=32, shuffle=True),
        DataLoader(held_out, batch_size=60),
        ckpt_path=arguments.out / "last.ckpt" if arguments.resume else None,
    )
    if trainer.is_global_zero:
        accuracy = 100 * trainer.callback_metrics["accuracy"].item()
        print(f"accuracy on {NUM_HELD_OUT} held-out digits after epoch {trainer.current_epoch}: {accuracy:.1f} %")


if __name__ == "__main__":
    main()
