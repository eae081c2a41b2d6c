"""Hugging Face accelerate: an Accelerator that leaves averaging, sharding and their checkpoints to zero_shard.AdamW.

prepare            the model is not wrapped in DistributedDataParallel, which would average once more
no_sync            gradients of all but the last micro-batch stay local
clip_grad_norm_    folded into step(), with equal bits at every stage
get_state_dict     full weights on rank 0
save_state         <directory>/zero_shard_0: what zero_shard.save writes; the rest as ever
load_state         the same, at any stage and number of ranks
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import accelerate
from torch import Tensor, nn

from zero_shard.adamw import AdamW
from zero_shard.checkpoint import load, save
from zero_shard.checkpoint.contents import holders
from zero_shard.gathering import full_state_dict

_Trained = dict[str, tuple[AdamW, list[nn.Module]]]  # name of the checkpoint -> optimizer, models


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` for models that a ``zero_shard.AdamW`` trains; all others are treated as ever.

    Make it first (it makes the process group), then the optimizer, then ``prepare`` everything.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare as ever, but for the wrapper that averages gradients.

        Raises:
            ValueError: The optimizer trains with other ranks than these.
        """
        held = holders(model)
        for each in held:
            if each.ranks.num_ranks != self.num_processes:
                raise ValueError(
                    f"zero_shard.AdamW was built for {each.ranks.num_ranks} ranks, accelerate runs "
                    f"{self.num_processes}; make the Accelerator (or TrainingArguments), which joins the ranks, before "
                    "the optimizer"
                )
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode or bool(held))
        return prepared

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep the gradients of backward passes inside local."""
        with ExitStack() as stack:
            held = holders(model)  # of a compiled model, too, which is another object than the prepared one
            for optimizer, _ in self._trained().values():
                if optimizer.held in held:
                    stack.enter_context(optimizer.no_sync())
            stack.enter_context(super().no_sync(model))
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip as ever; all parameters of a zero_shard.AdamW in its next step. All ranks must call."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for optimizer, _ in self._trained().values():
            groups = optimizer.param_groups
            if _trainable(parameters) == _trainable([param for group in groups for param in group["params"]]):
                self.unscale_gradients()
                return optimizer.clip_grad_norm_(max_norm, norm_type)
        norm: Tensor = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return full weights on rank 0, {} elsewhere, of a model that zero_shard trains. All ranks must call."""
        if holders(model):
            return full_state_dict(self.unwrap_model(model) if unwrap else model)
        state_dict: dict[str, Any] = super().get_state_dict(model, unwrap)
        return state_dict

    def save_state(self, *args: Any, **kwargs: Any) -> Path:
        """Save as ever, and what zero_shard trains beside it, sharded. All ranks must call."""
        trained = self._trained()
        with self._set_aside(trained):
            directory: Path = super().save_state(*args, **kwargs)
        for name, (optimizer, models) in trained.items():
            save(directory / name, _as_one(models), optimizer)
        return directory

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` has written. All ranks must call."""
        trained = self._trained()

        def load_trained(_: Any, directory: str | os.PathLike[str]) -> None:
            for name, (optimizer, models) in trained.items():
                load(Path(directory) / name, _as_one(models), optimizer, random_states=False)  # accelerate does

        handle = self.register_load_state_pre_hook(load_trained)
        try:
            with self._set_aside(trained):
                super().load_state(*args, **kwargs)
        finally:
            handle.remove()

    def _trained(self) -> _Trained:
        """Return every prepared zero_shard.AdamW with the prepared models that it trains."""
        optimizers = [own for each in self._optimizers if (own := plain(each)) is not None]
        return {
            f"zero_shard_{number}": (own, [model for model in self._models if own.held in holders(model)])
            for number, own in enumerate(optimizers)
        }

    @contextmanager
    def _set_aside(self, trained: _Trained) -> Iterator[None]:
        """Let accelerate handle only models and optimizers that are not ours."""
        everything = self._models, self._optimizers
        ours = {id(model) for _, models in trained.values() for model in models}
        for name, (_, models) in trained.items():
            if not models:
                raise RuntimeError(f"no prepared model belongs to the optimizer of {name}; pass it to prepare, too")
        self._models = [model for model in self._models if id(model) not in ours]
        self._optimizers = [each for each in self._optimizers if plain(each) is None]
        try:
            yield
        finally:
            self._models, self._optimizers = everything


def plain(optimizer: Any) -> AdamW | None:
    """Return the zero_shard.AdamW inside of accelerate's wrapper, or as it is; None if it is another optimizer."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, AdamW) else None


def _trainable(params: Sequence[Tensor]) -> set[int]:
    return {id(param) for param in params if param.requires_grad}


def _as_one(models: list[nn.Module]) -> nn.Module:
    return models[0] if len(models) == 1 else nn.ModuleList(models)
