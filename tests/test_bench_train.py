"""The benchmarks of training steps and memory run, and measure what they say. Nothing is asserted about times."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
from example_runs import as_under_torchrun, free_port

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # as when one of the scripts is run

import bench_memory  # noqa: E402
import bench_train  # noqa: E402
from train_bench import clocks, limits  # noqa: E402
from train_bench.contenders import BUILDERS, REFERENCE, missing_reason  # noqa: E402
from train_bench.launch import public_command  # noqa: E402
from train_bench.models import SHAPES, make_batch, make_model  # noqa: E402
from train_bench.summary import summarise  # noqa: E402

CPU = torch.device("cpu")
NUM_STEPS, NUM_ROUNDS = 3, 2
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
MIB = 2**20


def _as_rank(words: list[str], port: int) -> None:
    """Be one of the ranks that ``bench_train.py`` starts; torchrun starts those of memory and of checkpoints."""
    warnings.simplefilter("default")  # those of the peers; the task's filters end with it
    with (
        as_under_torchrun(port),
        mock.patch.object(bench_train, "leave", sys.exit),
        pytest.raises(SystemExit) as ended,
    ):
        bench_train.main(words)
    assert ended.value.code == 0


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of everything that is installed has left its files."""
    out = tmp_path_factory.mktemp("bench") / "deep" / "tiny.json"
    words = ["--nproc", "2", "--model", "llama-tiny", "--rounds", str(NUM_ROUNDS), "--steps", str(NUM_STEPS)]

    def run_ranks(script: str, words: list[str], num_ranks: int, threads: int) -> None:
        assert Path(script).name == "bench_train.py" and threads == 1
        ranks.run(num_ranks, _as_rank, words, free_port(), limit_s=240)

    with mock.patch.object(bench_train, "run_ranks", run_ranks), contextlib.redirect_stdout(io.StringIO()) as stdout:
        bench_train.main([*words, "--warmup", "1", "--out", str(out)])
    assert stdout.getvalue().strip() == out.with_suffix(".md").read_text().strip()
    return out


def test_every_implementation_is_measured_or_named_as_missing(measured: Path) -> None:
    report = json.loads(measured.read_text())
    (run,) = report["runs"]
    assert [entry["name"] for entry in run["entries"]] == list(BUILDERS)
    for entry in run["entries"]:
        reason = missing_reason(entry["name"], CPU)
        assert entry["missing"] == reason
        if reason:
            assert not entry["rounds"]
            continue
        assert [len(samples) for samples in entry["rounds"]] == [run["world_size"]] * NUM_ROUNDS == [2, 2]
        for sample in (sample for samples in entry["rounds"] for sample in samples):
            assert len(sample["times"]) == NUM_STEPS
            for phases, waited in sample["times"]:
                assert len(phases) == len(waited) == len(clocks.PHASES)
                assert all(0 <= sleep <= wall for wall, sleep in zip(phases, waited, strict=True))
            assert sample["held_nbytes"] <= sample["peak_nbytes"]
            assert sample["device_sent_nbytes"] > 0


def test_implementations_train_the_same_weights_and_send_what_they_say(measured: Path) -> None:
    (run,) = json.loads(measured.read_text())["runs"]
    rows = {row.name: row for row in summarise(run) if not row.missing}
    assert rows[REFERENCE].weights_diff == 0 and rows[REFERENCE].ratio == 1
    losses = {entry["name"]: entry["rounds"][0][0]["loss"] for entry in run["entries"] if entry["rounds"]}
    for name, row in rows.items():
        assert row.weights_diff is not None and row.weights_diff < 2e-5, name
        assert losses[name] == pytest.approx(losses[REFERENCE], abs=1e-4)
        if name.startswith("zero_shard"):
            assert row.sent_mib is not None and row.floor_mib is not None and row.wire_mib is not None
            # Small agreements weigh something beside a model of 23,000 parameters.
            assert row.floor_mib <= row.sent_mib < 1.2 * row.floor_mib
            assert row.wire_mib > 2 * row.sent_mib, "both ranks go over the device, with headers"
    nbytes = 4 * run["num_params"]
    assert rows["zero_shard-2"].floor_mib == pytest.approx(nbytes / MIB), "half of it each way"
    assert rows["zero_shard-3"].floor_mib == pytest.approx(1.5 * nbytes / MIB)


