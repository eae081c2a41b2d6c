"""Watching a run: numbers of every step, to a progress bar, JSON lines and TensorBoard."""

from zero_shard.monitor.monitor import Monitor

__all__ = ["Monitor"]
