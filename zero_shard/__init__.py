"""zero_shard: a sharded AdamW for PyTorch."""

import importlib
from typing import TYPE_CHECKING, Any

from zero_shard.adamw import AdamW
from zero_shard.averaging import ExponentialMovingAverage
from zero_shard.config import ZeroConfig
from zero_shard.gathering import full_state_dict, gathered
from zero_shard.monitor import Monitor
from zero_shard.planning import plan
from zero_shard.promises import Usage
from zero_shard.sharded_grad import ShardedGrad

if TYPE_CHECKING:
    from zero_shard.checkpoint import PendingSave, async_save, latest_checkpoint, load, save
    from zero_shard.rollback import Rollback, RollbackConfig, RolledBack

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

# Their engine, torch.distributed.checkpoint, is a large part of torch: they are imported with the first use.
_IMPORTED_LATER = {
    **dict.fromkeys(("PendingSave", "async_save", "latest_checkpoint", "load", "save"), "zero_shard.checkpoint"),
    **dict.fromkeys(("Rollback", "RollbackConfig", "RolledBack"), "zero_shard.rollback"),
}


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "rollback"):
        return importlib.import_module(f"zero_shard.{name}")
    if name in _IMPORTED_LATER:
        return getattr(importlib.import_module(_IMPORTED_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
