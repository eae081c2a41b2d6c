"""Raw samples to the numbers of the tables: medians over steps and rounds, means over ranks, the fullest rank."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from train_bench.clocks import PHASES
from train_bench.contenders import REFERENCE

MIB = 2**20


@dataclass
class Row:
    """One line of the table; bytes in MiB, times in milliseconds per step, None where nothing was measured."""

    name: str
    missing: str = ""
    step_ms: float = 0.0
    low_ms: float = 0.0  # a quarter of the steps was faster,
    high_ms: float = 0.0  # and a quarter slower
    ratio: float | None = None  # to DDP
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    update_ms: float = 0.0  # step and zero_grad
    waited_ms: float | None = None
    cpu_ms: float = 0.0
    tokens_per_s: float = 0.0
    peak_mib: float | None = None
    held_mib: float = 0.0
    sent_mib: float | None = None
    floor_mib: float | None = None
    wire_mib: float | None = None
    weights_diff: float | None = None


def summarise(run: dict[str, Any]) -> list[Row]:
    """Return a row for each implementation of a run."""
    reference = next((entry for entry in run["entries"] if entry["name"] == REFERENCE and entry["rounds"]), None)
    reference_ms = [] if reference is None else list(map(_round_ms, reference["rounds"]))
    rows = []
    for entry in run["entries"]:
        if not entry["rounds"]:
            rows.append(Row(entry["name"], entry["missing"]))
            continue
        row = _row(entry, run["world_size"] * run["tokens_per_rank"])
        own_ms = list(map(_round_ms, entry["rounds"]))
        ratios = [own / wanted for own, wanted in zip(own_ms, reference_ms, strict=False)]
        row.ratio = statistics.median(ratios) if ratios else None
        rows.append(row)
    return rows


def _row(entry: dict[str, Any], num_tokens: int) -> Row:
    rounds = entry["rounds"]
    steps_ms = [ms for ranks in rounds for ms in _steps_ms(ranks)]
    phases = {phase: _phase_ms(rounds, "phases_ms", index) for index, phase in enumerate(PHASES)}
    step_ms = statistics.median(steps_ms)
    low_ms, _, high_ms = statistics.quantiles(steps_ms, n=4) if len(steps_ms) > 1 else (step_ms,) * 3
    return Row(
        name=entry["name"],
        step_ms=step_ms,
        low_ms=low_ms,
        high_ms=high_ms,
        forward_ms=phases["forward"],
        backward_ms=phases["backward"],
        update_ms=phases["step"] + phases["zero_grad"],
        waited_ms=_waited_ms(rounds),
        cpu_ms=statistics.median(statistics.fmean(rank["cpu_ms"] for rank in ranks) for ranks in rounds),
        tokens_per_s=1e3 * num_tokens / step_ms,
        peak_mib=_fullest_mib(rounds, "peak_nbytes"),
        held_mib=_fullest_mib(rounds, "held_nbytes") or 0.0,
        sent_mib=_fullest_mib(rounds, "sent_nbytes"),
        floor_mib=_fullest_mib(rounds, "floor_nbytes"),
        wire_mib=_wire_mib(rounds),
        weights_diff=entry["weights_diff"],
    )


def waited_by_phase(entry: dict[str, Any]) -> list[float]:
    """Return how long each phase has waited, in the median; empty where that is not known (CUDA)."""
    if not entry["rounds"] or not entry["rounds"][0][0]["times"][0][1]:
        return []
    return [_phase_ms(entry["rounds"], "waited_ms", index) for index in range(len(PHASES))]


def _steps_ms(ranks: Sequence[dict[str, Any]]) -> list[float]:
    """Return the time of each step of a round, the mean over ranks."""
    steps = zip(*(rank["times"] for rank in ranks), strict=True)
    return [statistics.fmean(sum(times[0]) for times in step) for step in steps]


def _round_ms(ranks: Sequence[dict[str, Any]]) -> float:
    return statistics.median(_steps_ms(ranks))


def _phase_ms(rounds: Iterable[Sequence[dict[str, Any]]], kind: str, phase: int) -> float:
    position = ("phases_ms", "waited_ms").index(kind)
    steps = [step for ranks in rounds for step in zip(*(rank["times"] for rank in ranks), strict=True)]
    return statistics.median(statistics.fmean(times[position][phase] for times in step) for step in steps)


def _waited_ms(rounds: Sequence[Sequence[dict[str, Any]]]) -> float | None:
    traced = [rank["traced_exposed_ms"] for ranks in rounds for rank in ranks]
    if traced[0] is not None:
        return statistics.median(traced)
    steps = [step for ranks in rounds for step in zip(*(rank["times"] for rank in ranks), strict=True)]
    return statistics.median(statistics.fmean(sum(times[1]) for times in step) for step in steps)


def _fullest_mib(rounds: Sequence[Sequence[dict[str, Any]]], key: str) -> float | None:
    if rounds[0][0][key] is None:
        return None
    return statistics.median(max(rank[key] for rank in ranks) for ranks in rounds) / MIB


def _wire_mib(rounds: Sequence[Sequence[dict[str, Any]]]) -> float | None:
    """Return what this machine's network device has sent per step; others only add to it, so the least is nearest."""
    counts = [ranks[0]["device_sent_nbytes"] for ranks in rounds]
    return None if counts[0] is None else min(counts) / MIB
