"""``zero-shard report``: the charts of monitored runs in one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from zero_shard.reporting import write_report


def register(commands: Any) -> None:
    """Add the subcommand to those of ``zero-shard``."""
    parser = commands.add_parser(
        "report",
        help="the charts of monitored runs in one HTML file that needs no network",
        description="Exits with 0, or with 2 and one line if a log can't be used or the report can't be written.",
    )
    parser.add_argument(
        "logs", type=Path, nargs="+", metavar="run.jsonl", help="what the monitor wrote; several are compared"
    )
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Write the report."""
    runs = write_report(given.logs, given.out)
    for note in (note for log in runs for note in log.notes):
        print(f"note: {note}")
    num_records = sum(len(log.steps) for log in runs)
    print(f"{given.out}: {num_records:,} step{'s' * (num_records != 1)} of {', '.join(str(log.path) for log in runs)}")
    return 0
