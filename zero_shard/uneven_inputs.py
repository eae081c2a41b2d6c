"""``torch.distributed.algorithms.Join``: a rank that has run out of data takes part in what the others still do.

    rank 0   backward ........ step ....   backward ........ step ....   leaves Join
    rank 1   leaves Join;  [round, step]             [round, step]

In the context a rank says what it is about to do before each collective operation. One that has left its loop follows:
its absent gradients count as zero, so that the mean is over all ranks, as it is in DistributedDataParallel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import torch

from zero_shard.collectives import Communicator
from zero_shard.stages.reduction import Reducer

_HYPER = ("lr", "eps", "weight_decay", "amsgrad", "maximize")
_LABEL = "the notice of an operation inside Join"


class Operation(IntEnum):
    """What ranks do together."""

    ROUND = 0  # reduce gradients; with marks of what has become of those before
    CLIP = 1  # with a norm and its order
    STEP = 2  # with the hyper-parameters of every group


class Followed(Protocol):
    """The optimizer, as far as a rank without data drives it."""

    param_groups: list[dict[str, Any]]
    _join_config: Any
    _join_hook: Any
    _clip: Any

    def step(self) -> Any:
        """Update."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> Any:
        """Clip."""


class JoinHook:
    """What `Join` calls on a rank that has run out of data, and who tells it what to do on the others.

    Args:
        optimizer: Its step and clip_grad_norm_ are called.
        reducer: Of the optimizer.
        communicator: The ranks.
    """

    def __init__(self, optimizer: Followed, reducer: Reducer, communicator: Communicator) -> None:
        self._optimizer, self._reducer, self._communicator = optimizer, reducer, communicator
        self._is_following = False

    def announce(self, operation: Operation, values: Sequence[float] = ()) -> None:
        """Tell ranks that have joined what comes next. All others call; blocks.

        Raises:
            NotImplementedError: `Join` holds another object before the optimizer.
            RuntimeError: A rank has joined and ``throw_on_early_termination`` is set.
        """
        config = self._optimizer._join_config
        if self._is_following or config is None or not config.enable:
            return
        if not config.is_first_joinable:
            raise NotImplementedError(
                "Join holds another object before zero_shard.AdamW, whose operations it would not see; use "
                "Join([optimizer]) alone, with a model that is not wrapped"
            )
        self._communicator.agree(torch.ones(1), "sum", _LABEL)  # what Join waits for on ranks that have joined
        if config.throw_on_early_termination and self._communicator.agree(torch.zeros(1), "sum", _LABEL).item():
            raise RuntimeError("a rank has run out of inputs inside Join(throw_on_early_termination=True)")
        self._exchange([float(operation), *values])

    def announce_round(self) -> None:
        """Tell that gradients are about to be reduced, and what has become of those before them."""
        self.announce(Operation.ROUND, self._reducer.take_marks())

    def announce_step(self) -> None:
        """Tell that a step comes, with the hyper-parameters: schedulers stand still on ranks that have joined."""
        self.announce(Operation.STEP, self._hyper())

    def main_hook(self) -> None:
        """Do what the ranks with data do. Called by `Join`."""
        operation, *values = self._exchange([-math.inf])
        self._is_following = True
        try:
            if operation == Operation.ROUND:
                self._optimizer._clip.settle()  # nobody calls zero_grad here
                self._reducer.follow_round(values)
            elif operation == Operation.CLIP:
                self._optimizer.clip_grad_norm_(values[0], values[1])
            else:
                self._take_over(values)
                self._optimizer.step()
        finally:
            self._is_following = False

    def post_hook(self, is_last_joiner: bool) -> None:
        """Leave the context with the hyper-parameters of a rank that was in it to the end. Called by `Join`."""
        _, *values = self._exchange([0.0, *(self._hyper() if is_last_joiner else [])])
        self._take_over(values)
        self._optimizer._join_config = self._optimizer._join_hook = None
        self._reducer.before_round = None

    def _hyper(self) -> list[float]:
        values: list[float] = []
        for group in self._optimizer.param_groups:
            values += [float(group[name]) for name in _HYPER] + [float(beta) for beta in group["betas"]]
        return values

    def _exchange(self, values: list[float]) -> list[float]:
        width = (len(_HYPER) + 2) * len(self._optimizer.param_groups)
        room = 1 + max(2, width, 1 + len(self._reducer.slots))
        message = torch.full((room,), -math.inf, dtype=torch.float64)
        message[: len(values)] = torch.tensor(values, dtype=torch.float64)
        return self._communicator.agree(message, "max", _LABEL).tolist()

    def _take_over(self, values: list[float]) -> None:
        width = len(_HYPER) + 2
        for number, group in enumerate(self._optimizer.param_groups):
            *hyper, beta1, beta2 = values[number * width : (number + 1) * width]
            for name, value in zip(_HYPER, hyper, strict=True):
                if isinstance(group[name], torch.Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = type(group[name])(value)
            group["betas"] = (beta1, beta2)
