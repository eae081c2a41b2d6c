"""The numbers of a logged step: a row from every rank, and what all rows say together.

    rank 0   [loss, squares, times, bytes, ...]  \
    rank 1   [loss, squares, times, bytes, ...]   >  gathered while the next step runs  ->  one entry, its events
    rank W   [loss, squares, times, bytes, ...]  /

Every rank gets all rows, so that whatever follows from them is the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from zero_shard.gradient_watch import Squares
from zero_shard.monitor.timer import Lap

Entry = dict[str, Any]
_MIB = 2**20
_PARTS = ("forward", "backward", "optimizer")
_COLUMNS = (
    *("loss_sum", "num_losses", "tokens", "high", "low", "has_norm", "num_skipped", "first_bad", "origin"),
    *("step", *_PARTS, "exposed", "sent", "held", "peak"),
)


@dataclass
class Tally:
    """What adds up from one logged step to the next.

    Attributes:
        loss_sum: Of ``num_losses``; a tensor where it is on a GPU.
        num_skipped: Steps without ``optimizer.step()``.
        tokens: Of this rank; 0: not given.
        squares: Of the gradient of the last step; None: there was none.
    """

    num_steps: int = 0
    num_losses: int = 0
    num_skipped: int = 0
    tokens: int = 0
    sent_nbytes: int = 0
    loss_sum: float | Tensor = 0.0
    squares: Squares | None = None


@dataclass
class Record:
    """What one rank knows of the steps since the last logged one.

    Attributes:
        origin: See `GradientWatch.origin`.
    """

    step: int
    time_s: float
    lr: list[float]
    lap: Lap
    tally: Tally
    origin: int | None
    held_nbytes: int
    peak_nbytes: int

    def row(self, names: Callable[[], Sequence[str]]) -> Tensor:
        """Return [C] fp64; waits until a GPU has come to the end of the lap.

        Args:
            names: Gives all parameters in the order of the model; asked when a gradient is not finite.
        """
        times, tally = self.lap.ms(), self.tally
        high, low, first_bad = 0.0, 0.0, -1
        if tally.squares is not None:
            high, low = tally.squares.total.tolist()
            if not math.isfinite(high):
                bad, places = set(tally.squares.nonfinite()), enumerate(names())
                first_bad = max((place for place, name in places if name in bad), default=-1)
        values: dict[str, float] = {
            "loss_sum": float(tally.loss_sum),
            "num_losses": tally.num_losses,
            "tokens": tally.tokens,
            "high": high,
            "low": low,
            "has_norm": tally.squares is not None,
            "num_skipped": tally.num_skipped,
            "first_bad": first_bad,
            "origin": -1 if self.origin is None else self.origin,
            **{name: times.get(name, 0.0) / tally.num_steps for name in ("step", *_PARTS, "exposed")},
            "sent": tally.sent_nbytes / tally.num_steps,
            "held": self.held_nbytes,
            "peak": self.peak_nbytes,
        }
        return torch.tensor([values[name] for name in _COLUMNS], dtype=torch.float64)


class Rows:
    """The rows of all ranks for one record."""

    def __init__(self, record: Record, rows: Tensor) -> None:
        self.record, self._rows = record, rows
        self._columns = dict(zip(_COLUMNS, rows.numpy().T, strict=True))

    def grad_norm(self) -> float | None:
        """Return the norm of the whole gradient; None if some rank took no step."""
        if not self._columns["has_norm"].all():
            return None
        square = float(self._columns["high"].sum() + self._columns["low"].sum())
        return math.sqrt(square) if square >= 0 else square  # NaN

    def entry(self, grad_norm: float | None, has_parts: bool, tokens_per_step: int | None) -> Entry:
        """Return the line of the step."""
        columns, record = self._columns, self.record
        mean = {name: float(columns[name].mean()) for name in ("step", *_PARTS, "exposed", "sent")}
        num_losses, tokens = float(columns["num_losses"].sum()), float(columns["tokens"].sum())
        if not tokens and tokens_per_step is not None:
            tokens = float(tokens_per_step * record.tally.num_steps)
        own_ms = columns["step"] - columns["exposed"]
        slowest = int(own_ms.argmax())
        return {
            "kind": "step",
            "step": record.step,
            "time_s": round(record.time_s, 3),
            "loss": float(columns["loss_sum"].sum()) / num_losses if num_losses else None,
            "grad_norm": grad_norm,
            "lr": record.lr,
            "tokens_per_s": 1e3 * tokens / (mean["step"] * record.tally.num_steps) if tokens else None,
            "step_ms": mean["step"],
            **{f"{name}_ms": mean[name] if has_parts or name == "optimizer" else None for name in _PARTS},
            "exposed_ms": mean["exposed"],
            "sent_mib": mean["sent"] / _MIB,
            "held_mib": float(columns["held"].max()) / _MIB,
            "peak_mib": float(columns["peak"].max()) / _MIB,
            "slowest_rank": slowest,
            "slowest_ms": float(own_ms[slowest]),
        }

    def events(self, grad_norm: float | None, names: Callable[[], Sequence[str]], is_skipping: bool) -> list[Entry]:
        """Return what was wrong: numbers that are not finite, steps that were not taken."""
        events = []
        bad_losses = numpy.flatnonzero(~numpy.isfinite(self._columns["loss_sum"]))
        first_bad = int(self._columns["first_bad"].max())
        is_bad = first_bad >= 0 or (grad_norm is not None and not math.isfinite(grad_norm))
        if is_bad or len(bad_losses):
            parameter = names()[first_bad] if first_bad >= 0 else None
            rank = self._origin(bad_losses)
            text = f"the {'gradient' if is_bad else 'loss'} is not finite"
            text += "" if rank is None else f" on rank {rank}"
            if is_bad and rank is not None:
                text += f" (its loss is {'not finite either' if rank in bad_losses else 'finite'})"
            text += "" if parameter is None else f", first in {parameter}"
            events.append(self.event("nonfinite", text, parameter, rank))
        num_skipped, num_steps = int(self._columns["num_skipped"].max()), self.record.tally.num_steps
        if num_skipped:
            text = f"no optimizer.step() in {num_skipped} of {num_steps} steps, as a GradScaler does"
            events.append(self.event("skipped", text))
        elif is_bad and is_skipping:
            events.append(self.event("skipped", f"no update on any rank: the gradient norm is {grad_norm}"))
        return events

    def event(self, name: str, message: str, parameter: str | None = None, rank: int | None = None) -> Entry:
        """Return the line of an event of the step."""
        return event_entry(self.record.step, name, message, parameter, rank)

    def _origin(self, bad_losses: numpy.ndarray) -> int | None:
        if len(self._rows) == 1:
            return 0
        origins = self._columns["origin"]
        if (origins >= 0).any():
            return int(origins[origins >= 0].min())
        return int(bad_losses[0]) if len(bad_losses) else None


def event_entry(step: int, name: str, message: str, parameter: str | None = None, rank: int | None = None) -> Entry:
    """Return the line of an event."""
    line = " ".join(message.split())
    return {"kind": "event", "step": step, "event": name, "message": line, "parameter": parameter, "rank": rank}
