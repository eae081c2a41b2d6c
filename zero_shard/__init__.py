"""zero_shard: a sharded AdamW for PyTorch."""

from zero_shard.adamw import AdamW
from zero_shard.averaging import ExponentialMovingAverage
from zero_shard.checkpoint import PendingSave, async_save, latest_checkpoint, load, save
from zero_shard.config import ZeroConfig
from zero_shard.gathering import full_state_dict, gathered
from zero_shard.monitor import Monitor
from zero_shard.planning import plan
from zero_shard.promises import Usage
from zero_shard.rollback import Rollback, RollbackConfig, RolledBack
from zero_shard.sharded_grad import ShardedGrad

__all__ = [
    "AdamW",
    "ExponentialMovingAverage",
    "Monitor",
    "PendingSave",
    "Rollback",
    "RollbackConfig",
    "RolledBack",
    "ShardedGrad",
    "Usage",
    "ZeroConfig",
    "async_save",
    "full_state_dict",
    "gathered",
    "latest_checkpoint",
    "load",
    "plan",
    "save",
]
__version__ = "0.1.0"
