"""A checkpoint is whole or not there: killed ranks, damaged files, full disks, races, and ranks that don't come."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import forks
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_shard
from zero_shard.checkpoint import directory, writer

_LIMIT_S = 20.0


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 30), nn.BatchNorm1d(30))


def _trained(stage: int, num_steps: int) -> tuple[nn.Module, zero_shard.AdamW]:
    """Return a model whose weights, moments, step counts and buffers all tell the number of steps."""
    model = _model()
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.1, module=model, config={"stage": stage})
    for _ in range(num_steps):
        model(torch.arange(160.0).view(4, 40).sin()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _filled(stage: int, step: int) -> tuple[nn.Module, zero_shard.AdamW]:
    """Return a model whose weights and moments are the number of a step, all of them."""
    model, optimizer = _trained(stage, 1)
    _fill(optimizer, step)
    return model, optimizer


def _fill(optimizer: zero_shard.AdamW, step: int) -> None:
    for slot in optimizer.held.slots:
        for tensor in [slot.bucket.shard, *_state(slot.bucket)]:
            tensor.fill_(step)


def _snapshot(model: nn.Module, optimizer: zero_shard.AdamW) -> list[Tensor]:
    """Return everything that this rank holds, bit by bit."""
    held = [tensor for slot in optimizer.held.slots for tensor in [slot.bucket.shard, *_state(slot.bucket)]]
    return [each.detach().clone() for each in (*held, *model.buffers(), torch.tensor(optimizer.held.step_counts()))]


def _state(bucket: Any) -> list[Tensor]:
    return [tensor for tensor in (bucket.exp_avg, bucket.exp_avg_sq) if tensor is not None]


def _assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


# --- killed ranks ---


def _save_and_die(path: str, stage: int, victim: int, file: str) -> None:
    """Save step 2, begin to save step 4 to the same place, and end one rank in the middle of a file."""
    model, optimizer = _filled(stage, 2)
    zero_shard.save(path, model, optimizer, step=2)
    _fill(optimizer, 4)
    if dist.get_rank() == victim:
        writer.before_write = lambda name: os._exit(9) if name == file else None
    zero_shard.save(path, model, optimizer, step=4)


def _assert_one_step(path: str) -> int:
    """Load a checkpoint of a filled model and return its step, if everything in it is of one and the same."""
    model, optimizer = _trained(0, 0)
    step: int = zero_shard.load(path, model, optimizer)["step"]
    assert len(optimizer.state) == 6
    for entry in optimizer.state.values():
        assert torch.equal(entry["exp_avg"], torch.full_like(entry["exp_avg"], step))
        assert torch.equal(entry["exp_avg_sq"], torch.full_like(entry["exp_avg"], step))
    assert all(bool((param == step).all()) for param in model.parameters())
    return step


def _kill_each_rank_in_each_file(parent: str) -> None:
    deaths = [(0, "__0_0.distcp"), (1, "__1_0.distcp"), (2, "__2_0.distcp"), (0, ".metadata"), (0, "manifest.json")]
    for number, (victim, file) in enumerate(deaths):
        path = f"{parent}/{number}"
        answers, seconds = forks.run(3, _save_and_die, path, number % 4, victim, file)
        assert seconds < _LIMIT_S, (victim, file)
        for rank, answer in enumerate(answers):
            if rank == victim:
                assert answer == forks.KILLED, answer
            else:
                assert f"rank {victim} gave no sign" in answer, answer
                assert f"saving {path}" in answer
        assert _assert_one_step(path) == 2
        model, optimizer = _filled(0, 4)
        zero_shard.save(path, model, optimizer, step=4)  # and what was left is swept away
        assert not [name for name in os.listdir(parent) if name.startswith(".")]
        assert _assert_one_step(path) == 4


def test_killing_a_rank_at_any_file_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    ranks.run(1, _kill_each_rank_in_each_file, str(tmp_path), fresh=True, has_group=False)


def _save_for_ever(parent: str, is_numbered: bool) -> None:
    model, optimizer = _trained(2, 1)
    for step in itertools.count():
        _fill(optimizer, step)
        name = f"step-{step:06}" if is_numbered else "step"
        zero_shard.save(f"{parent}/{name}", model, optimizer, keep=2 if is_numbered else None, step=step)


def _kill_at_random_moments(parent: str, num_kills: int) -> list[int]:
    generator, steps = random.Random(7), []
    for number in range(num_kills):
        place = f"{parent}/{number}"
        os.mkdir(place)
        is_numbered = number % 2 == 0
        world = forks.World(1 + number // 2 % 2, _save_for_ever, place, is_numbered)
        while not any(not name.startswith(".") for name in os.listdir(place)):
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.25))
        world.kill()
        world.answers()
        steps.append(_assert_one_step(place))
        if is_numbered:
            names = [name for name in os.listdir(place) if not name.startswith(".")]
            assert 1 <= len(names) <= 3, names
        shutil.rmtree(place)
    return steps


def test_fifty_kills_at_random_moments_always_leave_a_loadable_checkpoint(tmp_path: Path) -> None:
    (steps,) = ranks.run(1, _kill_at_random_moments, str(tmp_path), 50, fresh=True, has_group=False)
    assert sum(step > 0 for step in steps) > 10, "the kills hit saves that replace others"


# --- damaged files ---


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


_DAMAGES: list[Callable[[Path], None]] = [_cut, partial(os.truncate, length=0), os.remove, _flip]


def _load_damaged(good: str, bad: str, stage: int) -> int:
    count = 0
    model, optimizer = _trained(stage, 3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch.manual_seed(dist.get_rank())
    before, random_before = _snapshot(model, optimizer), torch.get_rng_state()
    groups = repr([{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups])
    for name, damage in itertools.product(sorted(os.listdir(good)), _DAMAGES):
        if dist.get_rank() == 0:
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            damage(Path(bad) / name)
        dist.barrier()
        start = time.monotonic()
        with pytest.raises((ValueError, OSError, RuntimeError)) as raised:
            zero_shard.load(bad, model, optimizer, scheduler=scheduler)
        assert name in str(raised.value), (name, damage, raised.value)
        assert time.monotonic() - start < _LIMIT_S
        _assert_same(_snapshot(model, optimizer), before)
        assert torch.equal(torch.get_rng_state(), random_before)
        assert scheduler.last_epoch == 0
        assert repr([{k: g[k] for k in g if k != "params"} for g in optimizer.param_groups]) == groups
        count += 1
        dist.barrier()
    extra = zero_shard.load(good, model, optimizer, scheduler=scheduler)
    assert extra["step"] == 2
    assert scheduler.last_epoch == 2
    return count


def _save_good(path: str) -> None:
    model, optimizer = _trained(1, 2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    for _ in range(2):
        scheduler.step()
    zero_shard.save(path, model, optimizer, step=2, scheduler=scheduler)


@pytest.mark.parametrize("stage", [2, 3])
def test_every_damage_to_every_file_is_named_on_all_ranks_and_changes_nothing(stage: int, tmp_path: Path) -> None:
    good, bad = str(tmp_path / "good"), str(tmp_path / "bad")
    ranks.run(3, _save_good, good)
    assert ranks.run(2, _load_damaged, good, bad, stage) == [4 * len(os.listdir(good))] * 2
    assert len(os.listdir(good)) == 5


class _Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, ("trapped",)


def test_no_code_in_a_checkpoint_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = _trained(0, 1)
    zero_shard.save("checkpoint", model, optimizer, step=2)
    index = pickle.loads(Path("checkpoint/.metadata").read_bytes())
    index.storage_meta.modules.append(_Trap())
    os.remove("checkpoint/manifest.json")
    Path("checkpoint/.metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match=r"\.metadata is damaged.*mkdir"):
        zero_shard.load("checkpoint", model, optimizer)
    with pytest.raises(TypeError, match="thing can't be saved: _Trap"):
        zero_shard.save("checkpoint2", model, optimizer, thing=_Trap())
    assert not Path("trapped").exists()
    assert not Path("checkpoint2").exists()


# --- disks ---


@contextmanager
def _small_disk(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _fill_the_disk(path: str) -> list[str]:
    model, optimizer = _trained(2, 2)
    zero_shard.save(path, model, optimizer, step=2)
    padding = torch.zeros(300_000)
    texts = []
    for _ in range(2):
        with pytest.raises((OSError, RuntimeError)) as raised:
            zero_shard.save(path, model, optimizer, step=4, padding=padding)
        texts.append(str(raised.value))
        dist.barrier()
        assert sorted(os.listdir(Path(path).parent)) == ["checkpoint"], os.listdir(Path(path).parent)
        dist.barrier()
    assert zero_shard.load(path, model, optimizer)["step"] == 2
    return texts


def test_a_full_disk_is_named_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk", "size=600k") as disk:
        for texts in zip(*ranks.run(2, _fill_the_disk, str(disk / "checkpoint")), strict=True):
            for text in texts:
                assert re.search(r"No space left on device: '__[01]_0.distcp'", text), text
            assert "failed on rank" in texts[1] or "__1_0" in texts[1], texts


def _save_read_only(path: str) -> str:
    model, optimizer = _trained(2, 1)
    with pytest.raises((OSError, RuntimeError)) as raised:
        zero_shard.save(path, model, optimizer)
    return str(raised.value)


def test_a_read_only_directory_is_named_on_all_ranks(tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk", "ro") as disk:
        for text in ranks.run(2, _save_read_only, str(disk / "checkpoint")):
            assert "Read-only file system" in text, text
            assert str(disk) in text


# --- races ---


def _load_often(path: str) -> None:
    for _ in range(12):
        _assert_one_step(path)


def _two_savers_and_a_reader(parent: str) -> None:
    path = f"{parent}/step"
    savers = [forks.World(1, _save_for_ever, parent, False) for _ in range(2)]
    while not os.path.exists(path):
        time.sleep(0.01)
    readers = forks.World(2, _load_often, path, timeout_s=20)
    answers = readers.answers()
    assert answers == ["done", "done"], answers
    for saver in savers:
        saver.kill()
        (answer,) = saver.answers()
        assert answer == forks.KILLED, answer
    _assert_one_step(path)


def test_two_savers_of_one_name_and_readers_never_see_a_mix(tmp_path: Path) -> None:
    ranks.run(1, _two_savers_and_a_reader, str(tmp_path), fresh=True, has_group=False)


def _only_rank_0(path: str, is_async: bool) -> None:
    model, optimizer = _trained(2, 1)
    if dist.get_rank() == 0:
        save = zero_shard.async_save if is_async else zero_shard.save
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"saving .*: rank 1 did not take part within 3 s. All ranks must call"):
            save(path, model, optimizer)
        assert time.monotonic() - start < 4
        with pytest.raises(RuntimeError, match=r"loading .*: rank 1 did not take part"):
            zero_shard.load(path, model, optimizer)
        Path(f"{path}-done").touch()
        assert not os.path.exists(path)
    while not os.path.exists(f"{path}-done"):
        time.sleep(0.05)


def _one_saves_and_one_loads(path: str) -> None:
    model, optimizer = _trained(2, 1)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"saving .*: rank 1 did not take part within 3 s"):
            zero_shard.save(path, model, optimizer)
    else:
        with pytest.raises(RuntimeError, match=r"loading .*: rank 0 did not take part within 3 s"):
            zero_shard.load(path, model, optimizer)


def _only_rank_0_calls(parent: str) -> None:
    for is_async in (False, True):
        answers, _ = forks.run(2, _only_rank_0, f"{parent}/{is_async}", is_async, timeout_s=4)
        assert answers == ["done", "done"], answers
    answers, _ = forks.run(2, _one_saves_and_one_loads, f"{parent}/both", timeout_s=4)
    assert answers == ["done", "done"], answers


def test_a_rank_that_does_not_call_is_named(tmp_path: Path) -> None:
    ranks.run(1, _only_rank_0_calls, str(tmp_path), fresh=True, has_group=False)


def _different_names(parent: str) -> str:
    model, optimizer = _trained(2, 1)
    with pytest.raises(ValueError, match="ranks save under different names") as raised:
        zero_shard.save(f"{parent}/of-rank-{dist.get_rank()}", model, optimizer)
    dist.barrier()
    assert os.listdir(parent) == []
    return str(raised.value)


def test_ranks_that_save_under_different_names_are_told(tmp_path: Path) -> None:
    first, second = ranks.run(2, _different_names, str(tmp_path))
    assert first == second
    assert "of-rank-0" in first
    assert "of-rank-1" in first


# --- retention ---


def _names(parent: Path) -> list[str]:
    return sorted(os.listdir(parent))


def test_keep_removes_the_older_complete_ones_and_nothing_else(tmp_path: Path) -> None:
    model, optimizer = _trained(0, 1)
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-7").mkdir()  # somebody else's
    for step in (100, 200, 300):
        zero_shard.save(tmp_path / f"step-{step}", model, optimizer, step=step)
    (tmp_path / "step-300" / "__0_0.distcp").unlink()  # counts for nothing, and stays
    zero_shard.save(tmp_path / "step-400", model, optimizer, keep=2, step=400)
    assert _names(tmp_path) == ["step-200", "step-300", "step-400", "step-7", "step-notes"]
    # A run that went back to an earlier step: what was written last is the latest, whatever its number.
    zero_shard.save(tmp_path / "step-150", model, optimizer, keep=1, step=150)
    assert _names(tmp_path) == ["step-150", "step-300", "step-7", "step-notes"]
    assert zero_shard.latest_checkpoint(tmp_path) == tmp_path / "step-150"
    assert zero_shard.load(tmp_path, model, optimizer)["step"] == 150
    for keep, name, reason in [
        (0, "step-1", "at least 1"),
        (1.5, "step-1", "at least 1"),
        (2, "last", "ends in a num"),
    ]:
        with pytest.raises(ValueError, match=reason):
            zero_shard.save(tmp_path / name, model, optimizer, keep=keep)  # type: ignore[arg-type]
    assert _names(tmp_path) == ["step-150", "step-300", "step-7", "step-notes"]


def test_a_slow_saver_removes_no_newer_checkpoint_but_itself_stays(tmp_path: Path) -> None:
    model, optimizer = _trained(0, 1)
    slow = directory.IncompleteDirectory(tmp_path / "step-1")
    for step in (2, 3):
        zero_shard.save(tmp_path / f"step-{step}", model, optimizer, keep=2)
    assert slow.path.exists(), "one that is being written is nobody's leftover"
    with directory.opened(slow.path) as fd, writer.CheckedFile(fd, ".metadata") as file:
        file.write(b"index")
    slow.commit({".metadata": file.facts}, {})
    directory.prune(tmp_path / "step-1", 2)
    assert _names(tmp_path) == ["step-1", "step-3"]


def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    model, optimizer = _trained(0, 1)
    precious = tmp_path / "runs"
    precious.mkdir()
    (precious / "thesis.tex").write_text("precious")
    with pytest.raises(FileExistsError, match="no checkpoint; remove it or save under another name"):
        zero_shard.save(precious, model, optimizer)
    with pytest.raises(FileExistsError):
        zero_shard.save(precious / "thesis.tex", model, optimizer)
    assert (precious / "thesis.tex").read_text() == "precious"
    with pytest.raises(FileNotFoundError, match="no complete checkpoint at"):
        zero_shard.load(precious, model, optimizer)
    assert _names(tmp_path) == ["runs"]
    (tmp_path / "empty").mkdir()
    zero_shard.save(tmp_path / "empty", model, optimizer)
    assert zero_shard.latest_checkpoint(tmp_path / "nowhere") is None


def test_without_an_exchange_in_one_step_a_crash_between_two_renames_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "_exchange", lambda one, other: False)
    model, optimizer = _trained(0, 1)
    for step in (1, 2):
        zero_shard.save(tmp_path / "checkpoint", model, optimizer, step=step)
    assert _names(tmp_path) == ["checkpoint"]
    calls: list[Path] = []
    rename = Path.rename

    def dying(self: Path, target: Any) -> Path:
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying)
        with suppress(KeyboardInterrupt):
            zero_shard.save(tmp_path / "checkpoint", model, optimizer, step=3)
    assert "checkpoint" not in _names(tmp_path)
    assert zero_shard.load(tmp_path / "checkpoint", model, optimizer)["step"] == 2
    zero_shard.save(tmp_path / "checkpoint", model, optimizer, step=4)
    assert zero_shard.load(tmp_path / "checkpoint", model, optimizer)["step"] == 4
