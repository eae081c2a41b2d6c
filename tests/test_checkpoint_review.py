"""Checkpoints in unusual moments: several savers at once, lent, lost, replaced and cleared state, damage, leftovers."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import ranks
import torch
import torch.distributed as dist
from checkpoint_writes import writing
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import zero_shard
from zero_shard.checkpoint import background, opening
from zero_shard.checkpoint.contents import collect
from zero_shard.checkpoint.directory import IncompleteDirectory


class _Linear(nn.Linear):
    """Has an extra state that can't be set while it is stubborn."""

    is_stubborn = False

    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        if self.is_stubborn:
            raise KeyError("user code")


def _build(stage: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, zero_shard.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(_Linear(13, 17), nn.Tanh(), nn.Linear(17, 5)).to(dtype)
    return model, zero_shard.AdamW(model.parameters(), lr=0.1, module=model, config={"stage": stage})


def _train(model: nn.Module, *optimizers: zero_shard.AdamW, num_steps: int = 1) -> None:
    for number in range(num_steps):
        x = torch.linspace(-1, 1 + number, 26).view(2, 13)
        model(x.to(next(model.parameters()).dtype)).float().square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _everything(model: nn.Module, optimizer: zero_shard.AdamW) -> list[Tensor]:
    state = optimizer.full_state_dict().get("state", {})
    weights = [each for each in zero_shard.full_state_dict(model).values() if isinstance(each, Tensor)]
    return [*weights, *(tensor for _, entry in sorted(state.items()) for tensor in entry.values())]


def _assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    assert list(map(torch.equal, got, want)) == [True] * len(want)


def _several_save_at_once(root: Path) -> None:
    """Each rank's threads are slow at different moments."""
    pairs = [_build(2, seed) for seed in range(3)]
    for model, optimizer in pairs:
        _train(model, optimizer)
    chance, known = random.Random(dist.get_rank()), set()

    def pause(_: str) -> None:
        if threading.current_thread() not in known:
            known.add(threading.current_thread())
            time.sleep(chance.random() * 0.2)

    with writing(pause):
        pending = [zero_shard.async_save(root / f"at-once-{i}", *pair, which=i) for i, pair in enumerate(pairs)]
        for each in reversed(pending):
            each.wait()
    for number, pair in enumerate(pairs):
        want, other = _everything(*pair), _build(1, 9)
        assert zero_shard.load(root / f"at-once-{number}", *other)["which"] == number
        _assert_same(_everything(*other), want)


def _averages_have_memory_of_their_own(root: Path) -> None:
    model, optimizer = _build(2)
    average = zero_shard.ExponentialMovingAverage(optimizer, 0.5)
    for _ in range(2):
        _train(model, optimizer)
        average.update()
    want = _everything(model, optimizer)
    for _ in range(2):  # the second one uses the memory of the first
        zero_shard.async_save(root / "own", model, optimizer, shard=average).wait()
    other = _build(2, 4)
    zero_shard.load(root / "own", *other)
    _assert_same(_everything(*other), want)


def _what_was_replaced_does_not_come_back(root: Path) -> None:
    for stage in range(3):
        model, optimizer = _build(stage)
        _train(model, optimizer)
        zero_shard.save(root / "replaced", model, optimizer)
        want = _everything(model, optimizer)
        model[0].weight.data = torch.full((17, 13), 9.0)
        zero_shard.load(root / "replaced", model, optimizer)
        _assert_same(_everything(model, optimizer), want)
        optimizer.param_groups[0]["lr"] = 0.0
        before = model[0].weight.detach().clone()
        _train(model, optimizer)
        assert torch.equal(model[0].weight, before)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    one, other = (zero_shard.AdamW(part.parameters(), module=model, config={"stage": 1}) for part in model)
    model[1].weight.data = torch.full((3, 3), 9.0)
    zero_shard.save(root / "replaced", model, one)
    model[1].weight.data = torch.zeros(3, 3)
    zero_shard.load(root / "replaced", model, one)
    assert torch.equal(model[1].weight, torch.full((3, 3), 9.0))
    del other


def _lent_and_lost_parameters_are_refused(root: Path) -> None:
    model, optimizer = _build(2)
    average = zero_shard.ExponentialMovingAverage(optimizer, 0.5)
    _train(model, optimizer)
    average.update()
    zero_shard.save(root / "lent", model, optimizer)
    for arguments in ((model, optimizer), (model,)):
        with average.applied(), pytest.raises(RuntimeError, match="leave ExponentialMovingAverage"):
            zero_shard.load(root / "lent", *arguments)
    later = zero_shard.AdamW(model.parameters(), module=model)
    with pytest.raises(RuntimeError, match=r"has taken over parameter"):
        zero_shard.load(root / "lent", model, optimizer)
    zero_shard.load(root / "lent", model, later)


def _inference_mode_leaves_no_trace(root: Path) -> None:
    for stage in (2, 3):
        model, optimizer = _build(stage)
        _train(model, optimizer, num_steps=2)
        other, other_optimizer = _build(stage, 4)
        with torch.inference_mode():
            zero_shard.async_save(root / "mode", model, optimizer).wait()
            zero_shard.load(root / "mode", other, other_optimizer)
        zero_shard.async_save(root / "mode", model, optimizer).wait()
        _assert_same(_everything(other, other_optimizer), _everything(model, optimizer))
        for entry in other_optimizer.state.values():
            entry["exp_avg"].mul_(1.0)


def _cleared_state_stays_so(root: Path) -> None:
    model, optimizer = _build(2)
    _train(model, optimizer)
    del optimizer.state[model[0].weight]
    zero_shard.save(root / "cleared", model, optimizer)
    model, optimizer = _build(1)
    zero_shard.load(root / "cleared", model, optimizer)
    assert sorted(optimizer.held.step_counts()) == [0, 1, 1, 1]
    assert model[0].weight not in optimizer.state


def _clearing_waits_for_a_save_in_the_background(root: Path) -> None:
    model, optimizer = _build(2)
    _train(model, optimizer)
    make = background._LateCopy.make

    def make_slowly(copy: Any) -> None:
        time.sleep(0.05)
        make(copy)

    background._LateCopy.make = make_slowly  # type: ignore[method-assign]
    try:
        pending = zero_shard.async_save(root / "clearing", model, optimizer)
        want = _everything(model, optimizer)
        optimizer.state.clear()
        zero_shard.save(root / "cleared", model, optimizer)
        pending.wait()
    finally:
        background._LateCopy.make = make  # type: ignore[method-assign]
    other = _build(1, 4)
    zero_shard.load(root / "clearing", *other)
    _assert_same(_everything(*other), want)


def _masters_of_several_optimizers(root: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, list[zero_shard.AdamW]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 5)).to(torch.bfloat16)
        parts = (model[0], model[2])
        return model, [zero_shard.AdamW(each.parameters(), lr=0.01, module=model) for each in parts]

    def lows(optimizers: list[zero_shard.AdamW]) -> list[Any]:
        return [bucket.low for each in optimizers for bucket in each.held.buckets]

    model, optimizers = build(1)
    _train(model, *optimizers, num_steps=3)
    for number, each in enumerate(optimizers):
        zero_shard.save(root / f"part-{number}", model, each)
    other, others = build(2)
    for number, each in enumerate(others):
        zero_shard.load(root / f"part-{number}", other, each)
    _assert_same(lows(others), lows(optimizers))
    assert all(low.any() for low in lows(others))
    with torch.no_grad():
        other[0].weight.add_(1)  # what differs loses its remainder
    zero_shard.load(root / "part-1", other, others[1])
    low = others[0].held.buckets[0]
    position = next(i for i, param in enumerate(low.params) if param is other[0].weight)
    assert not low.local_part(low.low, position).any()


