"""One unit: parameters that are gathered as one, and what needs them whole at the moment."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import nn

from zero_shard.buffers import RELEASED_VERSIONS, Bucket
from zero_shard.collectives import Pending


class UnitState(Enum):
    """Where the full parameters of a unit are."""

    RELEASED = "only the own shard is here"
    GATHERING = "the other shards are on their way"
    WHOLE = "parameters may be read"


class Unit:
    """Parameters that are gathered as one, and why they are whole at the moment.

    Args:
        index: Number among the units, the same on all ranks.
        name: For messages.
        modules: Those whose forward needs the unit.
        buckets: One per dtype, device and trainability.
    """

    def __init__(self, index: int, name: str, modules: Sequence[nn.Module], buckets: Sequence[Bucket]) -> None:
        self.index, self.name = index, name
        self.modules, self.buckets = list(modules), list(buckets)
        self.params = tuple(param for bucket in buckets for param in bucket.params)
        self.state = UnitState.WHOLE
        self.gathers: list[Pending] = []
        self.version = self.count_changes()
        self.num_pins = 0  # `gathered` contexts
        self.num_forwards = 0  # forwards that are running
        self.num_promised = 0  # gathers that the schedule has started and nobody has used or discarded
        self.is_in_backward = False
        self.awaits_backward = False  # kept whole between forward and backward
        self.is_stuck = False  # nothing will tell when it is done with, so it stays whole until the step
        self.last_call = (0, False)  # number of the latest call, and whether its inputs need gradients
        self.open_calls: set[int] = set()  # calls in backward whose input gradients are not complete
        self.placeholders = [
            [torch.full((), torch.nan, dtype=b.dtype, device=b.device).expand(p.shape) for p in b.params]
            for b in buckets
        ]

    @property
    def is_in_use(self) -> bool:
        """Whether something needs the unit whole."""
        is_kept = self.is_in_backward or self.awaits_backward or self.is_stuck
        return bool(self.num_pins or self.num_forwards or self.num_promised or is_kept)

    @property
    def is_trainable(self) -> bool:
        """Whether a parameter of the unit takes a gradient."""
        return any(param.requires_grad for param in self.params)

    @property
    def has_frozen(self) -> bool:
        """Whether a parameter of the unit takes no gradient."""
        return not all(param.requires_grad for param in self.params)

    def count_changes(self) -> int:
        """Return a number that grows with every change of a parameter in place."""
        return sum(param._version for param in self.params)

    def lock(self) -> None:
        """Make autograd refuse what it saved of the parameters, until `unlock`."""
        self._move_versions(RELEASED_VERSIONS)

    def unlock(self) -> None:
        """Undo `lock`; changes counted in between stay counted."""
        self._move_versions(-RELEASED_VERSIONS)

    def _move_versions(self, distance: int) -> None:
        versions = tuple(param._version + distance for param in self.params)
        torch._C._autograd._unsafe_set_version_counter(self.params, versions)

    @property
    def storages(self) -> set[int]:
        """Identities of the storages that the unit's parameters live in."""
        return {bucket.full.untyped_storage()._cdata for bucket in self.buckets}
