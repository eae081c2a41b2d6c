"""Going back to the last good checkpoint when training goes wrong: a streak of NaN or inf, or a spike of the loss.

step        96   97   98   99  100  101  102  103
loss       2.1  2.0  2.1  2.0  2.0  9.4  9.9  9.1      a spike, once three steps in a row lie above the band
checkpoint                      v         x            x: saved in the trouble: never loaded, and removed
                                ^---------------- back to here; the next step is 101
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_shard.adamw import AdamW
from zero_shard.checkpoint.background import wait_for_save
from zero_shard.checkpoint.directory import complete_checkpoints, remove
from zero_shard.checkpoint.loading import load
from zero_shard.config import load_settings

_LOG = logging.getLogger("zero_shard")
_LEAST_MAD = 0.01  # of the median: a loss that hardly varies is no reason to call the next one a spike
_KEPT_WINDOWS = 100  # of losses, so that there is one before the checkpoint that is loaded
_NONFINITE, _SPIKE = "not finite", "a loss spike"


@dataclass(frozen=True, kw_only=True)
class RollbackConfig:
    """When training has gone wrong. All ranks must pass the same.

    Args:
        nonfinite_streak: So many steps in a row whose loss or gradient norm is NaN or inf.
        spike_streak: So many steps in a row whose loss lies above the band.
        spike_mads: The band ends at the median of the last losses plus so many of their median absolute deviations
            (of which one counts at least 1 % of the median); inf = no spikes.
        window: So many losses make the band; before there are as many nothing is a spike.
        max_rollbacks: So often in the life of a process; the next time raises.
    Raises:
        ValueError: A value is out of range. TypeError: A value has the wrong type. Both name the field.
    """

    nonfinite_streak: int = 3
    spike_streak: int = 3
    spike_mads: float = 10.0
    window: int = 100
    max_rollbacks: int = 3

    def __post_init__(self) -> None:
        for name, least in (("nonfinite_streak", 1), ("spike_streak", 1), ("window", 4), ("max_rollbacks", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer of at least {least}, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if isinstance(self.spike_mads, bool) or not isinstance(self.spike_mads, (int, float)):
            raise TypeError(f"spike_mads must be a positive number, got {self.spike_mads!r}")
        if not self.spike_mads > 0:
            raise ValueError(f"spike_mads must be a positive number, got {self.spike_mads!r}")


class RolledBack(NamedTuple):
    """What a rollback has done; equal on all ranks.

    Attributes:
        step: Of the checkpoint that was loaded; training goes on with the next one.
        bad_steps: Whose data were there when it went wrong.
        reason: In words.
        path: Of the checkpoint.
        extra: What `load` has returned.
    """

    step: int
    bad_steps: range
    reason: str
    path: Path
    extra: dict[str, Any]


class Rollback:
    """Watches the loss and, when training has gone wrong, loads the last checkpoint from before.

    The number at the end of a checkpoint's name is its step: ``checkpoint-000100`` was saved after step 100.

    Args:
        directory: Of the checkpoints that `save` or `async_save` writes.
        module, optimizer: As for `load`.
        config: A RollbackConfig, a mapping of its fields, or the path of a TOML, YAML or JSON file with them, at top
            level or in a table ``rollback``.
        into: Objects that were saved under these keys (a scheduler, a GradScaler), to be loaded into, as for `load`.
    Attributes:
        config: The RollbackConfig in force.
        bad_steps: Whose data were there when it went wrong, in all rollbacks so far; a loop may leave them out.
    Raises:
        ValueError, TypeError, FileNotFoundError: Of the config.

    Example:
        >>> rollback = zero_shard.Rollback("runs", model, optimizer, scheduler=scheduler)
        >>> while step < num_steps:
        ...     step += 1
        ...     if step in rollback.bad_steps:
        ...         continue
        ...     loss = train_step(batch_of(step))
        ...     if back := rollback.check(step, loss):
        ...         step = back.step
        ...     elif step % 100 == 0 and rollback.is_well:
        ...         zero_shard.save(f"runs/checkpoint-{step}", model, optimizer, scheduler=scheduler, keep=2)
    """

    def __init__(
        self, directory: str | os.PathLike[str], module: nn.Module, optimizer: AdamW, config: Any = None, **into: Any
    ) -> None:
        self.config = load_settings(config, RollbackConfig, "rollback")
        self.bad_steps: set[int] = set()
        self._directory, self._module, self._optimizer, self._into = Path(directory), module, optimizer, into
        self._losses: deque[tuple[int, float]] = deque(maxlen=_KEPT_WINDOWS * self.config.window)  # good ones
        self._trouble: list[tuple[int, str]] = []  # steps in a row, the last one now, and what is wrong with each
        self._done: list[str] = []  # rollbacks, in words
        self._unproven: int | None = None  # a checkpoint that was loaded and has not led to a good step yet

    @property
    def is_well(self) -> bool:
        """Whether the last step was good, on all ranks alike. Save then only: what is saved in trouble is removed."""
        return not self._trouble

    def check(self, step: int, loss: Tensor | float, grad_norm: Tensor | float | None = None) -> RolledBack | None:
        """Judge a step; if training has gone wrong, load the last good checkpoint. All ranks call after each step.

        Communicates 16 bytes. Blocks, on a GPU until the step is done.

        Args:
            step: That has been done, counted as in the names of the checkpoints.
            loss: Of this rank; its mean over ranks is judged.
            grad_norm: As `AdamW.clip_grad_norm_` returns it; tells of overflows that leave the loss finite.
        Returns:
            None, or what has been loaded: weights, moments, groups, random states and ``into`` are as at that step,
            gradients are gone.
        Raises:
            RuntimeError: ``max_rollbacks`` are used up; the text says what happened each time.
            FileNotFoundError, RuntimeError: There is no checkpoint from before the trouble.
            Whatever `load` raises. In every case on all ranks.
        """
        ranks = self._optimizer.held.ranks
        own = torch.tensor([_number(loss), 0.0 if grad_norm is None else _number(grad_norm)], dtype=torch.float64)
        mean_loss, mean_norm = ranks.all_gather_small(own, "the loss of a step").mean(dim=0).tolist()
        wrong = self._judge(mean_loss, mean_norm)
        if wrong is None:
            self._losses.append((step, mean_loss))
            self._trouble, self._unproven = [], None
            return None
        self._trouble.append((step, wrong))
        kinds = [kind for _, kind in self._trouble]
        for kind, streak in ((_NONFINITE, self.config.nonfinite_streak), (_SPIKE, self.config.spike_streak)):
            if kinds.count(kind) >= streak:
                return self._roll_back(f"{kind}, loss {mean_loss:.6g}")
        return None

    def _judge(self, loss: float, norm: float) -> str | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return _NONFINITE
        losses = [each for _, each in self._losses][-self.config.window :]
        if len(losses) < self.config.window or math.isinf(self.config.spike_mads):
            return None
        middle = median(losses)
        deviation = max(median(abs(each - middle) for each in losses), _LEAST_MAD * abs(middle))
        return _SPIKE if loss > middle + self.config.spike_mads * deviation else None

    def _roll_back(self, wrong: str) -> RolledBack:
        bad_steps = range(self._trouble[0][0], self._trouble[-1][0] + 1)
        shown = f"step {bad_steps[0]}" if len(bad_steps) == 1 else f"steps {bad_steps[0]} to {bad_steps[-1]}"
        reason = f"{shown}: {wrong}"
        if len(self._done) >= self.config.max_rollbacks:
            before = "; ".join([*self._done, reason])
            raise RuntimeError(
                f"training has gone wrong once more after {len(self._done)} rollbacks, and max_rollbacks is "
                f"{self.config.max_rollbacks}: {before}. Look at the data of these steps, lower the learning rate or "
                "clip gradients"
            )
        # Trouble right after a load: perhaps these weights were damaged already, so the one before is taken.
        end = bad_steps[0] if self._unproven is None else min(bad_steps[0], self._unproven)
        path, later = self._choose(end, reason)
        step = _step_of(path)
        self._optimizer.zero_grad()
        extra = load(path, self._module, self._optimizer, **self._into)
        if self._optimizer.held.ranks.rank == 0:
            _LOG.warning("zero_shard: %s; all ranks went back to %s", reason, path)
            for each in later:
                remove(each)
        self._done.append(f"{reason}, back to step {step}")
        self._losses = deque((each for each in self._losses if each[0] <= step), self._losses.maxlen)
        self._trouble, self._unproven = [], step
        self.bad_steps |= set(bad_steps)
        return RolledBack(step, bad_steps, reason, path, extra)

    def _choose(self, end: int, reason: str) -> tuple[Path, list[Path]]:
        """Return the last checkpoint from before a step, and those beside it from then to now. All ranks call."""
        ranks, label = self._optimizer.held.ranks, f"a rollback in {self._directory}"
        wait_for_save(self._optimizer)
        chosen: tuple[Path, list[Path]] | None = None
        with ranks.errors_on_all_ranks(label):
            if ranks.rank == 0:
                found = [path for path in complete_checkpoints(self._directory) if path.name[-1:].isdecimal()]
                good = [path for path in found if _step_of(path) < end]
                if not good:
                    raise FileNotFoundError(
                        f"training has gone wrong ({reason}), but {self._directory} has no complete checkpoint from "
                        f"before step {end} to go back to; it has "
                        f"{', '.join(sorted(path.name for path in found)) or 'none'}. Save one before the first step"
                    )
                path = max(good, key=_step_of)
                stem, suspects = path.name.rstrip("0123456789"), range(end, self._trouble[-1][0] + 1)
                # What has a later number is of another run: it was there when this one came.
                chosen = path, [p for p in found if _step_of(p) in suspects and p.name.rstrip("0123456789") == stem]
        result: tuple[Path, list[Path]] = ranks.gather_objects(chosen, label)[0]
        return result


def _number(value: Tensor | float) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _step_of(path: Path) -> int:
    """Return the number at the end of a checkpoint's name."""
    match = re.search(r"\d+$", path.name)
    assert match is not None
    return int(match[0])
