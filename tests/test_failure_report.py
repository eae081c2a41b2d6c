"""The report of a failure: killed, stopped, stuck and desynced ranks, and memory that is used up."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import forks
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import zero_shard
from zero_shard import failure_report
from zero_shard.collectives import World, pending

_TIMEOUT_S = 3.0
_VICTIM = 1
_BAD_STEP = 3


def _stuck(seconds: float) -> None:
    time.sleep(seconds)


def _out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _train(out: str, how: str, stage: int) -> None:
    """Train until something happens to one rank in the fourth step."""
    os.environ[failure_report.VARIABLE] = out
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)])
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage, "bucket_mib": 0.02})
    try:
        for step in range(6):
            loss = model(torch.ones(2, 64)).square().mean()
            if step == _BAD_STEP and dist.get_rank() == _VICTIM:
                _go_wrong(how, optimizer)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # as Python does where nobody catches it
        raise


def _go_wrong(how: str, optimizer: zero_shard.AdamW) -> None:
    if how in ("kill", "stop"):
        _stuck(1.5)  # longer than between two files
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    elif how == "hang":
        _stuck(_TIMEOUT_S + 4)
    elif how == "desync":
        optimizer.full_state_dict()
    else:
        object.__setattr__(optimizer._update, "_kernels", type("Kernels", (), {"adamw_": staticmethod(_out_of_memory)}))


class _Outcome(NamedTuple):
    report: str
    answers: list[str]


_WAYS = {"kill": 2, "stop": 3, "hang": 1, "desync": 2, "memory": 3}  # -> stage


def _fail_in_all_ways(out: str) -> dict[str, _Outcome]:
    """Fail in worlds of two that run at the same time."""
    worlds = {how: forks.World(2, _train, f"{out}/{how}", how, _WAYS[how], timeout_s=_TIMEOUT_S) for how in _WAYS}
    found = {}
    for how in sorted(worlds, key="stop".__eq__):  # that one last: nothing else ends it
        if how == "stop":
            _wait_for_last_report(Path(out) / how)
            worlds[how].kill()
        answers = worlds[how].answers()
        (report,) = (Path(out) / how).glob("failure-*.txt")
        assert all(str(report) in answer for answer in answers if "waiting for" in answer), answers
        found[how] = _Outcome(report.read_text(), answers)
    return found


def _wait_for_last_report(where: Path) -> None:
    """Return when rank 0 has waited for an answer, in vain, and written its report anew."""
    end = time.monotonic() + 40
    while time.monotonic() < end:
        if any(time.time() - report.stat().st_mtime > 3 for report in where.glob("failure-*.txt")):
            return
        time.sleep(0.1)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, _Outcome]:
    """What each way to fail ends in, for each the report and the answers of the ranks; nothing hangs."""
    out = str(tmp_path_factory.mktemp("reports"))
    found: dict[str, _Outcome] = ranks.run(1, _fail_in_all_ways, out, limit_s=150, fresh=True, has_group=False)[0]
    return found


def _rows(report: str) -> list[str]:
    return re.findall(r"^[01]     .*", report, re.MULTILINE)


def _section(report: str, rank: int) -> str:
    return report.split("=" * 100)[1 + rank]


def test_killed_rank_is_named_with_the_last_that_is_known_of_it(outcomes: dict[str, _Outcome]) -> None:
    report, answers = outcomes["kill"]
    assert answers[_VICTIM] == forks.KILLED and "rank 0 was waiting for the gradients of bucket" in answers[0]
    survivor, victim = _rows(report)
    assert re.search(r"  3  +failed  +wait the gradients of bucket \d \(2\.0\.bias.*, for \d+\.\d s", survivor)
    assert re.search(r"  3  +silent: (ended|its process is gone), last sign \d+\.\d s ago  +in no phase", victim)
    assert "in _stuck; last publish" in victim or "in _stuck; last wait the updated parameters" in victim, victim
    assert "The first to fail was rank 0:\n    zero_shard: rank 0 was waiting" in report
    for rank in range(2):
        section = _section(report, rank)
        assert re.search(r"memory: parameters \d+\.\d MiB, gradients .*, moments .*, masters .*", section)
        assert re.search(r"\d+\.\d{3}  update bucket \d \(.*\): \d+\.\d\d ms", section)
        assert re.search(r"\d+\.\d{3} +\d+ +\d+  the updated parameters of bucket", section)
    assert "loss.backward()" in _section(report, 0)
    assert re.search(r"in _stuck\n\s+time\.sleep\(seconds\)", _section(report, 1))


def test_stopped_rank_is_seen_to_be_stopped(outcomes: dict[str, _Outcome]) -> None:
    report, answers = outcomes["stop"]
    assert "rank 0 was waiting for the parameters of" in answers[0]
    survivor, victim = _rows(report)
    assert "  failed  " in survivor and "wait the parameters of 2, for 3." in survivor
    assert re.search(r"silent: stopped by a signal, last sign \d+\.\d s ago", victim)


def test_rank_that_is_stuck_elsewhere_shows_its_stack(outcomes: dict[str, _Outcome]) -> None:
    report, _ = outcomes["hang"]
    survivor, victim = _rows(report)
    assert "  failed  " in survivor and "wait the " in survivor
    assert "  runs" in victim and "in no phase of zero_shard, in File" in victim and "in _stuck; last " in victim
    assert "stack of MainThread" in _section(report, 1)


def test_ranks_that_call_different_things_are_set_side_by_side(outcomes: dict[str, _Outcome]) -> None:
    report, answers = outcomes["desync"]
    assert all("was waiting for" in answer for answer in answers)
    number = r"The first collective that differs, of those that are known of all ranks, is number \d+:\n"
    on_ranks = r"    on rank 0: the gradients of bucket .*\n    on rank 1: exp_avg of bucket "
    assert re.search(number + on_ranks, report), report
    assert all("  failed  " in row or "  runs, failed later  " in row for row in _rows(report))


def test_memory_that_is_used_up_tells_the_phase_and_what_is_held(outcomes: dict[str, _Outcome]) -> None:
    report, answers = outcomes["memory"]
    assert answers[_VICTIM].startswith("OutOfMemoryError: CUDA out of memory"), "the error itself is not changed"
    survivor, victim = _rows(report)
    assert re.search(r"  3  +failed  +update bucket \d \(.*\), for 0\.0 s, ended by OutOfMemoryError", victim)
    assert "The first to fail was rank 1:\n    torch.OutOfMemoryError: CUDA out of memory." in report
    assert "in _out_of_memory" in _section(report, 1)
    assert re.search(r"  [34]  +(runs|failed)", survivor)


@pytest.fixture
def no_reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reports as they were, and off, afterwards."""
    hook = sys.excepthook
    yield
    monkeypatch.delenv(failure_report.VARIABLE, raising=False)
    assert failure_report.begin() is None and pending.on_failure is None
    sys.excepthook = hook