def _code_of_the_user_fails_on_one_rank(root: Path) -> None:
    class Stubborn:
        def state_dict(self) -> Any:
            return {"a": 1}

        def load_state_dict(self, state: Any) -> None:
            if dist.get_rank() == 1:
                raise KeyError("user code")

    model, optimizer = _build(2)
    _train(model, optimizer)
    zero_shard.save(root / "user", model, optimizer, thing=Stubborn(), number=3)
    with pytest.raises((KeyError, RuntimeError), match="user code"):
        zero_shard.load(root / "user", model, optimizer, thing=Stubborn())
    _train(model, optimizer)
    before = _everything(model, optimizer)
    model[0].is_stubborn = dist.get_rank() == 1
    with pytest.raises((KeyError, RuntimeError), match="user code"):
        zero_shard.load(root / "user", model, optimizer)
    _assert_same(_everything(model, optimizer), before)
    average = zero_shard.ExponentialMovingAverage(optimizer)
    with pytest.raises(ValueError, match="number: the checkpoint has no averages of this name"):
        zero_shard.load(root / "user", model, optimizer, number=average)


def _damage_to_what_others_write_changes_nothing(root: Path) -> None:
    model = nn.Sequential(nn.Linear(13, 17), nn.Tanh(), nn.Linear(17, 5))
    plain = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 13)).sum().backward()
    plain.step()
    weights, state = get_state_dict(model, plain)
    others = {"extra": {"x": numpy.arange(3)}, "averages": torch.ones(2)}  # no names of ours
    dcp.save({"model": weights, "optim": state, **others}, checkpoint_id=root / "foreign")
    dist.barrier()
    optimizer = zero_shard.AdamW(model.parameters(), module=model)
    assert zero_shard.load(root / "foreign", model, optimizer) == {}
    dist.barrier()
    places = dcp.FileSystemReader(root / "foreign").read_metadata().storage_data
    place = next(each for index, each in places.items() if index.fqn == "optim.state.0.weight.exp_avg_sq")
    file = root / "foreign" / place.relative_path
    if dist.get_rank() == 0:
        content = bytearray(file.read_bytes())
        end = place.offset + place.length
        content[end - 30 : end] = bytes(30)
        file.write_bytes(content)
    dist.barrier()
    _train(model, optimizer)
    before = _everything(model, optimizer)
    with pytest.raises((ValueError, RuntimeError), match=rf"exp_avg_sq in {file.name} can't be read"):
        zero_shard.load(root / "foreign", model, optimizer)
    _assert_same(_everything(model, optimizer), before)


