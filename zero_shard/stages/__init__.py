"""Stages as layers: see `base` for the contract."""

from __future__ import annotations

from zero_shard.collectives import Communicator
from zero_shard.config import ZeroConfig
from zero_shard.stages.base import Layer, Replication
from zero_shard.stages.gradients import GradientSharding
from zero_shard.stages.optimizer_state import OptimizerStateSharding
from zero_shard.stages.parameters import ParameterSharding


def build_stage(config: ZeroConfig, communicator: Communicator) -> Layer:
    """Stack the layers that ``config.stage`` asks for."""
    match config.stage:
        case 0:
            return Replication(communicator)
        case 1:
            return OptimizerStateSharding(Replication(communicator))
        case 2:
            return GradientSharding(OptimizerStateSharding(Replication(communicator)))
        case _:
            below = GradientSharding(OptimizerStateSharding(Replication(communicator)))
            return ParameterSharding(below, config.reshard_after_forward, config.prefetch)
