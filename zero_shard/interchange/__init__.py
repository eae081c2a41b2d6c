"""Checkpoints of other libraries, read without them."""

from zero_shard.interchange.apex import read_apex
from zero_shard.interchange.deepspeed import read_deepspeed
from zero_shard.interchange.imported import Imported, LazyTensor

__all__ = ["Imported", "LazyTensor", "read_apex", "read_deepspeed"]
