"""The log of a run, JSON lines, read as a stream into columns."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SCHEMA = 1
SERIES = (
    *("loss", "grad_norm", "tokens_per_s"),
    *("step_ms", "forward_ms", "backward_ms", "optimizer_ms", "exposed_ms"),
    *("slowest_ms", "slowest_rank"),
    *("sent_mib", "held_mib", "peak_mib"),
)
NUM_RATES = 6  # learning rates of the first param groups; more lines than that can't be told apart in a chart
NUM_EVENTS = 500  # that are kept with their messages; the rest is counted
_LINE_NBYTES = 1 << 24  # a longer line is no line of ours, and must not fill the memory
_HUGE = 1e300  # as good as not finite, and sums of smaller numbers are finite
_NON_FINITE = ("nan", "inf", "-inf")

Floats = npt.NDArray[np.float64]


class Event(NamedTuple):
    """What the monitor noticed; ``record`` is the number of step records before it."""

    step: int | None
    kind: str
    message: str
    parameter: str
    rank: str
    record: int


class RunLog:
    """What a log holds, N step records in the order in which they were written.

    Attributes:
        header: The run line; of a resumed run, the last one.
        num_starts: Run lines.
        steps: (N,) int64; goes back where a run was rolled back or resumed.
        times_s: (N,) training time from the first start on, without the pauses between starts.
        series: (N,) each; NaN is "not there", infinity is "not finite".
        events: The first ``NUM_EVENTS``; ``num_events`` counts all by kind.
        notes: What was left out, one line each.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.num_starts = 0
        self.events: list[Event] = []
        self.num_events: Counter[str] = Counter()
        self.notes: list[str] = []
        self._steps = array("q")
        self._times = array("d")
        self._columns: dict[str, array[float]] = {key: array("d") for key in SERIES}
        self._start_s = 0.0  # training time at which the present start began
        for number, line in _lines(self):
            try:
                self._take(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
        if not self._steps:
            raise ValueError(f"{path} holds no step; let the run finish one, and report again")
        self.steps = np.asarray(self._steps, dtype=np.int64)
        self.times_s = np.asarray(self._times, dtype=np.float64)
        self.series: dict[str, Floats] = {
            key: np.asarray(column, dtype=np.float64) for key, column in self._columns.items()
        }

    def is_kept(self) -> npt.NDArray[np.bool_]:
        """Return (N,) whether a record is of a step that was not done again after a rollback or a resume."""
        lowest_after = np.append(np.minimum.accumulate(self.steps[::-1])[::-1][1:], np.iinfo(np.int64).max)
        return np.asarray(self.steps < lowest_after)

    def floor_sent_mib(self) -> float | None:
        """Return the least that a rank must send per step, if the log says it."""
        floor = _number(self.header, "floor_sent_mib")
        return floor if math.isfinite(floor) and floor > 0 else None

    def _take(self, line: dict[str, Any]) -> None:
        match line.get("kind"):
            case "run":
                _check_schema(line)
                _number(line, "floor_sent_mib")
                self.header = line
                self.num_starts += 1
                self._start_s = self._times[-1] if self._times else 0.0
            case _ if not self.num_starts:
                raise ValueError('expected {"kind": "run", ...} first; this is no log of zero_shard\'s monitor')
            case "step":
                self._take_step(line)
            case "event":
                self._take_event(line)

    def _take_step(self, line: dict[str, Any]) -> None:
        time_s = _number(line, "time_s")
        last_s = self._times[-1] if self._times else 0.0
        self._steps.append(_step(line))
        self._times.append(max(last_s, self._start_s + time_s) if math.isfinite(time_s) else last_s)
        rates = line.get("lr")
        rates = dict(enumerate(rates if isinstance(rates, list) else [rates]))
        for group in range(min(len(rates), NUM_RATES)):
            if f"lr {group}" not in self._columns:  # a group that was added later
                self._columns[f"lr {group}"] = array("d", [math.nan]) * (len(self._steps) - 1)
        for key, column in self._columns.items():
            column.append(_number(rates, int(key[3:])) if key.startswith("lr ") else _number(line, key))

    def _take_event(self, line: dict[str, Any]) -> None:
        kind = _text(line.get("event")) or "event"
        self.num_events[kind] += 1
        if len(self.events) < NUM_EVENTS:
            step = None if line.get("step") is None else _step(line)
            message, parameter, rank = (_text(line.get(key)) for key in ("message", "parameter", "rank"))
            self.events.append(Event(step, kind, message, parameter, rank, len(self._steps)))


def _lines(log: RunLog) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines with their numbers; a last one that is cut becomes a note."""
    path = log.path
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(_LINE_NBYTES), b""), start=1):
                if not raw.strip():
                    continue
                try:
                    line = json.loads(raw)
                except (ValueError, RecursionError):
                    line = None
                if isinstance(line, dict):
                    yield number, line
                elif number > 1 and not raw.endswith(b"\n") and len(raw) < _LINE_NBYTES:
                    log.notes.append(f"{path}: the last line is cut and was left out (is the run still writing?)")
                elif not log.num_starts:
                    raise ValueError(f"{path} is no log of zero_shard's monitor: line {number} is no JSON object")
                else:
                    raise ValueError(
                        f"{path}, line {number} is cut or damaged, expected a JSON object; delete this line to go on "
                        "without it"
                    )
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; name the log that the monitor wrote") from None
    except IsADirectoryError:
        inside = sorted(path.glob("*.jsonl"))
        raise ValueError(
            f"{path} is a directory; name a log in it, as {inside[0] if inside else path / 'run.jsonl'}"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None
    if not log.num_starts:
        raise ValueError(f"{path} is empty; let the run do a step, and report again")


def _check_schema(line: dict[str, Any]) -> None:
    if line.get("schema") != SCHEMA:
        raise ValueError(
            f"schema must be {SCHEMA}, got {_text(line.get('schema')) or 'none'}; report with the version of "
            "zero_shard that wrote the log"
        )


def _step(line: dict[str, Any]) -> int:
    step = line.get("step")
    if type(step) is not int or not 0 <= step < 1 << 53:
        raise ValueError(f"step must be a whole number from 0 on, got {_text(step)[:40] or 'none'}")
    return step


def _number(line: dict[Any, Any], key: str | int) -> float:
    """Return NaN for what is not there, and infinity for every value that is not finite."""
    value = line.get(key)
    if value is None:
        return math.nan
    if type(value) is float or type(value) is int:
        return value if -_HUGE < value < _HUGE else math.inf
    if value in _NON_FINITE:
        return math.inf
    raise ValueError(f"{key if isinstance(key, str) else 'lr'} must be a number, got {_text(value)[:40]}")


def _text(value: Any) -> str:
    """Return any JSON value as text; nothing for null."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
