"""What the monitor writes, that it is right, and that training does not feel it."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import pickle
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import zero_shard
from zero_shard.monitor.drift import Band
from zero_shard.monitor.outputs import JsonLines
from zero_shard.reporting.reader import RunLog

NUM_STEPS = 4
_STAGES = [0, 1, 2, 3]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Linear(5, 1))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _batch(step: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + _rank()))


def _optimizer(model: nn.Module, stage: int, **config: Any) -> zero_shard.AdamW:
    first, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": rest, "lr": 1e-3}]
    return zero_shard.AdamW(groups, lr=1e-2, module=model, config={"stage": stage, "bucket_mib": 1e-4, **config})


class _Outcome(dict[str, Any]):
    """Losses, norms and sent bytes as the loop knows them, events as `log` returned them, and the final weights."""


def _train(stage: int, path: str | None, num_micro: int = 1, clips: bool = True, **options: Any) -> _Outcome:
    """Train some steps, with a monitor if there is a path."""
    model = _model()
    optimizer = _optimizer(model, stage)
    monitor = zero_shard.Monitor(optimizer, path, console=False, **options) if path is not None else None
    out = _Outcome(losses=[], norms=[], sent=[], events=[])
    for step in range(NUM_STEPS):
        loss = torch.zeros(())
        for micro in range(num_micro):
            loss = model(_batch(step + 100 * micro)).square().mean() / num_micro
            loss.backward()
        if clips:
            out["norms"].append(float(optimizer.clip_grad_norm_(0.01)))
        optimizer.step()
        optimizer.zero_grad()
        out["losses"].append(float(loss.detach()))
        out["sent"].append(optimizer.usage().sent_nbytes / 2**20)
        if monitor is not None:
            out["events"] += monitor.log(loss=loss)
    if monitor is not None:
        out["events"] += monitor.close()
    out["weights"] = zero_shard.full_state_dict(model)
    return out


def _lines(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (path / "run.jsonl").read_text().splitlines()]
    return [entry for entry in entries if kind in (None, entry["kind"])]


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), *((2, stage) for stage in _STAGES)])
@pytest.mark.parametrize(("num_micro", "clips"), [(1, True), (2, False)])
def test_numbers_are_right_and_training_is_the_same_to_the_bit(
    world_size: int, stage: int, num_micro: int, clips: bool, tmp_path: Path
) -> None:
    plain = ranks.run(world_size, _train, stage, None, num_micro, clips)
    watched = ranks.run(world_size, _train, stage, str(tmp_path), num_micro, clips, tokens_per_step=64)

    for name, weight in plain[0]["weights"].items():
        assert torch.equal(weight, watched[0]["weights"][name]), name
    (run,), steps = _lines(tmp_path, "run"), _lines(tmp_path, "step")
    assert (run["schema"], run["world_size"], run["stage"], run["num_params"]) == (1, world_size, stage, 128)
    assert run["config"]["stage"] == stage and run["tokens_per_step"] == 64
    floor = (world_size - 1) / world_size * 128 * 4 * (3 if stage == 3 else 2)
    assert run["floor_sent_mib"] == pytest.approx(floor / 2**20, rel=0.2), "parameters are padded"
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4]
    for number, entry in enumerate(steps):
        assert entry["loss"] == pytest.approx(sum(each["losses"][number] for each in watched) / world_size, rel=1e-6)
        if clips:
            assert entry["grad_norm"] == pytest.approx(plain[0]["norms"][number], rel=1e-6), "before the clip"
        assert entry["lr"] == [1e-2, 1e-3]
        assert entry["tokens_per_s"] == pytest.approx(64e3 / entry["step_ms"])
        parts = [entry[f"{name}_ms"] for name in ("forward", "backward", "optimizer")]
        assert min(parts) > 0 and sum(parts) <= entry["step_ms"]
        assert 0 <= entry["exposed_ms"] <= entry["step_ms"] and (entry["exposed_ms"] > 0) == (world_size > 1)
        assert entry["sent_mib"] == pytest.approx(sum(each["sent"][number] for each in watched) / world_size)
        assert 0 < entry["held_mib"] < 0.01 < entry["peak_mib"]
        assert 0 < entry["slowest_ms"] and entry["slowest_rank"] < world_size
    assert watched[0]["events"] == []


def _norm_without_clip(stage: int, path: str) -> list[float]:
    model = _model()
    optimizer, norms = _optimizer(model, stage), []
    with zero_shard.Monitor(optimizer, path, console=False) as monitor:
        for step in range(2):
            model(_batch(step)).square().mean().backward()
            norms.append(float(torch.stack([param.grad.norm() for param in model.parameters()]).norm()))
            optimizer.step()
            optimizer.zero_grad()
            monitor.log()
    return norms


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), *((2, stage) for stage in _STAGES)])
def test_norm_is_known_where_nobody_clips_and_loss_may_be_missing(world_size: int, stage: int, tmp_path: Path) -> None:
    norms = ranks.run(world_size, _norm_without_clip, stage, str(tmp_path))[0]
    steps = _lines(tmp_path, "step")
    assert [entry["grad_norm"] for entry in steps] == pytest.approx(norms, rel=1e-5)
    assert [entry["loss"] for entry in steps] == [None, None]


def test_every_so_many_steps_are_one_line(tmp_path: Path) -> None:
    out = ranks.run(2, _train, 2, str(tmp_path), every=2)
    steps = _lines(tmp_path, "step")
    assert [entry["step"] for entry in steps] == [2, 4]
    losses = [sum(each["losses"][number] for each in out) / 2 for number in range(NUM_STEPS)]
    assert [entry["loss"] for entry in steps] == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])
    assert [entry["grad_norm"] for entry in steps] == pytest.approx([out[0]["norms"][1], out[0]["norms"][3]])


def _odd_loop(stage: int, path: str) -> tuple[list[float], list[dict[str, Any]]]:
    """Step with a closure, log every second step, number steps with NumPy, and fail in a backward."""
    model = _model()
    optimizer, norms = _optimizer(model, stage), []
    monitor = zero_shard.Monitor(optimizer, path, console=False, tokens_per_step=numpy.int64(64))
    failing = torch.ones(1, requires_grad=True)
    failing.register_hook(lambda _: 1 / 0)
    for step in range(6):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(_batch(step)).square().mean()
            loss.backward()
            norms.append(float(optimizer.clip_grad_norm_(0.01)))
            return loss

        loss = optimizer.step(closure)
        if step % 2:
            monitor.log(loss=loss, step=numpy.int64(step), tokens=torch.tensor(8))  # type: ignore[arg-type]
        elif step == 2 and not dist.is_initialized():
            with pytest.raises(ZeroDivisionError):
                (model(_batch(step)) + failing).sum().backward()
            optimizer.zero_grad()
            monitor.log()
    monitor.close()
    monitor.close()
    with pytest.raises(RuntimeError, match=r"called after close\(\)"):
        monitor.log()
    return norms, _lines(Path(path), "step") if _rank() == 0 else []


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), *((2, stage) for stage in _STAGES)])
def test_odd_loops_get_right_numbers(world_size: int, stage: int, tmp_path: Path) -> None:
    norms, steps = ranks.run(world_size, _odd_loop, stage, str(tmp_path), has_group=world_size > 1)[0]
    logged = [1, 2, 3, 5] if world_size == 1 else [1, 3, 5]
    assert [entry["step"] for entry in steps] == logged
    assert [entry["grad_norm"] for entry in steps] == pytest.approx([norms[step] for step in logged], rel=1e-6)
    for entry in steps:
        parts = [entry[f"{name}_ms"] for name in ("forward", "backward", "optimizer")]
        assert min(parts) > 0 and sum(parts) <= entry["step_ms"], "a closure's parts are not the optimizer's, too"


def _two_monitors(path: str) -> list[list[str]]:
    model = _model()
    optimizer, scaler = _optimizer(model, 2), torch.amp.GradScaler("cpu", init_scale=2.0)
    first, second = (zero_shard.Monitor(optimizer, f"{path}/{name}", console=False) for name in "ab")
    for step in range(2):
        out = model(_batch(step))
        if step == 1:
            first.close()
            out.register_hook(lambda grad: grad * math.inf)
        scaler.scale(out.square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for monitor in (first, second)[step:]:
            monitor.log()
    second.close()
    return [[entry.get("event", entry["kind"]) for entry in _lines(Path(path, name))] for name in "ab"]


def test_a_monitor_that_is_closed_leaves_the_other_one_alone(tmp_path: Path) -> None:
    kinds = ranks.run(2, _two_monitors, str(tmp_path))[0]
    assert kinds == [["run", "step"], ["run", "step", "step", "nonfinite", "skipped"]]


def test_watched_model_can_be_pickled_and_copied(optimizer: zero_shard.AdamW) -> None:
    with zero_shard.Monitor(optimizer, console=False) as monitor:
        for copied in (pickle.loads(pickle.dumps(optimizer.module)), copy.deepcopy(optimizer.module)):
            copied(_batch(0)).sum().backward()
            assert not monitor._timer._spans, "the copy is not watched"


# ---- events ---------------------------------------------------------------------------------------------------------


def _explode(stage: int, path: str, where: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Make something infinite on the last rank in the second step."""
    model = _model()
    optimizer = _optimizer(model, stage, skip_nonfinite="scaler" not in where)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    monitor, events = zero_shard.Monitor(optimizer, path, console=False), []
    is_last = _rank() == (dist.get_world_size() if dist.is_initialized() else 1) - 1
    for step in range(3):
        optimizer.zero_grad()
        handle = model[0].register_forward_hook(_explode_in_backward) if step == 1 and is_last else None
        out = model(_batch(step))
        if handle is not None:
            handle.remove()
            out = out * math.inf if where == "loss" else out
        loss = out.square().mean()
        with pytest.warns(UserWarning) if step == 1 and "scaler" not in where else contextlib.nullcontext():
            if "scaler" in where:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
        if where != "scaler, zeroed first":
            optimizer.zero_grad()
        events += monitor.log(loss=loss)
    events += monitor.close()
    return events, zero_shard.full_state_dict(model)


