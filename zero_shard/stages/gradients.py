"""Stage 2: gradients are reduced bucket by bucket during backward, and only the own range is kept.

backward   ... grad 7, grad 6 | grad 5, grad 4 | ...      full gradients of the bucket that is filling
exchange        bucket 0      |    bucket 1    |          one in flight
kept       [own range of 0]    [own range of 1]           fp32, until zero_grad
"""

from __future__ import annotations

from zero_shard.stages.base import Layer


class GradientSharding(Layer):
    """Reduces gradients in backward and frees the full ones.

    Source: ZeRO (arXiv:1910.02054), P_os+g.
    """

    @property
    def reduces_in_backward(self) -> bool:
        """True: each backward adds its mean gradient to the own range."""
        return True
