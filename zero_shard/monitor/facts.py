"""What a run is: config, size, hardware, versions."""

from __future__ import annotations

import dataclasses
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from zero_shard.adamw import AdamW

SCHEMA = 1


def facts_of_run(optimizer: AdamW, device: torch.device) -> dict[str, Any]:
    """Return the line that begins a run. Local."""
    ranks, buckets = optimizer.held.ranks, optimizer.held.buckets
    return {
        "kind": "run",
        "schema": SCHEMA,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "world_size": ranks.num_ranks,
        "stage": optimizer.config.stage,
        "config": {key: _plain(value) for key, value in dataclasses.asdict(optimizer.config).items()},
        "num_params": sum(slot.numel for bucket in buckets for slot in bucket.layout.slots),
        "floor_sent_mib": optimizer.usage().floor_sent_nbytes / 2**20,
        "hardware": _hardware(device),
        "versions": {
            "zero_shard": _own_version(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads per rank"


def _own_version() -> str:
    try:
        return version("zero-shard")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"
