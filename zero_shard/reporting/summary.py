"""What a run comes to, in a row of figures."""

from __future__ import annotations

import numpy as np

from zero_shard.reporting.reader import Floats, RunLog

_PHASES = ("forward_ms", "backward_ms", "optimizer_ms")


def summary(run: RunLog) -> dict[str, str]:
    """Return a text for each heading, over the steps that count; an empty one where the log has nothing.

    What a figure comes with stands behind it, in parentheses.
    """
    is_kept = run.is_kept()
    # What is not finite is left out here; the charts and the last column show it.
    finite = {key: column[is_kept & np.isfinite(column)] for key, column in run.series.items()}
    num_kept = int(is_kept.sum())
    num_repeated = len(is_kept) - num_kept
    num_bad = int(np.isinf(np.stack([run.series["loss"], run.series["grad_norm"]])).any(axis=0).sum())
    events = ", ".join(f"{num:,} {kind}" for kind, num in sorted(run.num_events.items()))
    return {
        "steps": f"{num_kept:,}" + (f" (+ {num_repeated:,} repeated)" if num_repeated else ""),
        "time": _duration(float(run.times_s[-1])),
        "loss, last 1 %": _last(finite["loss"]),
        "lowest loss": _figure(finite["loss"].min()) if len(finite["loss"]) else "",
        "step, ms": _spread(finite["step_ms"]),
        "forward / backward / optimizer": _shares([finite[key] for key in _PHASES], finite["step_ms"]),
        "exposed, ms": _exposed(finite["exposed_ms"], finite["step_ms"]),
        "slowest rank": _slowest(finite["slowest_rank"]),
        "tokens/s": _figure(np.median(finite["tokens_per_s"])) if len(finite["tokens_per_s"]) else "",
        "sent per step": _sent(finite["sent_mib"], run.floor_sent_mib()),
        "held": _mib(finite["held_mib"].max()) if len(finite["held_mib"]) else "",
        "peak": _mib(finite["peak_mib"].max()) if len(finite["peak_mib"]) else "",
        "not finite": f"{num_bad:,} step{'s' * (num_bad != 1)}" if num_bad else "none",
        "events": f"{run.num_events.total():,} ({events})" if events else "none",
    }


def _last(values: Floats) -> str:
    return _figure(values[-max(1, len(values) // 100) :].mean()) if len(values) else ""


def _spread(values: Floats) -> str:
    if not len(values):
        return ""
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    return f"{_figure(middle)} (5 to 95 %: {_figure(low)} to {_figure(high)})"


def _shares(phases: list[Floats], whole: Floats) -> str:
    if not len(whole) or not all(map(len, phases)) or not whole.mean():
        return ""
    return " / ".join(f"{100 * phase.mean() / whole.mean():.0f} %" for phase in phases)


def _exposed(exposed: Floats, whole: Floats) -> str:
    if not len(exposed):
        return ""
    share = f" ({100 * exposed.mean() / whole.mean():.0f} % of the step)" if len(whole) and whole.mean() else ""
    return f"{_figure(np.median(exposed))}{share}"


def _sent(sent: Floats, floor: float | None) -> str:
    if not len(sent):
        return ""
    middle = float(np.median(sent))
    return _mib(middle) + (f" ({100 * middle / floor:.1f} % of the floor)" if floor else "")


def _slowest(ranks: Floats) -> str:
    if not len(ranks):
        return ""
    names, nums = np.unique(ranks, return_counts=True)
    return f"{names[nums.argmax()]:.0f} (in {100 * nums.max() / len(ranks):.0f} % of the steps)"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def _mib(value: float) -> str:
    return f"{value / 1024:.4g} GiB" if value >= 1024 else f"{value:.4g} MiB"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
