"""Hooks of a parameter before and after autograd accumulates its gradient."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from zero_shard.stages.slots import GradSlot


class HookedReducer(Protocol):
    """What the hooks call."""

    slots: list[GradSlot]

    def before_accumulate(self, slot: GradSlot) -> None:
        """Make way for the gradient of this backward."""

    def after_accumulate(self, slot: GradSlot) -> None:
        """Take it."""


def attach(hooked: HookedReducer, slot: GradSlot) -> list[Any]:
    """Register the hooks of a slot's parameter and return their handles."""
    # Weak: hooks live in C++ beside the parameter, where the garbage collector sees no cycle.
    reference, index = weakref.ref(hooked), slot.index

    @unserializable_hook  # type: ignore[untyped-decorator]
    def before(_: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.before_accumulate(alive.slots[index])

    def after(_: nn.Parameter) -> None:
        alive = reference()
        if alive is not None:
            alive.after_accumulate(alive.slots[index])

    with torch._C.DisableTorchFunctionSubclass():
        is_trainable = slot.param.requires_grad
        slot.param.requires_grad_(True)  # torch takes no hook of a frozen parameter, but keeps one
        last = slot.param.register_post_accumulate_grad_hook(after)
        slot.hooks = last.hooks_dict_ref(), last.id
        handles = [slot.param.register_hook(before), last]
        slot.param.requires_grad_(is_trainable)
    return handles
