"""The end of a backward, where those that took part in it are called.

# Note [Nested backward]
Reentrant checkpointing runs a backward inside a backward. Only the end of the outermost one ends a round; a callback
of the engine can't be queued there from inside. If no hook of ours ran in the outer one, `Reducer.collect` ends the
round.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction


class Participant(Protocol):
    """Who is called."""

    @property
    def number(self) -> int:
        """Place of the optimizer among those on the same ranks."""

    def finish_backward(self) -> None:
        """End the present backward."""


_participants: weakref.WeakSet[Participant] = weakref.WeakSet()


def call_at_end(participant: Participant) -> None:
    """Have the end of the present backward, which is not nested, call the participant."""
    _participants.add(participant)
    torch.autograd.Variable._execution_engine.queue_callback(_finish_all)


def _finish_all() -> None:
    """End the backward of every optimizer that took part in it, in the order in which they were built.

    Ranks may meet the parameters of several optimizers in different orders; their agreements must not cross.
    """
    participants = sorted(_participants, key=lambda participant: participant.number)
    _participants.clear()
    with torch._C._DisableFuncTorch():  # a gradient of torch.func may run this backward; its tensors are not ours
        for participant in participants:
            participant.finish_backward()


def is_inside_node() -> bool:
    """Whether a Python autograd node's backward is on the stack. See Note [Nested backward]."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False
