"""The contract of the stages, and stage 0: everything on every rank.

    layer                      question                                stage  0     1     2     3
    Replication                what if nothing is sharded?                    x     x     x     x
    OptimizerStateSharding     who keeps the optimizer state?                       x     x     x
    GradientSharding           when are gradients reduced and freed?                      x     x
    ParameterSharding          when are parameters whole?                                       x

A stage is layers on top of each other. Each holds the one below, changes the verbs it is about and passes the others
down. All verbs are called by all ranks in the same order; none of them computes an update: that is `AdamW.step`.

    num_shards(limit)      pure; over how many ranks the optimizer state is split
    reduces_in_backward    pure; whether backward returns with reduced gradients
    publish(bucket)        starts to make the updated own shard visible where it is needed; does not block
    finish_publishing()    blocks until every publish is done; parameters may be read again
    before_step()          frees what the step must not find; local
    gathered(params, ...)  context in which the given parameters are whole; may communicate
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from zero_shard.buffers import Bucket
from zero_shard.collectives import Communicator


class Layer:
    """Passes every verb to the layer below."""

    at_loss: Callable[[nn.Parameter], None] | None = None  # set by the optimizer: another one takes a parameter over

    def __init__(self, below: Layer) -> None:
        self.below = below

    @property
    def communicator(self) -> Communicator:
        """The ranks that train together."""
        return self.below.communicator

    @property
    def reduces_in_backward(self) -> bool:
        """Whether backward returns with reduced gradients (outside ``no_sync``)."""
        return self.below.reduces_in_backward

    def num_shards(self, limit: int) -> int:
        """Return over how many ranks the optimizer state is split, at most ``limit``."""
        return self.below.num_shards(limit)

    def publish(self, bucket: Bucket) -> None:
        """Start to make the updated own shard of a bucket visible. All ranks call in the same order."""
        self.below.publish(bucket)

    def finish_publishing(self) -> None:
        """Block until every publish is done."""
        self.below.finish_publishing()

    def before_step(self) -> None:
        """Free what the step must not find. Local."""
        self.below.before_step()

    def gathered(self, params: Sequence[nn.Parameter], modify: bool) -> AbstractContextManager[None]:
        """Return a context in which the given parameters are whole. All ranks enter and leave."""
        return self.below.gathered(params, modify)


class Replication(Layer):
    """Stage 0: gradients are averaged in backward, every rank updates everything."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    @property
    def communicator(self) -> Communicator:
        """The ranks that train together."""
        return self._communicator

    @property
    def reduces_in_backward(self) -> bool:
        """True: backward returns with mean gradients on every rank."""
        return True

    def num_shards(self, limit: int) -> int:
        """Return 1: the state is not split; the ranks are replicas of each other."""
        return 1

    def publish(self, bucket: Bucket) -> None:
        """Do nothing: every rank has computed the whole update."""

    def finish_publishing(self) -> None:
        """Do nothing."""

    def before_step(self) -> None:
        """Do nothing."""

    def gathered(self, params: Sequence[nn.Parameter], modify: bool) -> AbstractContextManager[None]:
        """Return an empty context: parameters are whole. Every rank must make the same change."""
        return nullcontext()
