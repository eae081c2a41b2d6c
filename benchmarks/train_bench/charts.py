"""The report as pictures: times by phase, memory, and scaling where there are several world sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from train_bench.summary import Row, summarise

# Before pyplot: this backend needs no screen.
matplotlib.use("Agg")
import matplotlib.pyplot as plt

_PHASE_COLORS = {"forward": "#9db8d2", "backward": "#1f5a94", "step": "#e08a3c"}
_MEMORY_COLORS = {"peak": "#c3cdd6", "held": "#1f5a94"}
_BAR, _THIN_BAR, _WAIT_COLOR = 0.5, 0.16, "#444444"
_ROW_INCHES, _MARGIN_INCHES, _WIDTH_INCHES, _DPI = 0.42, 1.5, 8.0, 130
_OTHER_WORLD = "#888888"


def draw_all(report: dict[str, Any], stem: Path) -> list[str]:
    """Draw every run, and the scaling; return the names of the files beside ``stem``."""
    names = []
    for run in report["runs"]:
        rows = [row for row in summarise(run) if not row.missing]
        if rows:
            place = f"{stem.name}-{run['model']}-{run['world_size']}"
            title = f"{run['model']}, {run['world_size']} ranks"
            names.append(_draw_times(rows, title, stem.with_name(f"{place}-time.png")))
            names.append(_draw_memory(rows, title, stem.with_name(f"{place}-memory.png")))
    for model in dict.fromkeys(run["model"] for run in report["runs"]):
        runs = sorted((run for run in report["runs"] if run["model"] == model), key=lambda run: run["world_size"])
        if len(runs) > 1:
            names.append(_draw_scaling(runs, stem.with_name(f"{stem.name}-{model}-scaling.png")))
    return names


def _bars(num_rows: int) -> tuple[Any, Any]:
    height = _MARGIN_INCHES + _ROW_INCHES * num_rows
    return plt.subplots(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout="constrained")


def _finish(figure: Any, axes: Any, title: str, path: Path) -> str:
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4)
    figure.savefig(path)
    plt.close(figure)
    return path.name


def _draw_times(rows: Sequence[Row], title: str, path: Path) -> str:
    figure, axes = _bars(len(rows))
    names, places = [row.name for row in rows], list(range(len(rows)))
    ends = [0.0] * len(rows)
    parts = {"forward": "forward_ms", "backward": "backward_ms", "step": "update_ms"}
    for phase, attribute in parts.items():
        widths = [getattr(row, attribute) for row in rows]
        axes.barh(places, widths, _BAR, left=ends, color=_PHASE_COLORS[phase], label=phase)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    waits = [row.waited_ms or 0.0 for row in rows]
    below = [place + (_BAR + _THIN_BAR) / 2 for place in places]
    axes.barh(below, waits, _THIN_BAR, color=_WAIT_COLOR, label="of all that, waited")
    axes.set_yticks(places, names)
    for position, row in enumerate(rows):
        text = f" {row.step_ms:.0f}" + ("" if row.ratio is None else f"  ({row.ratio:.2f} of ddp)")
        axes.text(ends[position], position, text, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel("milliseconds per step")
    return _finish(figure, axes, f"Training step: {title}", path)


def _draw_memory(rows: Sequence[Row], title: str, path: Path) -> str:
    figure, axes = _bars(len(rows))
    names = [row.name for row in rows]
    for kind in ("peak", "held"):
        widths = [getattr(row, f"{kind}_mib") or 0.0 for row in rows]
        bars = axes.barh(names, widths, color=_MEMORY_COLORS[kind], label=kind)
        if kind == "peak":
            axes.bar_label(bars, fmt=" %.0f", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("MiB per rank, above what the process held before")
    return _finish(figure, axes, f"Memory: {title}", path)


def _draw_scaling(runs: Sequence[dict[str, Any]], path: Path) -> str:
    figure, axes = plt.subplots(figsize=(_WIDTH_INCHES, 4.8), dpi=_DPI, layout="constrained")
    worlds = [run["world_size"] for run in runs]
    rates: dict[str, dict[int, float]] = {}
    for run in runs:
        for row in summarise(run):
            if not row.missing:
                rates.setdefault(row.name, {})[run["world_size"]] = row.tokens_per_s
    for name, by_world in rates.items():
        axes.plot(list(by_world), list(by_world.values()), marker="o", label=name)
    best = max(by_world.get(worlds[0], 0.0) for by_world in rates.values())
    ideal = [best * world / worlds[0] for world in worlds]
    axes.plot(worlds, ideal, color=_OTHER_WORLD, linestyle=":", label="as many times as ranks")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.set_xlabel("ranks")
    axes.set_ylabel("tokens/s")
    return _finish(figure, axes, f"Scaling: {runs[0]['model']}", path)