def test_report_has_every_row_and_its_charts(measured: Path) -> None:
    text = measured.with_suffix(".md").read_text()
    report = json.loads(measured.read_text())
    for entry in report["runs"][0]["entries"]:
        lines = [line for line in text.splitlines() if line.startswith(f"| {entry['name']} ")]
        assert len(lines) == (0 if entry["missing"] else 2), "of the steps, and of the waiting by phase"
        assert bool(entry["missing"]) == (f"- {entry['name']}: not measured: {entry['missing']}" in text)
    charts = sorted(path.name for path in measured.parent.glob("*.png"))
    assert charts == ["tiny-llama-tiny-2-memory.png", "tiny-llama-tiny-2-time.png"]
    assert all(name in text and (measured.parent / name).read_bytes().startswith(PNG_MAGIC) for name in charts)
    facts = report["environment"]
    assert facts["command"].startswith("python benchmarks/bench_train.py --nproc 2") and facts["date"] in text
    assert str(measured.parent) not in measured.read_text() + text, "no path of this machine"


def test_runs_merge_into_a_scaling_table(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(measured.read_text())
    report["runs"][0]["world_size"] = 4  # twice the tokens in the same time
    other, out = tmp_path / "four.json", tmp_path / "both.json"
    other.write_text(json.dumps(report))
    bench_train.main(["--merge", str(measured), str(other), "--out", str(out)])
    text = capsys.readouterr().out
    assert "| llama-tiny: tokens/s " in text and " 2 ranks " in text and " 4 ranks " in text
    assert text.count("(100%)") == 2 * sum(not missing_reason(name, CPU) for name in BUILDERS)
    assert (tmp_path / "both-llama-tiny-scaling.png").read_bytes().startswith(PNG_MAGIC)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nproc", "2", "--model", "gpt-3"], "--model must be one of gpt-tiny"),
        (["--nproc", "2", "--only", "ddp,fsdp3"], "--only knows ddp"),
        (["--nproc", "two"], "--nproc must be a number of ranks"),
        (["--nproc", "0"], "--nproc must be at least 1, got 0"),
        (["--nproc", "2", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["--nproc", "2", "--steps", "many"], "invalid int value: 'many'"),
        (["--nproc", "1,2,3", "--scaling", "strong", "--batch", "4"], "multiple of the 3 ranks"),
        (["--merge", "nowhere.json"], "--merge found no file nowhere.json"),
        ([], "start it by torchrun, or say with --nproc"),
        (["--nprocs", "2", "--what"], "unrecognized arguments"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        bench_train.main(words)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert text in error and error.startswith("bench_train.py: ") and error.count("\n") == 1


def test_bad_arguments_in_a_rank_and_for_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    calls = [(bench_train, ["--nproc", "2"]), (bench_memory, []), (bench_memory, ["--limit-gib", "0"])]
    for script, words in [*calls, (bench_memory, ["--worlds", "1,x"]), (bench_memory, ["--only", "ddp,x"])]:
        with pytest.raises(SystemExit) as ended:
            script.main(words)
        assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_paths_leave_the_command() -> None:
    words = ["--merge", "/data/a.json", "/data/b.json", "--out=/data/c.json", "--model", "gpt-tiny"]
    wanted = ["benchmarks/x.py", "--merge", "a.json", "b.json", "--out=c.json", "--model", "gpt-tiny"]
    assert public_command("x.py", words) == wanted


@pytest.mark.parametrize("name", [name for name in SHAPES if name.endswith("-tiny")])
def test_recomputation_changes_no_gradient(name: str) -> None:
    gradients = []
    for is_recomputing in (False, True):
        model = make_model(SHAPES[name], CPU, is_recomputing)
        model(*make_batch(SHAPES[name], 2, 0, 0, CPU)).backward()
        gradients.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_shapes_have_the_size_in_their_name() -> None:
    for name, wanted in (("gpt-46m", 46), ("gpt-168m", 168), ("gpt2-124m", 124), ("gpt2-1.5b", 1558)):
        model = make_model(SHAPES[name], torch.device("meta"))
        assert round(sum(param.numel() for param in model.parameters()) / 1e6) == wanted
    for name, wanted in (("llama-60m", 58), ("llama-1b", 1236), ("llama3-8b", 8030), ("vit-b16", 87)):
        model = make_model(SHAPES[name], torch.device("meta"))
        assert round(sum(param.numel() for param in model.parameters()) / 1e6) == wanted


def test_host_clock_knows_sleeping_from_computing() -> None:
    clock = clocks.HostClock()
    clock.mark()
    clocks.time.sleep(0.05)
    clock.mark()
    until = clocks.time.thread_time() + 0.05
    while clocks.time.thread_time() < until:
        pass
    for _ in range(3):
        clock.mark()
    ((phases, waited),) = clock.times()
    assert waited[0] > 45 and phases[1] >= 50 and waited[1] < 25
    assert clock.times() == []


def test_exposed_communication_is_what_no_kernel_covers() -> None:
    device = torch.autograd.DeviceType.CUDA

    def event(name: str, start: float, end: float, **more: Any) -> Any:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end), **more)

    events = [
        event("ncclDevKernel_AllGather", 0, 10),
        event("gemm", 4, 6),
        event("gemm", 5, 8),
        event("ncclDevKernel_ReduceScatter", 9, 14),  # beside the other one
        event("gemm", 20, 30),
        event("nccl:all_gather", 20, 100),
        event("step", 0, 100, is_user_annotation=True),
    ]
    assert clocks.exposed_us(clocks.kernel_spans(events)) == 4 + 6
    events[1].device_type = torch.autograd.DeviceType.CPU
    assert clocks.exposed_us(clocks.kernel_spans(events)) == 5 + 6


@pytest.mark.parametrize("largest", [0, 1, 5, 16, 17, 63, 100])
def test_bisection_finds_the_deepest(largest: int) -> None:
    tried: list[int] = []
    assert limits.deepest(lambda n: tried.append(n) is None and n <= largest, 16, 100) == largest
    assert len(set(tried)) == len(tried) and len(tried) <= 9


def test_probe_tells_out_of_memory_from_other_failures() -> None:
    def ended(code: int, text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], code, "", text)

    assert limits.has_run(ended(0, "Warning: bad_alloc"))
    assert not limits.has_run(ended(1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you"))
    assert not limits.has_run(ended(1, "terminate called after throwing an instance of 'std::bad_alloc'"))
    with pytest.raises(RuntimeError, match="status 1: ValueError: no such thing"):
        limits.has_run(ended(1, "Traceback\nValueError: no such thing\nend"))


def test_bench_memory_compares_phases_and_finds_a_limit(tmp_path: Path) -> None:
    """The limit leaves room for Python, torch and a few layers."""
    out = tmp_path / "memory.json"
    words = ["--model", "gpt-tiny", "--worlds", "2", "--only", "zero_shard-3", "--part", "phases", "--out", str(out)]
    result = run_script("bench_memory.py", *words)
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(out.read_text())["phases"]
    for rank in row["ranks"]:
        held = rank["held_nbytes"]
        assert held["build"] < held["zero_grad"] < held["backward"] < 1.1 * rank["promised_nbytes"]
        assert rank["peak_nbytes"] >= max(rank["resident_nbytes"].values())
    assert "| zero_shard-3 " in out.with_suffix(".md").read_text()
