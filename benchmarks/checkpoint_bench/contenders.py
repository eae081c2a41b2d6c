"""The same GPT under zero_shard, FSDP2 and DeepSpeed: a training step, and the checkpoints of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, VOCABULARY_NUMEL, GPTConfig, next_byte_loss
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zero_shard

Wait = Callable[[], object]
LR = 1e-3
BATCH = 2


class Contender(ABC):
    """One way to train and to keep a model. All ranks call every method.

    Args:
        config: Of the model, which all contenders build alike.
        stage: Of ZeRO.
    """

    name: str

    def __init__(self, config: GPTConfig, stage: int) -> None:
        torch.manual_seed(0)
        self.config, self.stage, self.num_steps = config, stage, 0
        self.module: nn.Module = GPT(config)
        self.numels = [param.numel() for param in self.module.parameters()]

    def windows(self) -> Tensor:
        """Return this rank's batch of the next step."""
        generator = torch.Generator().manual_seed(1000 * self.num_steps + dist.get_rank())
        self.num_steps += 1
        return torch.randint(VOCABULARY_NUMEL, (BATCH, self.config.context + 1), generator=generator)

    @abstractmethod
    def step(self) -> float:
        """Train one step, and return its loss on this rank."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write model and optimizer."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Read them into the live ones."""

    def async_save(self, path: Path) -> Wait:
        """Begin to write, and return what waits for the end.

        Raises:
            NotImplementedError: There is no such thing; the text says why.
        """
        raise NotImplementedError(f"{self.name} has no asynchronous save on a CPU")


class _Plain(Contender):
    """Trains by the plain loop."""

    optimizer: torch.optim.Optimizer

    def step(self) -> float:
        """Train one step."""
        self.optimizer.zero_grad()
        loss = next_byte_loss(self.module, self.windows())
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


class Ours(_Plain):
    """zero_shard."""

    def __init__(self, config: GPTConfig, stage: int) -> None:
        super().__init__(config, stage)
        self.name = f"zero_shard, stage {stage}"
        self.optimizer = zero_shard.AdamW(self.module.parameters(), lr=LR, module=self.module, config={"stage": stage})

    def save(self, path: Path) -> None:
        """Write both."""
        zero_shard.save(path, self.module, self.optimizer)

    def load(self, path: Path) -> None:
        """Read both."""
        zero_shard.load(path, self.module, self.optimizer)

    def async_save(self, path: Path) -> Wait:
        """Begin to write."""
        if not hasattr(zero_shard, "async_save"):
            raise NotImplementedError("this zero_shard has no async_save")
        return zero_shard.async_save(path, self.module, self.optimizer).wait


class FSDP2(_Plain):
    """FSDP2, kept by torch.distributed.checkpoint through its state_dict module."""

    def __init__(self, config: GPTConfig, stage: int) -> None:
        super().__init__(config, stage)
        self.name = "FSDP2 + DCP"
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=LR)
        # DCP talks in a thread of its own while training goes on.
        self._writers = dist.new_group(backend="gloo")

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.module, self.optimizer)
        return {"model": model, "optim": optimizer}

    def save(self, path: Path) -> None:
        """Write both."""
        dcp.save(self._state(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        """Read both."""
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    def async_save(self, path: Path) -> Wait:
        """Begin to write."""
        return dcp.async_save(self._state(), checkpoint_id=path, process_group=self._writers).result


class DeepSpeed(Contender):
    """DeepSpeed with torch's optimizer, as its own needs a compiler."""

    def __init__(self, config: GPTConfig, stage: int) -> None:
        import deepspeed

        super().__init__(config, stage)
        self.name = f"DeepSpeed, stage {stage}"
        settings = {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1_000_000,
        }
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=LR)
        self.engine = deepspeed.initialize(
            model=self.module, optimizer=optimizer, config=settings, dist_init_required=False
        )[0]

    def step(self) -> float:
        """Train one step."""
        loss = next_byte_loss(self.engine, self.windows())
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def save(self, path: Path) -> None:
        """Write both."""
        self.engine.save_checkpoint(str(path))

    def load(self, path: Path) -> None:
        """Read both."""
        if self.engine.load_checkpoint(str(path))[0] is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint at {path}")


CONTENDERS: tuple[tuple[type[Contender], int], ...] = (
    (Ours, 1),
    (Ours, 2),
    (Ours, 3),
    (FSDP2, 3),
    (DeepSpeed, 2),
    (DeepSpeed, 3),
)
"""Each with its stage."""
