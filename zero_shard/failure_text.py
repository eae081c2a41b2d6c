"""The report of a failure as text, from what the ranks have told about themselves."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NUM_SHOWN = 20  # phases and collectives of each rank
_AT_ONCE_S = 0.5  # between the end of a phase and the failure that has ended it
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "ended", "X": "ended"}  # of Linux
Part = dict[str, Any]


def describe(parts: Sequence[Part | None], now_s: float, folder: str) -> str:
    """Return the report.

    Args:
        parts: Of each rank what it has told last; None: nothing.
        now_s: Seconds since 1970.
        folder: Where the same is as JSON.
    """
    told = [part for part in parts if part is not None]
    stamp = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    lines = [f"zero_shard: what each of {len(parts)} ranks was doing when one failed, {stamp}", ""]
    lines += _table(parts, now_s)
    lines += ["", *_first_error(told), *_differing_collectives(told)]
    for part in told:
        lines += ["", "=" * 100, *_rank(part, now_s)]
    return "\n".join([*lines, "", f"The same as JSON: {folder}", ""])


def _table(parts: Sequence[Part | None], now_s: float) -> list[str]:
    rows = [("rank", "host", "pid", "step", "state", "doing")]
    for rank, part in enumerate(parts):
        if part is None:
            rows.append((str(rank), "?", "?", "?", "has left nothing", ""))
        else:
            row = (str(rank), part["host"], str(part["pid"]), str(part["step"]), _state(part, now_s))
            rows.append((*row, _doing(part, now_s)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _state(part: Part, now_s: float) -> str:
    if part["errors"]:
        return "failed" if part["failed_s"] <= part["time_s"] else "runs, failed later"
    if part["is_answer"]:
        return "runs"
    return f"silent: {_process_state(part)}, last sign {now_s - part['time_s']:.1f} s ago"


def _process_state(part: Part) -> str:
    """Return in words what has become of a process, as far as this host knows."""
    if part["host"] != socket.gethostname() or not os.path.isdir("/proc/self"):
        return "on another host"
    try:
        state = Path(f"/proc/{part['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "its process is gone"
    return _STATES.get(state, "its process is there, but does not answer")


def _doing(part: Part, now_s: float) -> str:
    """Return in one line what a rank was doing, inside of this package or outside."""
    ended = [
        each for each in part["phases"] if each["until_s"] and abs(each["until_s"] - part["failed_s"]) < _AT_ONCE_S
    ]
    raised = [phase for phase in ended if phase["error"]]
    if raised or (ended and part["is_alone"]):
        last = max(raised or ended, key=lambda phase: phase["since_s"])
        error = f", ended by {last['error']}" if last["error"] else ""
        return f"{last['name']}, for {last['until_s'] - last['since_s']:.1f} s{error}"
    chains = [" > ".join(f"{each['name']}, for {now_s - each['since_s']:.1f} s" for each in c) for c in part["doing"]]
    if chains:
        return "; ".join(chains)
    where = next((_place(stack) for stack in part["stacks"].values()), "")
    last = part["phases"][-1] if part["phases"] else None
    before = f"; last {last['name']}, {now_s - last['since_s']:.1f} s ago" if last else ""
    return f"in no phase of zero_shard{where}{before}"


def _place(stack: Sequence[str]) -> str:
    """Return the innermost line of a stack."""
    return f", in {' '.join(stack[-1].split(chr(10))[0].split())}" if stack else ""


def _first_error(told: Sequence[Part]) -> list[str]:
    failed = [part for part in told if part["errors"]]
    if not failed:
        return []
    first = min(failed, key=lambda part: part["failed_s"])
    return [f"The first to fail was rank {first['rank']}:", *_indented(first["errors"][0])]


def _differing_collectives(told: Sequence[Part]) -> list[str]:
    """Return where the ranks part, by what they have begun; nothing if all that is known is the same."""
    labels = [{each["number"]: each["label"] for each in part["collectives"]} for part in told]
    if len(labels) < 2 or not all(labels):
        return []
    # What a silent rank has begun since it told is not known.
    ends = [max(each) for part, each in zip(told, labels, strict=True) if not part["is_answer"]]
    end = min(ends, default=max(max(each) for each in labels))
    numbers = range(max(min(each) for each in labels), end + 1)
    for number in numbers:
        if len({each.get(number) for each in labels}) > 1:
            lines = [
                "",
                f"The first collective that differs, of those that are known of all ranks, is number {number}:",
            ]
            return lines + [
                f"    on rank {part['rank']}: {each.get(number, 'not begun')}"
                for part, each in zip(told, labels, strict=True)
            ]
    return ["", f"All ranks have begun the same collectives up to number {end}, as far as is known."]


def _rank(part: Part, now_s: float) -> list[str]:
    kinds = [f"{kind} {nbytes / 2**20:.1f} MiB" for kind, nbytes in part["memory"].items()]
    lines = [
        f"rank {part['rank']} on {part['host']}, process {part['pid']}, after {part['step']} steps, as told "
        f"{now_s - part['time_s']:.1f} s before this report",
        f"memory: {', '.join(kinds)}",
    ]
    for error in part["errors"]:
        lines += ["", "error:", *_indented(error)]
    lines += ["", "phases, the last one at the end (seconds before this report: what, and how long it took):"]
    for each in part["phases"][-_NUM_SHOWN:]:
        took = "not ended" if each["until_s"] is None else f"{1000 * (each['until_s'] - each['since_s']):.2f} ms"
        ended = f", ended by {each['error']}" if each["error"] else ""
        lines.append(f"    {now_s - each['since_s']:9.3f}  {each['name']}: {took}{ended}")
    lines += ["", "collectives that were begun, the last one at the end (seconds before this report, number, bytes):"]
    for each in part["collectives"][-_NUM_SHOWN:]:
        ago_s = now_s - each["since_s"]
        lines.append(f"    {ago_s:9.3f}  {each['number']:6}  {each['nbytes']:12}  {each['label']}")
    for name, stack in part["stacks"].items():
        lines += ["", f"stack of {name}, the innermost call at the end:", *_indented("".join(stack))]
    return lines


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.rstrip().splitlines()]