def _explode_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.register_hook(lambda grad: grad * math.inf)


def _explode_in_8_bits(path: str) -> list[dict[str, Any]]:
    model = nn.Sequential(nn.Linear(64, 128, bias=False))  # smaller ones travel in their own dtype
    optimizer = _optimizer(model, 2, reduce_dtype="int8")
    monitor = zero_shard.Monitor(optimizer, path, console=False)
    out = model(torch.ones(2, 64))
    if _rank() == 1:
        out.register_hook(lambda grad: grad * math.inf)
    out.square().mean().backward()
    optimizer.step()
    return [*monitor.log(), *monitor.close()]


def test_non_finite_gradient_is_traced_to_its_rank_behind_8_bits(tmp_path: Path) -> None:
    events = ranks.run(2, _explode_in_8_bits, str(tmp_path))[0]
    assert [(entry["event"], entry["parameter"], entry["rank"]) for entry in events] == [("nonfinite", "0.weight", 1)]


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), *((2, stage) for stage in _STAGES)])
@pytest.mark.parametrize("where", ["backward", "loss", "scaler", "scaler, zeroed first"])
def test_non_finite_gradient_is_traced_to_parameter_and_rank(
    world_size: int, stage: int, where: str, tmp_path: Path
) -> None:
    outcomes = ranks.run(world_size, _explode, stage, str(tmp_path), where)
    events = _lines(tmp_path, "event")
    assert all(each == events for each, _ in outcomes), "the same on all ranks"
    assert [(entry["step"], entry["event"]) for entry in events] == [(2, "nonfinite"), (2, "skipped")]
    assert events[0]["parameter"] == ("3.bias" if where == "loss" else "0.bias"), "the first that backward meets"
    assert events[0]["rank"] == world_size - 1
    its_loss = "not finite either" if where == "loss" else "finite"
    assert f"the gradient is not finite on rank {world_size - 1} (its loss is {its_loss})" in events[0]["message"]
    bad = _lines(tmp_path, "step")[1]
    assert bad["grad_norm"] in ("nan", "inf")
    assert all(weight.isfinite().all() for weight in outcomes[0][1].values())


