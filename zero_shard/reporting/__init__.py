"""Reports of monitored runs: a log of JSON lines becomes one HTML file with charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zero_shard.commands import check_place, written_whole
from zero_shard.reporting.page import page
from zero_shard.reporting.reader import RunLog


def write_report(logs: Sequence[Path], out: Path) -> list[RunLog]:
    """Write the report of some runs to ``out``, in place of what is there; return what was read.

    The file is written under another name and renamed when it is whole.

    Raises:
        ValueError: A log can't be read, is damaged, or holds no step; or ``out`` can't be a report.
        OSError: ``out`` can't be written.
    """
    _check(logs, out)
    runs = [RunLog(path) for path in logs]
    text = page(runs)
    with written_whole(out, "--out") as half:
        half.write_text(text, encoding="utf-8", errors="replace")
    return runs


def _check(logs: Sequence[Path], out: Path) -> None:
    """Refuse what can't go well, before a long log is read."""
    places = [path.resolve() for path in logs]
    for path, place in zip(logs, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"{path} is named twice; name each log once")
    if out.resolve() in places:
        raise ValueError(f"the report would take the place of the log {out}; name another file with --out")
    check_place(out, "--out")
