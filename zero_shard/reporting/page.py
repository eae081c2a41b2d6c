"""One HTML file for the logs of one or several runs: tables, and charts that a short script draws from data inside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from zero_shard.reporting.reader import RunLog
from zero_shard.reporting.summary import summary
from zero_shard.reporting.thinning import thin_run

_HERE = Path(__file__).parent
_USUAL_NAME = "run.jsonl"
_POLICY = "default-src 'none'; style-src {style}; script-src {script}; base-uri 'none'; form-action 'none'"


def page(runs: Sequence[RunLog]) -> str:
    """Return the page, in which everything from a log is text.

    It is escaped, and the policy in the page's head lets only this script and this style run, and nothing be loaded, so
    that a name could do no harm even if it were not.
    """
    labels = _labels([run.path for run in runs])
    style, script = (_HERE.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    data = {"runs": [_data(run, label, len(runs)) for run, label in zip(runs, labels, strict=True)]}
    return Template(_HERE.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        policy=_POLICY.format(style=_hash(style), script=_hash(script)),
        title=escape(labels[0] if len(runs) == 1 else f"{len(runs)} runs"),
        subtitle=escape(_subtitle(runs[0]) if len(runs) == 1 else ", ".join(labels)),
        summary=_summary(runs, labels),
        notes="".join(f'<p class="note">{escape(note)}</p>' for run in runs for note in run.notes),
        events=_events(runs, labels),
        settings=_settings(runs, labels),
        style=style,
        # "<" begins neither a tag nor a comment in here.
        data=json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        script=script,
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _labels(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ, of the directory for the file that the monitor puts there."""
    whole = [(path.parent if path.name == _USUAL_NAME else path).parts for path in map(Path.resolve, paths)]
    for depth in range(1, max(map(len, whole)) + 1):
        labels = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(labels)) == len(labels):
            break
    return labels


def _data(run: RunLog, label: str, num_runs: int) -> dict[str, Any]:
    events = []
    for event in run.events:
        record = min(event.record, len(run.steps) - 1)
        step = int(run.steps[record]) if event.step is None else event.step
        events.append({"step": step, "time": run.times_s[record], "kind": event.kind, "message": event.message})
    return {
        "label": label,
        "floor": run.floor_sent_mib(),
        "events": events,
        **thin_run(run, num_runs),
    }


def _subtitle(run: RunLog) -> str:
    known = run.header
    num_params = known.get("num_params")
    texts = [
        f"stage {known['stage']}" if known.get("stage") is not None else "",
        f"{known['world_size']} ranks" if known.get("world_size") is not None else "",
        f"{num_params:,} parameters" if type(num_params) is int else "",
        _plain(known.get("hardware")),
        f"started {_plain(known['started'])}" if known.get("started") is not None else "",
        f"resumed {run.num_starts - 1} time{'s' * (run.num_starts > 2)}" if run.num_starts > 1 else "",
    ]
    return ", ".join(text for text in texts if text)


def _summary(runs: Sequence[RunLog], labels: Sequence[str]) -> str:
    rows = [summary(run) for run in runs]
    headings = [heading for heading in rows[0] if any(row[heading] for row in rows)]
    if len(runs) == 1:
        figures = "".join(f"<div><dt>{escape(h)}</dt><dd>{_figure(rows[0][h])}</dd></div>" for h in headings)
        return f'<dl class="figures">{figures}</dl>'
    body = [
        [_swatch(number) + escape(label), *(_figure(row[h]) for h in headings)]
        for number, (label, row) in enumerate(zip(labels, rows, strict=True))
    ]
    return _table(["run", *map(escape, headings)], body)


def _figure(text: str) -> str:
    figure, _, beside = text.partition(" (")
    return f'<span class="figure">{escape(figure)}</span>' + f"<small>{escape(beside[:-1])}</small>" * bool(beside)


def _events(runs: Sequence[RunLog], labels: Sequence[str]) -> str:
    shown = [(label, event) for label, run in zip(labels, runs, strict=True) for event in run.events]
    if not shown:
        return '<p class="quiet">None.</p>'
    is_several = len(runs) > 1
    body = [
        [
            "" if event.step is None else f"{event.step:,}",
            f'<span class="flag {_kind(event.kind)}">{escape(event.kind)}</span>',
            *([escape(label)] if is_several else []),
            f'<span class="message">{escape(event.message)}</span>',
            escape(event.parameter),
            escape(event.rank),
        ]
        for label, event in shown
    ]
    left_out = sum(run.num_events.total() for run in runs) - len(shown)
    more = f'<p class="quiet">and {left_out:,} later ones</p>' if left_out else ""
    return _table(["step", "event", *(["run"] if is_several else []), "message", "parameter", "rank"], body) + more


def _kind(kind: str) -> str:
    return kind if kind in ("nonfinite", "drift", "skipped", "rollback", "resume") else "other"


def _settings(runs: Sequence[RunLog], labels: Sequence[str]) -> str:
    """Return a table of what the run lines say, a column for each run; rows that differ are in bold."""
    columns = [_flat(run.header) for run in runs]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = []
    for key in keys:
        cells = [column.get(key, "") for column in columns]
        differs = ' class="differs"' if len(set(cells)) > 1 else ""
        texts = [f'<span class="message">{escape(cell)}</span>' for cell in cells]
        rows.append(f"<tr{differs}>{_cells([escape(key), *texts])}</tr>")
    head = "".join(f"<th>{escape(label)}</th>" for label in labels)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr><th>setting</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _flat(header: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in header.items():
        if key in ("kind", "schema"):
            continue
        if isinstance(value, dict):
            found |= {f"{key}.{name}": _plain(each) for name, each in value.items()}
        else:
            found[key] = _plain(value)
    return found


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _swatch(number: int) -> str:
    return f'<span class="swatch c{number % 8}{" dashed" * (number > 7)}" aria-hidden="true"></span>'


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already; the first one of a row heads it."""
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "".join(f"<tr>{_cells(row)}" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(cells: Sequence[str]) -> str:
    return f'<th scope="row">{cells[0]}</th>' + "".join(f"<td>{cell}</td>" for cell in cells[1:])
