"""``zero-shard report``: the page in a real browser, and one clear line for every log that can't be used."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import CHROMIUM, Browser
from torch import nn

import zero_shard
from zero_shard import cli
from zero_shard.reporting.reader import RunLog
from zero_shard.reporting.thinning import thin_run

Run = Callable[..., tuple[int, str, str]]
_PHASES = {"forward_ms": 3.0, "backward_ms": 5.0, "optimizer_ms": 1.0, "step_ms": 10.0, "exposed_ms": 0.5}
_HEADER = {
    "kind": "run",
    "schema": 1,
    "started": "2026-11-30T20:00:00+00:00",
    "world_size": 2,
    "stage": 2,
    "config": {"stage": 2, "param_dtype": None},
    "num_params": 1000,
    "hardware": "2 CPUs",
    "versions": {"torch": "2.13.0"},
    "floor_sent_mib": 2.0,
}


def _step(step: int, **changes: Any) -> dict[str, Any]:
    values = {"loss": 4 / step, "grad_norm": 1.0, "lr": [1e-3, 1e-3], "tokens_per_s": 5000.0, "sent_mib": 2.0}
    memory = {"held_mib": 10.0, "peak_mib": 3000.0}
    return {"kind": "step", "step": step, "time_s": step / 100, **values, **_PHASES, **memory, **changes}


def _event(step: int, event: str, message: str = "a message") -> dict[str, Any]:
    return {"kind": "event", "step": step, "event": event, "message": message, "parameter": "w", "rank": 1}


def _write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        try:
            code = cli.main(["report", *map(str, arguments)])
        except SystemExit as exit_:  # argparse
            code = int(exit_.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs chromium: apt-get install chromium")
    with Browser() as opened:
        yield opened


def _points(browser: Browser) -> dict[str, dict[str, int]]:
    """Return for each chart the points of its lines."""
    found: dict[str, dict[str, int]] = browser.ask(
        """Object.fromEntries([...document.querySelectorAll(".chart")].map((chart) => [
            chart.querySelector("h3").textContent,
            Object.fromEntries([...chart.querySelectorAll("path[data-points]")].map((path) =>
                [path.dataset.run + " " + path.dataset.key, Number(path.dataset.points)])),
        ]))"""
    )
    return found


def _set(browser: Browser, selector: str, value: object) -> None:
    """Give a control another value, as a user does."""
    browser.ask(
        f"""(() => {{ const control = document.querySelector("{selector}");
            control.value = "{value}"; control.dispatchEvent(new Event("input")); }})()"""
    )


# --- the page ---


def test_charts_of_a_run_have_their_lines_points_and_units(run: Run, browser: Browser, tmp_path: Path) -> None:
    lines = [_HEADER, *(_step(step) for step in range(1, 31))]
    lines[20]["loss"] = "nan"
    lines[15]["lr"] = [1e-3, 2e-3]
    lines[9].pop("grad_norm")
    code, out, err = run(_write(tmp_path / "gpt.jsonl", [*lines, _event(20, "nonfinite"), {"kind": "of later"}]))
    assert (code, err, out) == (0, "", f"report.html: 30 steps of {tmp_path / 'gpt.jsonl'}\n")
    browser.open(tmp_path / "report.html")
    stack = ("forward_ms", "backward_ms", "optimizer_ms", "rest")
    assert _points(browser) == {
        "Loss": {"gpt.jsonl loss": 29},
        "Gradient norm": {"gpt.jsonl grad_norm": 29},
        "Learning rate": {"gpt.jsonl lr 0": 30, "gpt.jsonl lr 1": 30},
        "Throughput (tokens/s)": {"gpt.jsonl tokens_per_s": 30},
        "Step time (ms)": {"gpt.jsonl step_ms": 30},
        "Where the time goes (ms)": {f"gpt.jsonl {key}": 30 for key in stack},
        "Exposed communication (ms)": {"gpt.jsonl exposed_ms": 30},
        "Sent per step and rank (MiB)": {"gpt.jsonl sent_mib": 30},
        "Memory per rank (GiB)": {"gpt.jsonl held_mib": 30, "gpt.jsonl peak_mib": 30},
    }
    assert browser.ask("document.querySelectorAll('line.event.nonfinite').length") == 9, "a mark in each chart"
    assert browser.ask("document.querySelectorAll('path.bad').length") == 1, "a mark where the loss is not finite"
    assert browser.ask("document.querySelectorAll('line.floor').length") == 1
    figures = browser.ask(
        """Object.fromEntries([...document.querySelectorAll("dt")].map((heading) =>
            [heading.textContent, heading.nextSibling.innerText]))"""
    )
    assert figures["forward / backward / optimizer"] == "30 % / 50 % / 10 %"
    assert figures["peak"] == "2.93 GiB" and figures["not finite"] == "1 step"
    assert figures["sent per step"].startswith("2 MiB") and "100.0 % of the floor" in figures["sent per step"]
    assert browser.console == [] and browser.requested() == [(tmp_path / "report.html").as_uri()]


def test_lines_lie_where_the_values_are(run: Run, browser: Browser, tmp_path: Path) -> None:
    """Between two labelled ticks of the axis, as read off the page."""
    run(_write(tmp_path / "gpt.jsonl", [_HEADER, *(_step(step, loss=float(step)) for step in range(1, 12))]))
    browser.open(tmp_path / "report.html")
    for x_axis, first in (("step", "step"), ("time", "training time (s)")):
        _set(browser, "select", x_axis)
        texts, path = browser.ask(
            """(() => { const svg = document.querySelector("svg"), texts = [...svg.querySelectorAll("text")];
                const place = (text) => ["x", "y"].map((name) => Number(text.getAttribute(name)));
                const axis = (text) => text.getAttribute("text-anchor") === "end" ? "y" : "x";
                return [texts.map((text) => [axis(text) + " " + text.textContent, ...place(text)]),
                    svg.querySelector("path.line").getAttribute("d")]; })()"""
        )
        places = {text: (x, y - 4) for text, x, y in texts}  # texts of y are set 4 lower than their ticks
        assert f"x {first}" in places
        points = np.array([[float(number) for number in point.split()] for point in path[1:].split("L")])
        assert points[4, 1] == pytest.approx(places["y 5.0"][1], abs=0.2), "the loss of step 5 lies at the tick 5.0"
        assert points[9, 1] == pytest.approx(places["y 10.0"][1], abs=0.2)
        tick = {"step": "6", "time": "0.06"}[x_axis]
        assert points[5, 0] == pytest.approx(places[f"x {tick}"][0], abs=0.2), "step 6, after 0.06 s"
    browser.ask("document.querySelector('.chart button').click()")
    d = browser.ask("document.querySelector('path.line').getAttribute('d')")
    logarithmic = [float(point.split()[1]) for point in d[1:].split("L")]
    assert logarithmic[0] - logarithmic[1] == pytest.approx(logarithmic[3] - logarithmic[7], abs=0.2), (
        "1 to 2 as 4 to 8"
    )


def test_pointing_zooming_and_smoothing(run: Run, browser: Browser, tmp_path: Path) -> None:
    run(
        _write(
            tmp_path / "gpt.jsonl", [_HEADER, *(_step(step) for step in range(1, 101)), _event(50, "drift", "too high")]
        )
    )
    browser.open(tmp_path / "report.html")
    left, right, y = browser.ask(
        """(() => { const svg = document.querySelector("svg"), box = svg.getBoundingClientRect();
            return [box.left + 58, box.right - 14, box.top + 100]; })()"""
    )
    middle = left + (right - left) * 49 / 99
    browser.mouse("Moved", middle, y)
    tip = browser.ask("document.querySelector('.tip').textContent")
    assert tip.startswith("step 50, 0.5 s") and "loss: 0.08" in tip and "drift: too high" in tip
    browser.mouse("Pressed", middle, y)
    browser.mouse("Moved", right - 40, y)
    browser.mouse("Moved", right - 1, y)
    browser.mouse("Released", right - 1, y)
    ticks = """[...document.querySelectorAll("svg")].map((svg) =>
        [...svg.querySelectorAll("text[text-anchor=middle]")].map((text) => text.textContent))"""
    assert all("50" in each or "60" in each for each in browser.ask(ticks)) and "20" not in browser.ask(ticks)[0]
    browser.ask("[...document.querySelectorAll('button')].find((each) => each.textContent === 'whole range').click()")
    assert "20" in browser.ask(ticks)[0]
    before = browser.ask("document.querySelector('path.line').getAttribute('d')")
    _set(browser, "input[type=range]", 0.9)
    raw, line = (browser.ask(f"document.querySelector('path.{kind}').getAttribute('d')") for kind in ("raw", "line"))
    assert raw.count("L") == line.count("L") == before.count("L") and line not in (raw, before)
    assert browser.console == []


def test_several_runs_lie_over_each_other(run: Run, browser: Browser, tmp_path: Path) -> None:
    for name, stage in (("a", 2), ("b", 3)):
        (tmp_path / name).mkdir()
        _write(tmp_path / name / "run.jsonl", [{**_HEADER, "stage": stage}, *(_step(step) for step in range(1, 11))])
    code, _, _ = run("a/run.jsonl", "b/run.jsonl", "--out", "both.html")
    assert code == 0
    browser.open(tmp_path / "both.html")
    points = _points(browser)
    assert points["Loss"] == {"a loss": 10, "b loss": 10}
    assert "Where the time goes: a (ms)" in points and "Where the time goes: b (ms)" in points
    assert browser.ask("[...document.querySelectorAll('tr.differs th')].map((each) => each.textContent)") == ["stage"]
    browser.ask("document.querySelector('#controls label:has(.c0) input').click()")
    assert _points(browser)["Loss"] == {"b loss": 10}
    assert browser.console == []


def test_repeated_steps_are_drawn_apart_and_counted_once(run: Run, browser: Browser, tmp_path: Path) -> None:
    first = [_step(step, loss=9.0 if step > 14 else 1.0) for step in range(1, 21)]
    lines = [_HEADER, *first, _event(10, "rollback"), *(_step(step, loss=1.0) for step in range(11, 31))]
    path = _write(
        tmp_path / "gpt.jsonl", [*lines, _HEADER, _event(25, "resume"), *(_step(s, loss=1.0) for s in range(26, 36))]
    )
    log = RunLog(path)
    assert log.steps[log.is_kept()].tolist() == list(range(1, 36))
    assert log.num_starts == 2 and (np.diff(log.times_s) >= 0).all(), "time goes on over rollbacks and resumes"
    thinned = thin_run(log, 1)
    assert set(thinned["kept"]["series"]["loss"][0]) == {1.0}
    assert thinned["repeated"]["step"] == [*range(11, 21), *range(26, 31)] and thinned["repeated"]["segments"] == [
        0,
        10,
    ]
    run(path)
    browser.open(tmp_path / "report.html")
    d = browser.ask("document.querySelector('path.repeated').getAttribute('d')")
    assert d.count("M") == 2, "one line for each repeated part"
    assert "35" in browser.ask("document.querySelector('dd').textContent") and browser.console == []


def test_without_javascript_the_tables_are_there(run: Run, browser: Browser, tmp_path: Path) -> None:
    run(_write(tmp_path / "gpt.jsonl", [_HEADER, _step(1), _event(1, "nonfinite", "the first one")]))
    browser.open(tmp_path / "report.html", has_script=False)
    text = browser.ask("document.body.innerText")
    assert "The charts need JavaScript" in text and "the first one" in text and "2.93 GiB" in text
    browser.open(tmp_path / "report.html")
    assert "The charts need JavaScript" not in browser.ask("document.body.innerText")


def test_names_and_messages_of_a_log_do_no_harm(run: Run, browser: Browser, tmp_path: Path) -> None:
    bad = "</script><script>window.harm=1</script><img src=x onerror='window.harm=2'>\"'&<!--\ud800\u2028"
    header = {**_HEADER, "hardware": bad, "config": {bad: bad}, "started": bad, "stage": bad}
    event = {"kind": "event", "step": 2, "event": bad, "message": bad, "parameter": bad, "rank": bad}
    path = _write(tmp_path / "<img src=x onerror=alert(1)>.jsonl", [header, _step(1), _step(2), event])
    code, _, err = run(path, "--out", "report.html")
    assert (code, err) == (0, "")
    browser.open(tmp_path / "report.html")
    assert len(_points(browser)) == 9
    assert browser.ask("window.harm") is None and browser.ask("document.querySelectorAll('img').length") == 0
    assert browser.ask("document.scripts.length") == 2
    assert "onerror='window.harm=2'>\"'&<!--" in browser.ask("document.body.innerText")
    box = browser.ask("document.querySelector('svg').getBoundingClientRect().toJSON()")
    browser.mouse("Moved", box["right"] - 15, box["top"] + 100)
    assert "window.harm=2" in browser.ask("document.querySelector('.tip').textContent")
    assert browser.ask("document.querySelectorAll('.tip img').length") == 0
    assert browser.console == []
    # Even if something were not escaped, the page's policy would stop it.
    page = tmp_path / "report.html"
    page.write_text(
        page.read_text().replace("<main>", "<main><script>window.harm=3</script><img src=x onerror='window.harm=4'>")
    )
    browser.open(page)
    assert browser.ask("window.harm") is None and len(browser.console) >= 2


def test_a_long_run_stays_a_small_page_and_keeps_its_extremes(run: Run, browser: Browser, tmp_path: Path) -> None:
    num_steps = 60_000
    body = json.dumps(_step(1)).replace('"step": 1,', '"step": %d,').replace('"loss": 4.0', '"loss": %r')
    losses = 2 + np.random.default_rng(0).random(num_steps)
    losses[[12_345, 54_321]] = 77.0, 0.01
    with (tmp_path / "gpt.jsonl").open("w") as file:
        file.write(json.dumps(_HEADER) + "\n")
        file.writelines(body % (step, loss) + "\n" for step, loss in enumerate(losses.tolist(), start=1))
    run("gpt.jsonl")
    assert (tmp_path / "report.html").stat().st_size < 1_500_000
    mean, low, high = thin_run(RunLog(tmp_path / "gpt.jsonl"), 1)["kept"]["series"]["loss"]
    assert len(mean) == 1500 and (min(low), max(high)) == (0.01, 77.0)
    assert np.mean(mean) == pytest.approx(losses.mean(), rel=1e-5)
    browser.open(tmp_path / "report.html")
    assert _points(browser)["Loss"] == {"gpt.jsonl loss": 1500}
    assert browser.ask("document.querySelectorAll('path.band').length") >= 8 and browser.console == []


def test_only_what_the_log_has_is_drawn(run: Run, browser: Browser, tmp_path: Path) -> None:
    lines = [{"kind": "step", "step": step, "loss": -1.0, "grad_norm": "inf"} for step in (0, 0, 5)]
    code, _, _ = run(_write(tmp_path / "gpt.jsonl", [{"kind": "run", "schema": 1}, *lines]))
    assert code == 0
    browser.open(tmp_path / "report.html", width=360)
    assert _points(browser) == {"Loss": {"gpt.jsonl loss": 2}}
    browser.ask("document.querySelector('.chart button').click()")
    assert "no positive value here" in browser.ask("document.querySelector('svg').textContent")
    assert browser.ask("document.documentElement.scrollWidth") <= 360, "a narrow screen needs no scrolling sideways"
    assert browser.console == []


def test_the_log_of_a_monitor_is_read_whole(run: Run, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": 2})
    with zero_shard.Monitor(optimizer, "small", tokens_per_step=8, console=False) as monitor:
        for step in range(4):
            loss = model(torch.ones(2, 4)).sum() * (math.nan if step == 2 else 1.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)
    code, out, err = run("small/run.jsonl")
    assert (code, out, err) == (0, "report.html: 4 steps of small/run.jsonl\n", "")
    log = RunLog(Path("small/run.jsonl"))
    assert all(len(column) == 4 for column in log.series.values())
    missing = {key for key, column in log.series.items() if np.isnan(column).all()}
    assert not missing, "the monitor writes every key that the report knows"
    assert log.num_events["nonfinite"] >= 1 and np.isinf(log.series["loss"][2])


# --- what can't be used ---


def test_a_last_line_that_is_cut_is_left_out_with_a_note(run: Run, tmp_path: Path) -> None:
    path = _write(tmp_path / "gpt.jsonl", [_HEADER, _step(1), _step(2)])
    whole = path.read_bytes()
    for end, num_steps in ((len(whole) - 1, 2), (len(whole) - 2, 1), (len(whole) - 40, 1)):
        path.write_bytes(whole[:end])
        code, out, err = run("gpt.jsonl")
        assert (code, err) == (0, "") and f"report.html: {num_steps} step" in out
        assert ("note: gpt.jsonl: the last line is cut" in out) == (num_steps == 1)
        assert ("the last line is cut" in (tmp_path / "report.html").read_text()) == (num_steps == 1)


_RUN = json.dumps(_HEADER)
_STEP = json.dumps(_step(1))
_BAD_LOGS = {
    "empty": ("", "is empty", "let the run do a step"),
    "text": ("hello\nworld\n", "is no log of zero_shard's monitor", "line 1"),
    "cut first": (_RUN[:30], "is no log of zero_shard's monitor", "line 1"),
    "other JSON": ('{"a": 1}\n', "is no log of zero_shard's monitor", 'expected {"kind": "run"'),
    "list": ("[1, 2]\n", "is no log of zero_shard's monitor", "no JSON object"),
    "deep": ("[" * 100_000 + "\n", "is no log of zero_shard's monitor", "no JSON object"),
    "binary": (b"\xff\xfe\x00PK\x03\x04" * 9, "is no log of zero_shard's monitor", "line 1"),
    "cut": (f"{_RUN}\n{_STEP[:50]}\n{_STEP}\n", "line 2 is cut or damaged", "delete this line"),
    "cut and resumed": (f"{_RUN}\n{_STEP[:50]}{_RUN}\n{_STEP}\n", "line 2 is cut or damaged", "delete this line"),
    "schema": (f'{{"kind": "run", "schema": 2}}\n{_STEP}\n', "schema must be 1, got 2", "version of zero_shard"),
    "no schema": (f'{{"kind": "run"}}\n{_STEP}\n', "schema must be 1, got none", "version of zero_shard"),
    "no steps": (f"{_RUN}\n{json.dumps(_event(1, 'drift'))}\n", "holds no step", "let the run finish one"),
    "steps alone": (f"{_STEP}\n", "line 1: expected", "is no log of zero_shard's monitor"),
    "step": (f"{_RUN}\n{json.dumps(_step(1) | {'step': 1.5})}\n", "line 2: step must be a whole number", "got 1.5"),
    "loss": (f"{_RUN}\n{json.dumps(_step(1, loss=[1]))}\n", "line 2: loss must be a number", "got [1]"),
    "lr": (f"{_RUN}\n{json.dumps(_step(1, lr=['a']))}\n", "line 2: lr must be a number", "got a"),
}


@pytest.mark.parametrize("name", _BAD_LOGS)
def test_a_log_that_is_no_log_gives_one_line_and_keeps_the_report(run: Run, tmp_path: Path, name: str) -> None:
    content, text, remedy = _BAD_LOGS[name]
    (tmp_path / "gpt.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    _refused(run, tmp_path, ["gpt.jsonl"], text, remedy)


_BAD_PLACES = [
    (["missing.jsonl"], "missing.jsonl does not exist", "name the log that the monitor wrote"),
    (["runs"], "runs is a directory", "name a log in it, as runs/gpt.jsonl"),
    (["gpt.jsonl", "missing.jsonl"], "missing.jsonl does not exist", ""),
    (["gpt.jsonl", "./gpt.jsonl"], "gpt.jsonl is named twice", "name each log once"),
    (["gpt.jsonl", "--out", "gpt.jsonl"], "would take the place of the log", "name another file with --out"),
    (["gpt.jsonl", "--out", "runs"], "runs is a directory", "name a file with --out"),
    (["gpt.jsonl", "--out", "no/report.html"], "there is no directory no", "make it first"),
    (["gpt.jsonl", "--out", "/dev/null"], "/dev/null is no file", "name a file with --out"),
    (
        ["gpt.jsonl", "--out", "/proc/report.html"],
        "/proc/report.html can't be written",
        "name another place with --out",
    ),
]


@pytest.mark.parametrize(("arguments", "text", "remedy"), _BAD_PLACES, ids=[" ".join(each[0]) for each in _BAD_PLACES])
def test_a_place_that_can_not_be_used_gives_one_line(
    run: Run, tmp_path: Path, arguments: list[str], text: str, remedy: str
) -> None:
    for path in (tmp_path / "gpt.jsonl", tmp_path / "runs" / "gpt.jsonl"):
        _write(path, [_HEADER, _step(1)])
    _refused(run, tmp_path, arguments, text, remedy)


def _refused(run: Run, tmp_path: Path, arguments: list[str], text: str, remedy: str) -> None:
    (tmp_path / "report.html").write_text("of before")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("zero-shard report: "), err
    assert text in err and remedy in err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_disk_that_is_full_keeps_the_report_of_before(tmp_path: Path) -> None:
    _write(tmp_path / "gpt.jsonl", [_HEADER, _step(1)])
    (tmp_path / "report.html").write_text("of before")
    command = [sys.executable, "-m", "zero_shard", "report", "gpt.jsonl"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # noqa: E731
    done = subprocess.run(command, cwd=tmp_path, preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "zero-shard report: report.html can't be written: File too large" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt.jsonl", "report.html"]
    assert (tmp_path / "report.html").read_text() == "of before"


def test_not_finite_is_not_the_same_as_not_there(tmp_path: Path) -> None:
    values = ["nan", "inf", "-inf", None, 1, math.nan, 10**400]
    log = RunLog(_write(tmp_path / "gpt.jsonl", [_HEADER, *(_step(n, loss=v) for n, v in enumerate(values, start=1))]))
    np.testing.assert_array_equal(log.series["loss"], [np.inf, np.inf, np.inf, np.nan, 1, np.inf, np.inf])
