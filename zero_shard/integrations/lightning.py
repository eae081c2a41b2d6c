"""Lightning: a strategy for ``lightning.pytorch.Trainer`` that leaves the model unwrapped and gradients to AdamW.

ddp                    launches ranks, one group, samplers, sync_dist          kept
DDP around the model   averages gradients                                      left away: zero_shard.AdamW does
checkpoint             one file, everything through rank 0                     a directory of zero_shard.save
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from zero_shard.adamw import AdamW
from zero_shard.checkpoint import load, save
from zero_shard.config import ZeroConfig, load_config
from zero_shard.gathering import gathered

try:
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError(
        "zero_shard.integrations.lightning needs lightning: pip install 'zero-shard[lightning]'"
    ) from error


class ZeroShardStrategy(DDPStrategy):
    """Trains a LightningModule whose ``configure_optimizers`` returns one zero_shard.AdamW, at stages 0 to 3.

    Launches and talks as ``strategy="ddp"`` does. Whole steps run as the module's forward, so that stage 3 gathers
    ahead. Checkpoints are directories, written by `zero_shard.save` and resumed at any stage and number of ranks.

    Args:
        config: What ``configure_optimizers`` passes on as ``config=self.trainer.strategy.config``: a ZeroConfig, a
            mapping or the path of a file.
        ddp_options: Of DDPStrategy, those that do not concern the wrapper: ``process_group_backend``, ``timeout``,
            ``start_method``, plugins.
        fields: Single fields of the ZeroConfig, in place of ``config``.
    Raises:
        ValueError, TypeError: Of ZeroConfig.

    Attributes:
        config: The ZeroConfig.

    Example:
        >>> class Model(lightning.pytorch.LightningModule):
        ...     def configure_optimizers(self):
        ...         config = self.trainer.strategy.config
        ...         return zero_shard.AdamW(self.parameters(), lr=1e-3, module=self, config=config)
        >>> trainer = lightning.pytorch.Trainer(devices=2, strategy=ZeroShardStrategy(stage=3))
    """

    strategy_name = "zero_shard"

    def __init__(self, config: Any = None, *, ddp_options: Mapping[str, Any] | None = None, **fields: Any) -> None:
        if config is not None and fields:
            raise ValueError(f"pass either config or fields of it, got config and {', '.join(sorted(fields))}")
        super().__init__(**(ddp_options or {}))
        self.config: ZeroConfig = load_config(fields if config is None else config)

    # ---- set-up --------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Make model and optimizer ready. All ranks call."""
        if trainer.state.fn == TrainerFn.FITTING or not self.optimizers:
            super().setup(trainer)
        else:  # evaluation after a fit: the model is where it belongs, at stage 3 in shards
            self.accelerator.setup(trainer)
            self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        """Leave the model unwrapped."""

    def model_to_device(self) -> None:
        """Move the model, unless it is still on the meta device: the optimizer brings it to life."""
        if not any(param.is_meta for param in self.model.parameters()):
            super().model_to_device()

    def setup_optimizers(self, trainer: Any) -> None:
        """Call ``configure_optimizers``. All ranks call.

        Raises:
            TypeError: It did not return one zero_shard.AdamW.
        """
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1 or not isinstance(self.optimizers[0], AdamW):
            found = ", ".join(f"{type(each).__module__}.{type(each).__qualname__}" for each in self.optimizers)
            raise TypeError(
                "configure_optimizers must return one zero_shard.AdamW under ZeroShardStrategy, got "
                f"{found or 'none'}; return zero_shard.AdamW(self.parameters(), lr=..., module=self, "
                "config=self.trainer.strategy.config)"
            )

    def teardown(self) -> None:
        """Let go of what Lightning holds. The model stays where it is: its shards live in the optimizer."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- steps ---------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step as its forward."""
        with self.precision_plugin.train_step_context():
            return self._as_forward("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step as its forward."""
        with self.precision_plugin.val_step_context():
            return self._as_forward("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test step as its forward."""
        with self.precision_plugin.test_step_context():
            return self._as_forward("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's predict step as its forward."""
        with self.precision_plugin.predict_step_context():
            return self._as_forward("predict_step", *args, **kwargs)

    def _as_forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._forward_redirection(self.lightning_module, self.lightning_module, name, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep gradients local until the last backward of a step."""
        with self.optimizers[0].no_sync():
            yield

    # ---- checkpoints ---------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Yes: the optimizer must be there."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """No: `load_checkpoint` does."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` writes the weights."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` writes the state."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint with `zero_shard.save`, Lightning's own entries as an extra. All ranks call.

        Raises:
            TypeError: ``storage_options``, or an entry that can't be loaded without running code, by its key.
        """
        if storage_options is not None:
            raise TypeError(
                "storage_options are of a CheckpointIO, which ZeroShardStrategy does not use; leave them out"
            )
        save(filepath, self.lightning_module, self.optimizers[0], lightning=checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a directory of `save_checkpoint`, or a file that ``strategy="ddp"`` has written. All ranks call."""
        optimizer = self.optimizers[0] if self.lightning_module.trainer.state.fn == TrainerFn.FITTING else None
        if not os.path.isfile(checkpoint_path):
            extra = load(checkpoint_path, self.lightning_module, optimizer)
            checkpoint: dict[str, Any] = extra.get("lightning", {})
            return checkpoint
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        with gathered(self.lightning_module, modify=True):
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=self.lightning_module.strict_loading)
        if optimizer is not None:
            optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has."""
