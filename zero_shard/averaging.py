"""Exponential moving average of the weights, sharded like the optimizer state.

    weights   shard [n], as the stage stores them      updated by step()
    average   [n] fp32 (fp64 for fp64), own range only updated by update(), locally

``applied()`` writes the averages into the shards and has the stage publish them, as after a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_shard.adamw import AdamW
from zero_shard.buffers import Bucket
from zero_shard.masters import watch
from zero_shard.number_formats import join_remainder, split_remainder
from zero_shard.state import LAYOUT_KEY

_CHUNK_NUMEL = 1 << 20  # of 16-bit weights, which are averaged as float32, so many at a time
_WHILE_APPLIED = "the model holds averaged weights (ExponentialMovingAverage.applied); leave the context first"


class _Saved(NamedTuple):
    """What ``applied`` puts aside of a bucket."""

    bucket: Bucket
    shard: Tensor
    low: Tensor | None


class ExponentialMovingAverage:
    """Keeps ``average = decay * average + (1 - decay) * weight`` for every parameter that an optimizer trains.

    The numbers are those of ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``: the first
    update copies the weights. It works at every stage and costs 4/N bytes per parameter (8/N for float64) on N ranks;
    16-bit weights are averaged by their float32 masters. Buffers (BatchNorm) are not averaged.

    Args:
        optimizer: Whose parameters are averaged, those that are unfrozen or added later, too.
        decay: In [0, 1], or a function that gives it for the number of updates before this one (warm-up).
    Raises:
        ValueError: The decay is not in [0, 1].

    Example:
        >>> average = zero_shard.ExponentialMovingAverage(optimizer, decay=0.999)
        >>> optimizer.step()
        >>> average.update()
        >>> with average.applied():
        ...     evaluate(model)
    """

    def __init__(self, optimizer: AdamW, decay: float | Callable[[int], float] = 0.999) -> None:
        self.optimizer, self.decay = optimizer, decay
        self.num_updates = 0
        self._averages: dict[Bucket, Tensor] = {}  # [n]
        if not callable(decay):
            _check_decay(decay)
        optimizer.held.averages.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExponentialMovingAverage:
        """Return the same averages over a deep copy of the optimizer. Local."""
        copied = type(self)(copy.deepcopy(self.optimizer, memo), self.decay)
        memo[id(self)] = copied
        copied.num_updates = self.num_updates
        twins = zip(self.optimizer.held.buckets, copied.optimizer.held.buckets, strict=True)
        copied._averages = {twin: self._averages[b].clone() for b, twin in twins if b in self._averages}
        return copied

    @torch.no_grad()
    def begin_new(self) -> None:
        """Let parameters that a first step is about to train be averaged from their weights before it. Local."""
        for bucket in self.optimizer.held.buckets if self.num_updates else ():
            if bucket not in self._averages and any(param.requires_grad for param in bucket.params):
                self._add(bucket)

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights into the average; call it after ``optimizer.step()``. Local, one pass."""
        self.optimizer.held.check_in_charge()
        if self.optimizer.held.is_lent:
            raise RuntimeError(f"update() would average the averages: {_WHILE_APPLIED}")
        self.optimizer.held.take_back_replaced()
        decay = _check_decay(self.decay(self.num_updates) if callable(self.decay) else self.decay)
        for bucket in self.optimizer.held.buckets:
            average = self._averages.get(bucket)
            if average is not None:
                for part, weights in _chunks(bucket, average):
                    part.lerp_(weights, 1 - decay)
            elif any(param.requires_grad for param in bucket.params):
                self._add(bucket)
        self.num_updates += 1

    def _add(self, bucket: Bucket) -> Tensor:
        """Let the average of a bucket begin at its weights."""
        average = self._averages[bucket] = torch.empty_like(bucket.shard, dtype=bucket.math_dtype)
        for part, weights in _chunks(bucket, average):
            part.copy_(weights)
        return average

    # ---- checkpoints --------------------------------------------------------------------------------------

    def shards(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Yield each bucket that is averaged, with the average of the own range [n]."""
        yield from self._averages.items()

    def room(self, bucket: Bucket) -> Tensor:
        """Return where the average of a bucket's own range [n] is, from now on. Local."""
        return self._averages[bucket] if bucket in self._averages else self._add(bucket)

    # ---- use -----------------------------------------------------------------------------------------------

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the model use the averaged weights inside; afterwards it has its own again, bit for bit.

        All ranks enter and leave; communicates as the end of a step does. Costs one more copy of the shard meanwhile.
        Everything that reads weights (forward, ``gathered``, ``full_state_dict``, ``zero_shard.save``) sees averages.

        Raises:
            RuntimeError: There is no average yet, or (by ``optimizer.step()`` inside) training went on.
        """
        self.optimizer.held.check_in_charge()
        if self.optimizer.held.is_lent:
            raise RuntimeError(f"applied() is active already: {_WHILE_APPLIED}")
        if self.num_updates == 0:
            raise RuntimeError("there is no average of the weights yet; call update() after a step first")
        self.optimizer.held.take_back_replaced()
        saved = [_Saved(b, b.shard.clone(), None if b.low is None else b.low.clone()) for b in self._averages]
        self.optimizer.held.is_lent = True
        try:
            self._publish([(bucket, *_stored(bucket, average)) for bucket, average in self._averages.items()])
            yield
        finally:
            self.optimizer.held.is_lent = False
            self._publish(saved)

    @torch.no_grad()
    def _publish(self, weights: list[tuple[Bucket, Tensor, Tensor | None]] | list[_Saved]) -> None:
        held, params = self.optimizer.held, []
        held.before_publishing()
        for bucket, shard, low in weights:
            bucket.shard.copy_(shard)
            if low is not None and bucket.low is not None:
                bucket.low.copy_(low)
            held.publish(bucket)
            params += bucket.params
        held.finish_publishing()
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version(params)  # a graph across the change would have wrong gradients
        for bucket, *_ in weights:
            watch(bucket)

    # ---- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the averages by name (aliases); never communicates.

        Loads at the same stage, world size and config; `full_state_dict` loads anywhere.
        """
        averages = {name: bucket.local_part(self._averages[bucket], at) for name, bucket, at in self._entries()}
        layout = {name: _place(bucket, position) for name, bucket, position in self._entries()}
        return {"num_updates": self.num_updates, "averages": averages, LAYOUT_KEY: layout}

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """Return whole averages by name on the CPU of rank 0, {} elsewhere. All ranks call; one bucket at a time."""
        ranks = self.optimizer.held.ranks
        averages: dict[str, Tensor] = {}
        for bucket, average in self._averages.items():
            full = average.new_empty(bucket.layout.numel)
            full[bucket.own_range] = average
            label = f"the averages of {bucket.label}"
            ranks.all_gather_(ranks.shards, full, 3 * bucket.index + 2, label).wait()
            for name, view, slot in zip(bucket.names, bucket.views, bucket.layout.slots, strict=True):
                if ranks.rank == 0:
                    averages[name] = full.as_strided(view.shape, view.stride(), slot.offset).to("cpu", copy=True)
        return {"num_updates": self.num_updates, "averages": averages} if ranks.rank == 0 else {}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` of the same layout, or a full one, which every rank must have. Never communicates.

        Raises:
            ValueError: A parameter is missing, unknown or has another shape or place. Nothing has been changed then.
            RuntimeError: The averages are applied.
        """
        if self.optimizer.held.is_lent:
            raise RuntimeError(f"load_state_dict() would be undone: {_WHILE_APPLIED}")
        averages, layout = dict(state_dict["averages"]), state_dict.get(LAYOUT_KEY)
        loaded: list[tuple[Bucket, int, Tensor]] = []
        buckets = self.optimizer.held.buckets
        for bucket in buckets:
            for position, name in enumerate(bucket.names):
                if name in averages:
                    loaded.append((bucket, position, _own_part(bucket, position, averages.pop(name), layout)))
                elif bucket.params[position].requires_grad and state_dict["num_updates"]:
                    raise ValueError(f"the averages have no {name}, which the optimizer trains")
        if averages:
            raise ValueError(f"the averages have {next(iter(averages))}, which the optimizer does not have")
        self._averages = {}
        for bucket, position, part in loaded:
            average = self._averages[bucket] if bucket in self._averages else self._add(bucket)
            bucket.local_part(average, position).copy_(part)
        self.num_updates = state_dict["num_updates"]

    def _entries(self) -> Iterator[tuple[str, Bucket, int]]:
        for bucket in self._averages:
            for position, name in enumerate(bucket.names):
                yield name, bucket, position


def _check_decay(decay: float) -> float:
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must be in [0, 1], got {decay!r}")
    return float(decay)


def _chunks(bucket: Bucket, average: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of an average with the weights there, in the dtype of the average."""
    low, shard = bucket.low, bucket.shard
    if low is None and shard.dtype == average.dtype:
        yield average, shard
        return
    for start in range(0, average.numel(), _CHUNK_NUMEL):
        part = slice(start, start + _CHUNK_NUMEL)
        if low is not None and low.dtype == torch.int16:
            yield average[part], join_remainder(shard[part], low[part])
        else:
            yield average[part], (shard if low is None else low)[part].to(average.dtype)


def _stored(bucket: Bucket, average: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return an average as the bucket stores weights: shard, and the rest of the master."""
    if bucket.low is None:
        return average, None
    return split_remainder(average) if bucket.low.dtype == torch.int16 else (average, average)


def _place(bucket: Bucket, position: int) -> tuple[int, int, int]:
    """Return which elements of a parameter are this rank's: start, count, count of the whole."""
    segment, numel = bucket.segment_of.get(position), bucket.layout.slots[position].numel
    return (0, 0, numel) if segment is None else (segment.param_start, segment.numel, numel)


def _own_part(bucket: Bucket, position: int, value: Tensor, layout: Mapping[str, Any] | None) -> Tensor:
    """Return this rank's part, 1-d in memory order, of what a state dict has for a parameter."""
    name, view = bucket.names[position], bucket.views[position]
    start, numel, _ = place = _place(bucket, position)
    if layout is not None:
        if tuple(layout[name]) != place:
            raise ValueError(
                f"the averages hold elements {tuple(layout[name])[:2]} (start, count) of {name}, this rank owns "
                f"{place[:2]}; they were saved with another stage, world size or config. Use full_state_dict()"
            )
        return value
    if value.shape != view.shape:
        raise ValueError(f"the average of {name} has shape {tuple(value.shape)}, expected {tuple(view.shape)}")
    whole = torch.empty_strided(view.shape, view.stride(), dtype=value.dtype).copy_(value)
    return whole.as_strided((view.numel(),), (1,))[start : start + numel]
