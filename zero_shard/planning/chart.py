"""A chart of a plan: the memory of each configuration by kind, beside what may be used."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from zero_shard.commands import check_place, written_whole
from zero_shard.planning.result import GIB, Plan
from zero_shard.rehearsal import KINDS

_SUFFIXES = (".png", ".pdf", ".svg")
_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#c44e52", "#937860")


def check_chart(path: Path) -> None:
    """Refuse what can't be drawn or written, before any work.

    Raises:
        ImportError: No matplotlib. ValueError: Another suffix, no such directory, or not writable.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"the chart must be a {', '.join(_SUFFIXES)} file, got {os.fspath(path)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("a chart needs matplotlib: pip install matplotlib")
    check_place(path, "--chart")


def write_chart(plan: Plan, path: Path) -> None:
    """Draw a plan; the file is there when it is whole.

    Raises:
        OSError: It can't be written.
    """
    from matplotlib.figure import Figure  # heavy, and no business of who wants no chart

    figure = Figure(figsize=(8.0, 1.6 + 0.5 * len(plan.rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(plan.rows))
    starts = [0.0 for _ in places]
    for kind, color in zip(KINDS, _COLORS, strict=True):
        lengths = [row.peak.get(kind, 0) / GIB for row in plan.rows]
        axes.barh(places, lengths, left=starts, color=color, label=kind)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    usable = plan.machine.usable_nbytes / GIB
    axes.axvline(usable, color="black", linestyle="--", label=f"usable: {usable:.1f} GiB")
    for place, end in zip(places, starts, strict=True):
        axes.text(end, place, f" {end:.1f}", va="center", fontsize=8)
    axes.set_yticks(list(places), [row.label for row in plan.rows])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("GiB per rank at the peak of a step, without activations")
    axes.set_title(f"{plan.name} on {plan.machine.world_size} ranks")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    with written_whole(path, "--chart") as half:
        figure.savefig(half, dpi=150)