def test_band_sounds_once_for_a_spike_and_again_for_the_next() -> None:
    band = Band("loss", 0.1, True)
    values = [2.0 + 0.01 * (number % 5) for number in range(40)]
    values[20] = values[30] = values[31] = 5.0
    alarms = [number for number, value in enumerate(values) if band.add(value) is not None]
    assert alarms == [20, 30]


def test_band_notices_a_slow_rise_and_not_a_fall() -> None:
    falling, rising = Band("loss", 0.1, True), Band("loss", 0.1, True)
    assert not any(falling.add(5.0 - 0.004 * number) for number in range(1000))
    alarms = [rising.add(2.0 + 0.001 * number) for number in range(1000)]
    assert "is rising" in str(next(filter(None, alarms)))
    assert falling.add(math.nan) is None


# ---- outputs --------------------------------------------------------------------------------------------------------


def test_cut_last_line_is_removed_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for content, kept in [(b"", ""), (b'{"kin', ""), (b'{"a": 1}\n{"b', '{"a": 1}\n'), (b"x" * 9000, "")]:
        path.write_bytes(content)
        lines = JsonLines(path)
        assert lines.has_lines == bool(kept)
        lines.write({"x": [math.nan, -math.inf, 1.5]})
        lines.close()
        assert path.read_text() == kept + '{"x": ["nan", "-inf", 1.5]}\n'


