"""A long run in few points: each bucket of records becomes its mean, its lowest and its highest value."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from zero_shard.reporting.reader import Floats, RunLog

_NUM_NUMBERS = 180_000  # in a page, of about 8 bytes each
_NUM_BUCKETS = (40, 1500)  # at least, even if there are very many runs; and at most: pixels of a large screen
_NUM_SEGMENTS = 40  # repeated parts that are drawn, the last ones
_NUM_BAD = 300  # marks of values that are not finite

Indices = npt.NDArray[np.int64]


def thin_run(run: RunLog, num_runs: int) -> dict[str, Any]:
    """Return what the charts show of a run, ready for JSON: at most as many numbers as ``num_runs`` runs share.

    ``kept`` are the steps that count, ``repeated`` those that were done again after a rollback or a resume.
    """
    least, most = _NUM_BUCKETS
    num_buckets = int(np.clip(_NUM_NUMBERS // (3 * len(run.series) * num_runs), least, most))
    is_kept = run.is_kept()
    kept, repeated = (np.flatnonzero(each).astype(np.int64) for each in (is_kept, ~is_kept))
    return {
        "kept": _thin(run, kept, num_buckets, np.array([], dtype=np.int64)),
        "repeated": _thin(run, *_last_segments(run, repeated, num_buckets)) if len(repeated) else None,
        "bad": {key: _bad(run, column) for key, column in run.series.items() if np.isinf(column).any()},
    }


def _last_segments(run: RunLog, records: Indices, num_buckets: int) -> tuple[Indices, int, Indices]:
    """Return the repeated records of the last segments, how many buckets they get, and where segments begin."""
    has_gap = (np.diff(records) != 1) | (np.diff(run.steps[records]) <= 0)
    starts = np.append(0, np.flatnonzero(has_gap) + 1)[-_NUM_SEGMENTS:]
    return records[starts[0] :], max(1, num_buckets // 4), (starts - starts[0]).astype(np.int64)


def _thin(run: RunLog, records: Indices, num_buckets: int, segments: Indices) -> dict[str, Any]:
    """Thin the ``records``; a bucket does not reach over the begin of a segment."""
    num_records = len(records)
    regular = np.linspace(0, num_records, min(num_records, num_buckets), endpoint=False).astype(np.int64)
    starts = np.union1d(regular, segments).astype(np.int64)
    ends = np.append(starts[1:], num_records)
    middles = records[(starts + ends - 1) // 2]
    is_thinned = len(starts) < num_records
    series = {}
    for key, column in run.series.items():
        if key == "slowest_rank":  # a number, but no quantity
            continue
        values = column[records]
        is_finite = np.isfinite(values)
        if not is_finite.any():
            continue
        with np.errstate(all="ignore"):  # what overflows or is of no value is null in the page
            nums = np.add.reduceat(is_finite.astype(np.float64), starts)
            lines = [np.add.reduceat(np.where(is_finite, values, 0.0), starts) / nums]
        if is_thinned:
            lines.append(np.minimum.reduceat(np.where(is_finite, values, np.inf), starts))
            lines.append(np.maximum.reduceat(np.where(is_finite, values, -np.inf), starts))
        series[key] = [_numbers(line) for line in lines]
    return {
        "step": run.steps[middles].tolist(),
        "time": _numbers(run.times_s[middles]),
        "segments": np.searchsorted(starts, segments).tolist(),
        "per_point": round(num_records / len(starts), 1),
        "series": series,
    }


def _bad(run: RunLog, column: Floats) -> list[list[float]]:
    """Return [step, time] of values that are not finite."""
    records = np.flatnonzero(np.isinf(column))
    records = records[np.linspace(0, len(records) - 1, min(len(records), _NUM_BAD)).astype(np.int64)]
    return [[int(run.steps[record]), _number(run.times_s[record])] for record in records]


def _numbers(values: Floats) -> list[float | None]:
    return [_number(value) if np.isfinite(value) else None for value in values]


def _number(value: float) -> float:
    return float(f"{value:.6g}")
