"""The time during which an optimizer is in charge of its parameters, and how it leaves them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zero_shard.gathering import register_layer
from zero_shard.sharded_grad import ShardedGrad
from zero_shard.stages.base import Layer
from zero_shard.stages.reduction import Reducer
from zero_shard.stages.slots import GradSlot


class Tenure:
    """Whether an optimizer still trains its parameters: a later one may have taken them over.

    Attributes:
        is_lent: The parameters hold other numbers for a while (averages), which no step may train.
    """

    def __init__(self, stage: Layer, reducer: Reducer) -> None:
        self._stage, self._reducer = stage, reducer
        self._handles: list[list[Any]] = []  # of hooks
        self._lost = ""  # name of a parameter that a later optimizer has taken over
        self.is_lent = False

    def begin(self, optimizer: object) -> None:
        """Leave the parameters when the optimizer is deleted, or when another one takes one of them over."""
        self._handles = [self._reducer.handles, getattr(self._stage, "handles", [])]
        weakref.finalize(optimizer, _leave, self._handles, self._reducer.slots)
        self._stage.at_loss = calling(weakref.WeakMethod(self.end))

    def claim(self) -> None:
        """Take charge of the parameters of all slots; another optimizer of theirs loses them. Local."""
        for slot in self._reducer.slots:
            former = register_layer(slot.param, self._stage)
            if former is not None and former.at_loss is not None:
                former.at_loss(slot.param)

    def end(self, param: nn.Parameter) -> None:
        """Leave the parameters to a later optimizer that has taken over this one. Local."""
        if not self._lost:
            self._lost = next(slot.name for slot in self._reducer.slots if slot.param is param)
            _leave(self._handles, self._reducer.slots)
            for bucket in self._reducer.buckets:
                bucket.is_released = True  # its memory is no longer that of the parameters

    def check_in_charge(self) -> None:
        """Raise RuntimeError if a later optimizer has taken a parameter over. Local."""
        if self._lost:
            raise RuntimeError(
                f"a zero_shard.AdamW that was built later has taken over parameter {self._lost}: one optimizer trains "
                "it at a time. Use the later one, or one optimizer with several groups"
            )

    def check_trainable(self) -> None:
        """Raise RuntimeError if the parameters are not in charge of this optimizer, or lent to averages. Local."""
        self.check_in_charge()
        if self.is_lent:
            raise RuntimeError(
                "the model holds averaged weights, which a step would train; leave ExponentialMovingAverage.applied() "
                "first"
            )


def calling(method: weakref.WeakMethod[Callable[..., None]]) -> Callable[..., None]:
    """Return what calls a method as long as its object is alive."""

    def call(*args: Any) -> None:
        alive = method()
        if alive is not None:
            alive(*args)

    return call


def _leave(lists: Sequence[list[Any]], slots: Sequence[GradSlot]) -> None:
    """Make the parameters of a deleted optimizer ordinary ones again."""
    for handles in lists:
        for handle in handles:
            handle.remove()
    for slot in slots:
        if isinstance(slot.param.grad, ShardedGrad) and slot.param.grad is slot.handed:
            slot.param.grad = slot.handed = None
