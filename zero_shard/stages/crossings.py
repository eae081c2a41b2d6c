"""When sums of gradients cross from one copy of the shards to the others.

# Note [Crossing replicas]
Where ranks share copies (hybrid sharding), every backward reduces inside the shard group and adds to
``bucket.partial``. The sums cross replicas, over the slower links, once per step: in its last backward, bucket by
bucket under what is left of it. Which one is the last? As many as the last step had are expected, one at the start.
Where fewer come, the sums cross at the first read or in `step()`; where more come, what they add crosses there once
more. Until then a gradient is pending, as it is under ``no_sync``.

The order of additions does not depend on it, unless the number of backwards changes: within a shard group first, then
over backwards, then across.
"""

from __future__ import annotations

from zero_shard.collectives import Communicator


class Crossings:
    """Counts the rounds of a step.

    Args:
        communicator: The ranks.
    Attributes:
        is_due: Sums wait in buckets, on all ranks alike.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.is_due = False
        self._communicator = communicator
        self._num_rounds, self._num_expected = 0, 1

    def begin_round(self, can_wait: bool) -> bool:
        """Return whether the sums of a round that begins are to cross in it. Local, equal on all ranks."""
        self._num_rounds += 1
        can_wait &= self._communicator.shards.num_ranks > 1 and self._communicator.replicas.num_ranks > 1
        return not can_wait or self._num_rounds == self._num_expected

    def end_step(self) -> None:
        """Expect as many rounds in the next step as in this one."""
        self._num_expected, self._num_rounds = max(self._num_rounds, 1), 0

    def drop(self, set_to_none: bool) -> None:
        """Forget the rounds so far: their gradients have been dropped, or set to zero."""
        self._num_rounds = 0
        self.is_due &= not set_to_none
