"""Checkpoints: ordinary directories of torch.distributed.checkpoint (DCP) that are whole or not there.

    save, async_save   contents (what this rank holds) -> writer (one file) -> directory (manifest, name)
    load               directory (verified) -> index (keys by name) -> reader (straight into place)

docs/checkpoint-format.md is the specification.
"""

from zero_shard.checkpoint.background import PendingSave, async_save
from zero_shard.checkpoint.directory import latest_checkpoint
from zero_shard.checkpoint.loading import load
from zero_shard.checkpoint.saving import save

__all__ = ["PendingSave", "async_save", "latest_checkpoint", "load", "save"]