def _optimizer() -> zero_shard.AdamW:
    model = nn.Linear(3, 3)
    return zero_shard.AdamW(model.parameters(), module=model)


def test_each_group_of_a_process_has_a_report_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what follows a failure would be silent, and the next report take the place of the first."""
    store, names = dist.HashStore(), []
    for rank in range(2):
        monkeypatch.setattr(failure_report, "_num_groups", 0)
        names.append([failure_report._common_name(World(None, rank, 2, store)) for _ in range(2)])
    assert names[0] == names[1]
    assert names[0][0] != names[0][1]


@pytest.mark.usefixtures("no_reports")
def test_error_that_is_its_own_cause_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failure_report.VARIABLE, str(tmp_path))
    optimizer = _optimizer()
    error = ValueError("for a test")
    error.__cause__ = error
    failure_report._on_uncaught(ValueError, error, None)
    assert optimizer.config.stage == 2
    assert "ValueError: for a test" in next(tmp_path.glob("failure-*.txt")).read_text()


@pytest.mark.usefixtures("no_reports")
def test_a_run_that_ends_well_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failure_report.VARIABLE, str(tmp_path / "reports"))
    optimizer = _optimizer()
    end = time.monotonic() + 10
    while not list((tmp_path / "reports").glob("failure-*/rank-0.json")):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert optimizer in failure_report.begin().optimizers  # type: ignore[union-attr]
    monkeypatch.delenv(failure_report.VARIABLE)
    _optimizer()
    assert list((tmp_path / "reports").iterdir()) == []
    assert "zero_shard reports" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.usefixtures("no_reports")
def test_a_directory_that_cannot_be_made_costs_a_line_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(failure_report.VARIABLE, str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "zero_shard"):
        _optimizer()
    assert re.search("no reports of failures: ZERO_SHARD_REPORT_DIR='.*file' can't be used", caplog.text)
    assert str(pending.peer_missing("x", RuntimeError("gone"))).endswith("gather calls.")


@pytest.mark.usefixtures("no_reports")
def test_a_file_system_that_hangs_or_fails_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(failure_report.VARIABLE, str(tmp_path))
    monkeypatch.setattr(failure_report, "_LONGEST_S", 0.3)
    _optimizer()
    is_over = threading.Event()
    monkeypatch.setattr(failure_report, "_write", lambda path, text: is_over.wait(20))
    start = time.monotonic()
    text = str(pending.peer_missing("the gradients", RuntimeError("gone")))
    assert time.monotonic() - start < 10
    assert "was waiting for the gradients" in text and text.endswith("gather calls.")
    is_over.set()
    monkeypatch.setattr(failure_report, "_LONGEST_S", 5)

    def fail(path: Path, text: str) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(failure_report, "_write", fail)
    with caplog.at_level(logging.WARNING, "zero_shard"):
        text = failure_report.begin().fail("another", [])  # type: ignore[union-attr]
    assert "no space left on device" in caplog.text
