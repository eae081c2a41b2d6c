"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from train_bench.clocks import PHASES
from train_bench.summary import Row, summarise, waited_by_phase

HEADS = (
    "implementation", "step ms", "25 to 75 %", "to ddp", "forward", "backward", "step", "waited", "cpu ms", "tokens/s",
    "peak MiB", "held MiB", "sent MiB", "floor MiB", "wire MiB", "diff",
)  # fmt: skip


def markdown(report: dict[str, Any], charts: Sequence[str] = ()) -> str:
    """Return the report; ``charts`` are names of pictures beside it."""
    lines = ["# Training steps", "", *fact_lines(report["environment"]), ""]
    for run in report["runs"]:
        lines += _run_lines(run)
    if len({run["world_size"] for run in report["runs"]}) > 1:
        lines += _scaling_lines(report["runs"])
    lines += [f"![{name}]({name})" for name in charts]
    lines += ["", "What the columns mean: `benchmarks/README.md`.", ""]
    return "\n".join(lines)


def fact_lines(facts: dict[str, Any]) -> list[str]:
    """Return what the numbers depend on, as a list."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return [
        f"- command: `{facts['command']}`",
        f"- {facts['date']}, commit {facts['commit']}",
        f"- {facts['cpu']}, {facts['num_cpus']} CPUs, {facts['memory_gib']} GiB, {facts['system']}",
        f"- GPU: {facts['gpu']}",
        f"- load average before the run {facts['load_average']:.1f}; threads per rank {facts['threads']}",
        f"- {versions}",
        f"- {facts['kernels']}",
    ]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table whose columns are aligned in the text, too."""
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(heads, widths, strict=True)) + " |"]
    lines.append("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for row in rows:
        cells = [cell.ljust(width) if not column else cell.rjust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def number(value: float | None, form: str) -> str:
    """Return a number as text, or a dash."""
    return "-" if value is None else format(value, form)


def _run_lines(run: dict[str, Any]) -> list[str]:
    plan = run["plan"]
    rows = summarise(run)
    lines = [
        f"## {run['model']}, {run['world_size']} rank{'s' * (run['world_size'] > 1)}",
        "",
        f"{run['num_params'] / 1e6:.1f} M parameters, {'bfloat16' if plan['is_half'] else 'float32'}"
        f"{', blocks recomputed' * plan['is_recomputing']}; {plan['batch']} samples of {plan['shape']['sequence']} "
        f"tokens per rank; {plan['rounds']} rounds of {plan['steps']} steps each, after {plan['warmup']} to warm up.",
        "",
        *table(HEADS, [_cells(row) for row in rows if not row.missing]),
        "",
    ]
    lines += [f"- {row.name}: not measured: {row.missing}" for row in rows if row.missing]
    lines += [""] * (lines[-1] != "")
    waited = [(entry["name"], waited_by_phase(entry)) for entry in run["entries"]]
    cells = [[name, *(number(ms, ".1f") for ms in phases)] for name, phases in waited if phases]
    if cells:
        lines += ["Milliseconds waited, by phase:", "", *table(["implementation", *PHASES], cells), ""]
    lines += [*(f"- {entry['name']}: {entry['description']}" for entry in run["entries"]), ""]
    return lines


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        number(row.step_ms, ".1f"),
        f"{row.low_ms:.1f} to {row.high_ms:.1f}",
        number(row.ratio, ".3f"),
        number(row.forward_ms, ".1f"),
        number(row.backward_ms, ".1f"),
        number(row.update_ms, ".1f"),
        number(row.waited_ms, ".1f"),
        number(row.cpu_ms, ".1f"),
        number(row.tokens_per_s, ",.0f"),
        number(row.peak_mib, ",.1f"),
        number(row.held_mib, ",.1f"),
        number(row.sent_mib, ",.2f"),
        number(row.floor_mib, ",.2f"),
        number(row.wire_mib, ",.1f"),
        number(row.weights_diff, ".1e"),
    ]


def _scaling_lines(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return tokens per second by world size, and how much of a rank's speed at the smallest one is left."""
    lines = []
    for model in dict.fromkeys(run["model"] for run in runs):
        worlds = sorted((run for run in runs if run["model"] == model), key=lambda run: run["world_size"])
        by_name: dict[str, list[str]] = {}
        first: dict[str, float] = {}
        for run in worlds:
            for row in summarise(run):
                per_rank = row.tokens_per_s / run["world_size"]
                if row.missing:
                    by_name.setdefault(row.name, []).append("-")
                    continue
                share = per_rank / first.setdefault(row.name, per_rank)
                by_name.setdefault(row.name, []).append(f"{row.tokens_per_s:,.0f} ({share:.0%})")
        heads = [f"{model}: tokens/s", *(f"{run['world_size']} ranks" for run in worlds)]
        complete = [[name, *cells] for name, cells in by_name.items() if len(cells) == len(worlds)]
        lines += ["## Scaling", "", *table(heads, complete), ""]
    return lines
