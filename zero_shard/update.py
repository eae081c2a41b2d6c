"""One update of this rank's shards: tables, then a kernel and a publish for every bucket."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_shard.buffers import Bucket
from zero_shard.collectives import Communicator
from zero_shard.held_state import HeldState
from zero_shard.masters import note_weights
from zero_shard.ops import Kernels
from zero_shard.phases import Phase
from zero_shard.stages.reduction import Reducer
from zero_shard.tables import SlotTables


class Factors(NamedTuple):
    """What the norm of the gradient has to say about an update, 0-dim tensors or None."""

    scale: Tensor | None  # of the gradient
    found_inf: Tensor | None  # not 0: nothing is updated


class Update:
    """Updates every parameter that has a reduced gradient.

    Args:
        is_checked: Compare over the ranks which parameters have a gradient (``check="every_step"``).
    """

    def __init__(
        self, held: HeldState, reducer: Reducer, tables: SlotTables, kernels: Kernels, is_checked: bool
    ) -> None:
        self._held, self._reducer, self._tables, self._kernels = held, reducer, tables, kernels
        self._is_checked = is_checked

    def run(self, groups: Sequence[dict[str, Any]], factors: Factors) -> None:
        """Update the shards and make them visible. All ranks call; communicates."""
        flags = self._reducer.gradients.active_flags()
        if self._is_checked:
            _compare_flags(flags, self._reducer, self._held.ranks)
        updated = self._tables.begin_step(flags, self._reducer.slots, groups, factors.found_inf)
        is_updated = updated.numpy()
        calls, changed = [], []  # all of Python first: the kernels drive it out of the caches
        for bucket in self._reducer.buckets:
            flags_here = is_updated[bucket.slots.start : bucket.slots.stop]
            if flags_here.any():
                calls.append((bucket, self._arguments(bucket, groups, factors)))
                changed.append(bucket.params if flags_here.all() else list(compress(bucket.params, flags_here)))
        for bucket, arguments in calls:
            with Phase("update", bucket.label):
                self._kernels.adamw_(*arguments)
                self._held.publish(bucket)
        with Phase("publish"):
            self._held.finish_publishing()
        with torch._C.DisableTorchFunctionSubclass():
            for params in changed:
                torch.autograd.graph.increment_version(params)
        for (bucket, _), params in zip(calls, changed, strict=True):
            note_weights(bucket, len(params))
        self._held.show(updated)

    def _arguments(self, bucket: Bucket, groups: Sequence[dict[str, Any]], factors: Factors) -> tuple[Any, ...]:
        """Return what ``adamw_`` takes to update a bucket."""
        bucket.allocate_state()
        if bucket.max_exp_avg_sq is None and any(group["amsgrad"] for group in groups):
            bucket.allocate_max_exp_avg_sq()
            self._held.show_anew()
        scale, found_inf = factors
        return (
            bucket.shard,
            bucket.low,
            *self._reducer.gradient_of(bucket),
            bucket.exp_avg,
            bucket.exp_avg_sq,
            bucket.max_exp_avg_sq,
            bucket.exp_avg_scale,
            bucket.exp_avg_sq_scale,
            bucket.segment_table,
            *self._tables.on(bucket.device),
            None if scale is None else scale.to(device=bucket.device, dtype=bucket.math_dtype),
            None if found_inf is None else found_inf.to(bucket.device),
            bucket.storage.is_stochastic,
        )


def _compare_flags(flags: Tensor, reducer: Reducer, ranks: Communicator) -> None:
    lowest = ranks.agree(flags.clone(), "min", "the check of every step")
    highest = ranks.agree(flags.clone(), "max", "the check of every step")
    differing = (lowest != highest).nonzero().flatten().tolist()
    if differing:
        names = ", ".join(reducer.slots[index].name for index in differing[:4])
        raise RuntimeError(
            f"ranks differ in which parameters have a gradient: {names}. Clear gradients on all ranks alike"
        )
