"""What a sharded gradient asks of the optimizer that holds it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class GradSource(Protocol):
    """Where a ShardedGrad gets its numbers from (the slot of its parameter)."""

    name: str
    generation: int  # grows when the gradient is dropped

    def reduced_part(self) -> Tensor:
        """Return this rank's part of the mean gradient, reducing first if need be (then all ranks must call)."""

    def note_access(self) -> None:
        """Note that the gradient may change. Local."""

    def note_change(self) -> None:
        """Note that an operator has changed the gradient in place: all ranks call, none waits."""

    def own_part(self, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor, 1-d, an alias or a copy. Local."""

    def counted_part(self, part: Tensor) -> Tensor:
        """Return what of the own part this rank speaks for among replicas. Local."""

    def gather_full(self, part: Tensor) -> Tensor:
        """Return the full tensor of which each rank has a part; all ranks must call."""

    def norm(self, order: float) -> Tensor:
        """Return the norm of the mean gradient; all ranks must call."""

    def norm_of_part(self, part: Tensor, order: float) -> Tensor:
        """Return the norm of a tensor of which each rank has a part; all ranks must call."""

    def from_all_ranks(self, values: Tensor) -> Tensor:
        """Return [W, n] from a small tensor [n] of each rank; all ranks must call."""
