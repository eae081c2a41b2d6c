"""The benchmark of the wire runs, sends what it says, and refuses bad arguments in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import ranks
from example_runs import as_under_torchrun, free_port

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # as when the script is run

import bench_wire  # noqa: E402


def _as_rank(words: list[str], port: int) -> None:
    with as_under_torchrun(port):
        bench_wire.main(words)


def test_a_quick_run_compares_all_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_ranks(script: str, words: list[str], num_ranks: int, threads: int) -> None:
        assert Path(script).name == "bench_wire.py" and threads == 1
        ranks.run(num_ranks, _as_rank, words, free_port(), limit_s=240)

    monkeypatch.setattr(bench_wire, "run_ranks", run_ranks)
    out = tmp_path / "out.json"
    bench_wire.main(["--quick", "--steps", "8", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == [way.name for way in bench_wire.WAYS]
    assert rows[0]["difference"] == rows[0]["largest_deviation"] == 0
    for row in rows[1:]:
        assert row["largest_deviation"] < 0.05, row["name"]
        assert row["floor_mib"] <= row["sent_mib"] <= 1.02 * row["floor_mib"] + 0.001, row["name"]
    sent = [row["sent_mib"] for row in rows]
    assert sent[2] < sent[1] < sent[0]
    assert len({tuple(row["runs"][0]["losses"]) for row in rows}) == len(rows), "no two ways compute the same"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--batch", "1"], "--batch must be at least 2, got 1"),
        (["--stage", "4"], "--stage must be 0 to 3, got 4"),
    ],
)
def test_bad_arguments_end_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        bench_wire.main(words)
    assert error.value.code == 2
    assert capsys.readouterr().err == f"bench_wire.py: {message}\n"
