"""Steps of the real code on fake tensors under a fake process group: what a rank holds, sends and does."""

from zero_shard.rehearsal.auto import choose_stage
from zero_shard.rehearsal.memory import KINDS
from zero_shard.rehearsal.run import Phase, Rehearsal, optimizer_maker, rehearse
from zero_shard.rehearsal.skeleton import Skeleton

__all__ = ["KINDS", "Phase", "Rehearsal", "Skeleton", "choose_stage", "optimizer_maker", "rehearse"]
