"""Hugging Face Trainer with zero_shard.AdamW at every stage.

checkpoint-500/
    model.safetensors     full weights, for from_pretrained
    zero_shard/           what zero_shard.save writes: weights, moments, scheduler, sharded
    trainer_state.json, rng_state_0.pth, ...   as ever
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from torch import nn

from zero_shard.checkpoint import load, save
from zero_shard.checkpoint.contents import holders
from zero_shard.gathering import full_state_dict, gathered
from zero_shard.integrations.accelerate import Accelerator, plain

_DIRECTORY = "zero_shard"


class ShardedTrainerMixin:
    """What ``transformers.Trainer`` and its subclasses need to know of zero_shard: put it before them.

    Example:
        >>> class ShardedSFTTrainer(ShardedTrainerMixin, trl.SFTTrainer): ...
    """

    accelerator: Any
    model: nn.Module
    optimizer: Any
    lr_scheduler: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator one that knows zero_shard."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = Accelerator  # Trainer names the class itself

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and holders(self.model):
            state_dict = full_state_dict(self.model)  # all ranks are here
        named = self.model.named_parameters()
        with gathered([param for name, param in named if ".modules_to_save." in name]):  # peft reads them beside it
            super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = plain(self.optimizer)
        if optimizer is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        else:
            save(Path(output_dir, _DIRECTORY), self.model, optimizer, scheduler=self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_weights(resume_from_checkpoint):
            with gathered(self.model, modify=True):
                super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        if not self._load_weights(self.state.best_model_checkpoint):  # type: ignore[attr-defined]
            with gathered(self.model, modify=True):
                super()._load_best_model()  # type: ignore[misc]

    def _load_weights(self, checkpoint: str) -> bool:
        """Load sharded weights into a sharded model, if both are there."""
        path = Path(checkpoint, _DIRECTORY)
        is_there = bool(holders(self.model)) and path.exists()
        if is_there:
            load(path, self.model)
        return is_there

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        optimizer = plain(self.optimizer)
        if optimizer is None or checkpoint is None or not Path(checkpoint, _DIRECTORY).exists():
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        else:
            path = Path(checkpoint, _DIRECTORY)  # random states are Trainer's
            load(path, self.model, optimizer, random_states=False, scheduler=self.lr_scheduler)


class Trainer(ShardedTrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` that trains, saves and resumes with a ``zero_shard.AdamW`` at any stage.

    Make TrainingArguments first (they join the ranks), then the optimizer.

    Example:
        >>> arguments = transformers.TrainingArguments("runs", bf16=True)
        >>> optimizer = zero_shard.AdamW(model.parameters(), lr=1e-4, module=model, config={"stage": 3})
        >>> Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None)).train()
    """
