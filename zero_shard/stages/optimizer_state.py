"""Stage 1: each rank keeps the moments of its own range, updates that range, and gathers the others'.

    bucket      | range 0 | range 1 | range 2 | range 3 |
    rank 1      |  stale  | updated |  stale  |  stale  |   after its update
                |  <----  gather  in  place   ---->     |   own slice is sent from where it lies
    all ranks   | updated | updated | updated | updated |

The gather of a bucket runs while the next bucket is being updated.
"""

from __future__ import annotations

from zero_shard.buffers import Bucket
from zero_shard.collectives import Pending
from zero_shard.stages.base import Layer


class OptimizerStateSharding(Layer):
    """Splits the optimizer state over the shard group; gradients wait until they are read.

    Source: ZeRO (arXiv:1910.02054), P_os.
    """

    def __init__(self, below: Layer) -> None:
        super().__init__(below)
        self._gathers: list[Pending] = []

    @property
    def reduces_in_backward(self) -> bool:
        """False: several backwards add up locally and are reduced once, at the first read."""
        return False

    def num_shards(self, limit: int) -> int:
        """Return ``limit``: as many shards as ranks may share one copy."""
        return limit

    def publish(self, bucket: Bucket) -> None:
        """Start to gather the bucket in place."""
        label = f"the updated parameters of {bucket.label}"
        self._gathers.append(
            self.communicator.all_gather_(self.communicator.shards, bucket.full, 3 * bucket.index + 1, label)
        )

    def finish_publishing(self) -> None:
        """Block until all gathers are done."""
        gathers, self._gathers = self._gathers, []
        for gather in gathers:
            gather.wait()