def _fill_up(path: str) -> tuple[int, str]:
    """Train on, on a disk that is full after the first line."""
    optimizer = _optimizer(_model(), 2)
    monitor = zero_shard.Monitor(optimizer, path, console=False)
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (Path(path, "run.jsonl").stat().st_size + 30, former[1]))
    try:
        _take_steps(optimizer, monitor)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    return int(optimizer.held.step_counts()[0]), Path(path, "run.jsonl").read_text()


def test_full_disk_costs_the_log_and_not_the_run(tmp_path: Path) -> None:
    num_steps, text = ranks.run(1, _fill_up, str(tmp_path), has_group=False)[0]
    assert num_steps == 3
    assert json.loads(text.splitlines()[0])["kind"] == "run"


def test_terminal_that_is_gone_does_not_end_the_run(
    optimizer: zero_shard.AdamW, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: Any, **__: Any) -> None:
        raise BrokenPipeError("gone")

    monitor = zero_shard.Monitor(optimizer, tmp_path, total_steps=3)
    monkeypatch.setattr(monitor._bar._bar, "update", write)  # type: ignore[union-attr]
    _take_steps(optimizer, monitor)
    assert len(_lines(tmp_path, "step")) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "zero_shard: the monitor can't write any more and goes on without its ProgressBar: gone"
    ]