def _a_refusal_closes_everything(root: Path) -> None:
    model, optimizer = _build(2)
    zero_shard.save(root / "closed", model, optimizer)
    directory = opening.Directory

    def opened(path: Path) -> Any:
        if dist.get_rank() == 1:
            raise PermissionError(13, "Permission denied", str(path))
        return directory(path)

    opening.Directory = opened  # type: ignore[misc,assignment]
    try:
        num_open = len(os.listdir("/proc/self/fd"))
        with pytest.raises((OSError, RuntimeError), match="Permission denied"):
            zero_shard.load(root / "closed", model, optimizer)
    finally:
        opening.Directory = directory  # type: ignore[misc]
    assert len(os.listdir("/proc/self/fd")) == num_open


def _numbers_of_numpy_are_numbers(root: Path) -> None:
    model, optimizer = _build(2)
    for group in optimizer.param_groups:
        group["lr"] = numpy.float64(0.25)
    values = {"loss": numpy.float32(0.5), "more": [numpy.int64(3), (numpy.bool_(True), {"a": numpy.float64(2)})]}
    zero_shard.save(root / "numpy", model, optimizer, **values)
    assert repr(zero_shard.load(root / "numpy", model, optimizer)) == repr(
        {"loss": 0.5, "more": [3, (True, {"a": 2.0})]}
    )
    assert repr(optimizer.param_groups[0]["lr"]) == "0.25"
    with pytest.raises(
        (TypeError, RuntimeError), match=r"where can't be saved: .*\(Unsupported global: GLOBAL pathlib"
    ):
        zero_shard.save(root / "numpy", model, optimizer, where=Path("a"))


_CHECKS = (
    _numbers_of_numpy_are_numbers,
    _several_save_at_once,
    _averages_have_memory_of_their_own,
    _what_was_replaced_does_not_come_back,
    _lent_and_lost_parameters_are_refused,
    _inference_mode_leaves_no_trace,
    _cleared_state_stays_so,
    _clearing_waits_for_a_save_in_the_background,
    _masters_of_several_optimizers,
    _code_of_the_user_fails_on_one_rank,
    _damage_to_what_others_write_changes_nothing,
    _a_refusal_closes_everything,
)


def _check_all(root: Path) -> None:
    for check in _CHECKS:
        check(root)


def test_checkpoints_in_unusual_moments(tmp_path: Path) -> None:
    ranks.run(2, _check_all, tmp_path)


def test_a_path_through_what_is_not_there_means_the_same_to_save_and_load(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = zero_shard.AdamW(model.parameters())
    path = tmp_path / "gone" / ".." / "step-1"
    zero_shard.save(path, model, optimizer, epoch=3)
    assert zero_shard.load(path, model, optimizer) == zero_shard.load(tmp_path / "step-1", model) == {"epoch": 3}


def test_a_later_step_sweeps_what_a_crash_has_left(tmp_path: Path) -> None:
    hidden = [tmp_path / f".step-000002.0123456789abcdef.{kind}" for kind in ("incomplete", "removed", "replaced")]
    other = tmp_path / ".stepping-2.0123456789abcdef.incomplete"
    for each in (*hidden, other):
        each.mkdir()
    in_use = IncompleteDirectory(tmp_path / "step-000004")
    IncompleteDirectory(tmp_path / "step-000003").discard()
    assert [each.exists() for each in hidden] == [False, False, True], "what was being replaced is a good one"
    assert other.exists()
    assert in_use.path.exists()
    in_use.discard()


def test_the_time_of_a_save_is_linear_in_the_number_of_parameters() -> None:
    times = []
    for count in (500, 4000):
        model = nn.ParameterList([torch.ones(2) for _ in range(count)])
        optimizer = zero_shard.AdamW(model.parameters(), module=model)
        start = time.process_time()
        collect(model, optimizer, {})
        times.append(time.process_time() - start)
    assert times[1] < 24 * times[0]
