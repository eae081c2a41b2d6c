"""The wire: the only place that calls torch.distributed."""

from zero_shard.collectives.agreements import Agreements
from zero_shard.collectives.communicator import Communicator
from zero_shard.collectives.groups import ProcessGroup, Ranks, World, name_of_host, world
from zero_shard.collectives.pending import DRAIN, Hop, Pending, Received, default_rank

__all__ = [
    "DRAIN",
    "Agreements",
    "Communicator",
    "Hop",
    "Pending",
    "ProcessGroup",
    "Ranks",
    "Received",
    "World",
    "default_rank",
    "name_of_host",
    "world",
]