def _resume(path: str, is_numbered: bool) -> None:
    for turn in range(2):
        model = _model()
        optimizer = _optimizer(model, 2)
        if Path(path, "checkpoint").exists():
            zero_shard.load(Path(path, "checkpoint"), model, optimizer)
        with zero_shard.Monitor(optimizer, path, console=False) as monitor:
            for step in range(2):
                model(_batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.log(loss=1.0, step=2 * turn + step + 1 if is_numbered else None)
        zero_shard.save(Path(path, "checkpoint"), model, optimizer)


@pytest.mark.parametrize("is_numbered", [False, True])
def test_resumed_run_appends_and_counts_on(is_numbered: bool, tmp_path: Path) -> None:
    ranks.run(2, _resume, str(tmp_path), is_numbered)
    kinds = [(entry["kind"], entry.get("step")) for entry in _lines(tmp_path)]
    first, second = [("run", None), ("step", 1), ("step", 2)], [("run", None), ("event", 2), ("step", 3), ("step", 4)]
    assert kinds == first + second
    (event,) = _lines(tmp_path, "event")
    assert (event["event"], event["message"]) == ("resume", "the log goes on after step 2, on 2 ranks")


def _peer_leaves(path: str) -> None:
    monitor = zero_shard.Monitor(_optimizer(_model(), 2), path, console=False)
    if _rank() == 1:
        raise ValueError("left")
    monitor.log()
    with pytest.raises(RuntimeError, match="waiting for the numbers of the monitor"):
        monitor.close()
    with pytest.raises(RuntimeError, match="after close"):
        monitor.log()


def test_close_ends_the_monitor_even_if_a_peer_is_gone(tmp_path: Path) -> None:
    errors = ranks.run_expecting_errors(2, _peer_leaves, str(tmp_path))
    assert [type(error) for error in errors] == [type(None), ValueError]


def test_log_of_steps_from_0_that_begins_anew_can_be_reported(optimizer: zero_shard.AdamW, tmp_path: Path) -> None:
    for _ in range(2):
        with zero_shard.Monitor(optimizer, tmp_path, console=False) as monitor:
            monitor.log(step=0)
            with pytest.raises(ValueError, match="step must be a whole number from 0 on, got -1"):
                monitor.log(step=-1)
    assert RunLog(tmp_path / "run.jsonl").num_starts == 2


@pytest.fixture
def optimizer() -> Iterator[zero_shard.AdamW]:
    yield _optimizer(_model(), 2)


def _take_steps(optimizer: zero_shard.AdamW, monitor: zero_shard.Monitor, num_steps: int = 3) -> None:
    assert optimizer.module is not None
    with monitor:
        for step in range(num_steps):
            loss = optimizer.module(_batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)


def test_progress_bar_shows_the_numbers(optimizer: zero_shard.AdamW, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = zero_shard.Monitor(optimizer, tokens_per_step=8, total_steps=3)
    monitor.event("rollback", "for a\ntest")
    _take_steps(optimizer, monitor)
    shown = capsys.readouterr().err
    assert "step 0: rollback: for a test" in shown
    assert "3/3" in shown and "loss " in shown and "tokens/s" in shown and "norm " in shown


def test_tensorboard_gets_every_number(optimizer: zero_shard.AdamW, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="an extra: pip install 'zero-shard[monitor]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _take_steps(optimizer, zero_shard.Monitor(optimizer, tmp_path, console=False, tensorboard=True))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {"zero_shard/loss", "zero_shard/grad_norm", "zero_shard/lr/1"} <= set(events.Tags()["scalars"])
    losses = [event.value for event in events.Scalars("zero_shard/loss")]
    assert losses == pytest.approx([entry["loss"] for entry in _lines(tmp_path, "step")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be a whole number of steps, at least 1, got 0"),
        ({"tokens_per_step": 0}, "tokens_per_step must be positive, got 0"),
        ({"tensorboard": True}, "tensorboard=True needs a path"),
    ],
)
def test_bad_arguments_are_refused(optimizer: zero_shard.AdamW, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zero_shard.Monitor(optimizer, console=False, **options)
    with pytest.raises(TypeError, match=r"needs a zero_shard.AdamW, got SGD"):
        zero_shard.Monitor(torch.optim.SGD([nn.Parameter(torch.ones(1))]), console=False)  # type: ignore[arg-type]


def _imported() -> set[str]:
    return {"tensorboard", "torch.utils.tensorboard", "matplotlib"} & set(sys.modules)


def _open_in_a_file(path: str) -> None:
    zero_shard.Monitor(_optimizer(_model(), 2), Path(path, "file", "log"), console=False)


def test_path_that_rank_0_cannot_write_raises_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    errors = ranks.run_expecting_errors(2, _open_in_a_file, str(tmp_path))
    assert isinstance(errors[0], OSError)
    assert "opening the files of the monitor failed on rank 0" in str(errors[1])


def test_import_brings_none_of_the_libraries() -> None:
    assert not ranks.run(1, _imported, fresh=True, has_group=False)[0]


def test_missing_library_is_named(optimizer: zero_shard.AdamW, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_shard.monitor.outputs.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"console=True.*needs tqdm.*pip install 'zero-shard\[monitor\]'"):
        zero_shard.Monitor(optimizer)


# ---- cost -----------------------------------------------------------------------------------------------------------


def _num_calls(width: int, path: str) -> Counter[str]:
    """Return how often functions of the monitor were called in a step of a model with so many layers."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(width)))
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": 2})
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and any(part in code.co_filename for part in ("/monitor/", "gradient_watch")):
            counts[code.co_name] += 1

    monitor = zero_shard.Monitor(optimizer, path, console=False)
    for step in range(3):
        if step == 2:
            sys.setprofile(count)
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)
    sys.setprofile(None)
    monitor.close()
    return counts


def test_work_does_not_grow_with_the_number_of_parameters(tmp_path: Path) -> None:
    few, many = (ranks.run(2, _num_calls, width, str(tmp_path / f"{width}"))[0] for width in (2, 60))
    assert few["log"] == 1
    assert many == few
