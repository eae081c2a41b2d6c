"""Clipping by the global norm of the mean gradient, folded into the update.

# Note [Folded clip]
``clip_grad_norm_`` leaves the gradients as they are and keeps a coefficient, a 0-dim tensor, by which the kernels scale
as they read. Several clips multiply. Another backward must not add to gradients that are yet to be scaled, so the
reducer has `Clip.apply` scale them for good before it begins. Gradients that outlive the step (nobody calls
``zero_grad``) are scaled for good before anything is added to them, or used again: `Clip.settle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_shard.phases import Phase
from zero_shard.stages.reduction import Reducer
from zero_shard.tables import SlotTables


class Clip:
    """The factor by which the next update scales the mean gradient.

    Attributes:
        coefficient: 0-dim, equal on all ranks; None = as it is.
    """

    def __init__(self, reducer: Reducer, tables: SlotTables) -> None:
        self._reducer, self._tables = reducer, tables
        self.coefficient: Tensor | None = None
        self._spent: Tensor | None = None  # of the last step, on gradients that have not been dropped since

    def global_norm(self, groups: Sequence[dict[str, Any]], order: float = 2.0) -> Tensor:
        """Return the norm of the mean gradient of all parameters of the groups, 0-dim. All ranks call."""
        is_owned = self._tables.owned_flags(self._reducer.slots, groups)
        self._reducer.exchanges.takes_squares |= order == 2
        with Phase("norm"):
            return self._reducer.norms.global_norm(order, is_owned)

    def fold(self, groups: Sequence[dict[str, Any]], max_norm: float, order: float = 2.0) -> Tensor:
        """Have the next update scale the gradient, as it stands clipped so far, to a norm of at most ``max_norm``.

        All ranks call.

        Returns:
            The norm before, 0-dim.
        """
        norm, before = self.global_norm(groups, order), self.coefficient
        norm = norm if before is None else norm * before
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self.coefficient = coefficient if before is None else before * coefficient
        return norm

    @torch.no_grad()
    def apply(self) -> None:
        """Scale reduced gradients for good before another backward adds to them."""
        self.settle()
        coefficient, self.coefficient = self.coefficient, None
        if coefficient is not None:
            self._reducer.gradients.scale_replaced(coefficient)
            self._scale(coefficient)

    def after_step(self) -> None:
        """Keep the factor that a step has used for gradients that stay; the next ones are not clipped."""
        self._spent, self.coefficient = self.coefficient, None

    @torch.no_grad()
    def settle(self) -> None:
        """Scale for good what the last step has used scaled, unless it has been dropped since. Local."""
        spent, self._spent = self._spent, None
        if spent is not None:
            self._reducer.gradients.notice_drops()
            self._scale(spent)

    def forget(self) -> None:
        """Forget all factors: the gradients are dropped."""
        self.coefficient = self._spent = None

    def _scale(self, factor: Tensor) -> None:
        for bucket in self._reducer.buckets:
            if bucket.grad is not None:
                bucket.grad.mul_(factor.to(bucket.grad))
                bucket.has_sums = False

    def apply_alone(self, groups: Sequence[dict[str, Any]]) -> None:
        """Scale plain gradients, in a world of one, where nothing tells when the next backward adds to them."""
        coefficient, self.coefficient = self.coefficient, None
        assert coefficient is not None
        for group in groups:
            for param in group["params"]:
                grad: Tensor | None = param.grad
                if grad is not None:
                    grad.mul_(coefficient.to(grad.device))
