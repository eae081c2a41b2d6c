"""Asynchronous saves: the state at the call and no later one, errors that surface, memory that is bounded."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from checkpoint_writes import writing
from torch import Tensor, nn

import zero_shard
from zero_shard.checkpoint import background


def _build(stage: int, **config: Any) -> tuple[nn.Module, zero_shard.AdamW, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20), nn.BatchNorm1d(20))
    model[2].bias.requires_grad_(False)
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.1, module=model, config={"stage": stage, **config})
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def _train(model: nn.Module, optimizer: zero_shard.AdamW, scheduler: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        model(torch.arange(120.0).view(4, 30).sin()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def _everything(model: nn.Module, optimizer: zero_shard.AdamW) -> list[Tensor]:
    state = optimizer.full_state_dict().get("state", {})
    moments = [tensor for _, entry in sorted(state.items()) for tensor in entry.values()]
    return [*zero_shard.full_state_dict(model).values(), *moments]


def _later_steps_do_not_leak_in(path: str, stage: int, config: dict[str, Any]) -> None:
    model, optimizer, scheduler = _build(stage, **config)
    _train(model, optimizer, scheduler, 2)
    at_the_call = _everything(model, optimizer)
    numbers = [1]
    may_write = threading.Event()
    with writing(lambda name: may_write.wait(20)):
        pending = zero_shard.async_save(path, model, optimizer, scheduler=scheduler, numbers=numbers)
        numbers.append(2)
        with torch.no_grad():
            model[3].running_mean.fill_(77.0)
        _train(model, optimizer, scheduler, 3)  # while nothing has been written yet
        assert not pending.done()
        with pytest.raises(TimeoutError, match=r"has not ended within 0\.01 s"):
            pending.wait(0.01)
        may_write.set()
        pending.wait()
    assert pending.done()
    trained = _everything(model, optimizer)
    other, other_optimizer, other_scheduler = _build(stage, **config)
    extra = zero_shard.load(path, other, other_optimizer, scheduler=other_scheduler)
    assert all(map(torch.equal, _everything(other, other_optimizer), at_the_call))
    assert extra["numbers"] == [1]
    assert other_scheduler.last_epoch == 2
    with torch.no_grad():
        other[3].running_mean.fill_(77.0)
    _train(other, other_optimizer, other_scheduler, 3)
    same = list(map(torch.equal, _everything(other, other_optimizer), trained))
    assert all(same), (stage, config, same)


def _check_all(parent: str) -> None:
    for stage, config in ((0, {}), (1, {"param_dtype": "bfloat16"}), (2, {"state_dtype": "int8"}), (3, {})):
        _later_steps_do_not_leak_in(f"{parent}/{stage}", stage, config)
    _errors_surface(parent)
    _moments_changed_by_hand_are_noticed(parent)
    _memory_is_bounded(parent)
    _nothing_is_kept(parent)


def test_asynchronous_saves(tmp_path: Path) -> None:
    ranks.run(2, _check_all, str(tmp_path))


def _errors_surface(parent: str) -> None:
    model, optimizer, scheduler = _build(2)
    _train(model, optimizer, scheduler, 1)
    zero_shard.save(f"{parent}/e", model, optimizer, step=1)
    before = _everything(model, optimizer)
    rank = dist.get_rank()

    def fail(name: str) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device", name)

    logger = logging.getLogger("zero_shard")
    logger.disabled = True  # it says so at once, too
    expected = "No space left on device: '__1_0.distcp'" if rank == 1 else "failed on rank 1: OSError"
    with writing(fail):
        pending = zero_shard.async_save(f"{parent}/e", model, optimizer, step=2)
        with pytest.raises((OSError, RuntimeError), match=expected):
            pending.wait()
        pending.wait()  # it has said so
        zero_shard.async_save(f"{parent}/e", model, optimizer, step=3)
        with pytest.raises((OSError, RuntimeError), match=r"No space left on device: .__1_0.distcp.|failed on rank"):
            zero_shard.async_save(f"{parent}/e", model, optimizer, step=4)
    logger.disabled = False
    zero_shard.async_save(f"{parent}/f", model, optimizer, step=5).wait()
    assert zero_shard.load(f"{parent}/e", model, optimizer)["step"] == 1
    assert zero_shard.load(f"{parent}/f", model, optimizer)["step"] == 5
    assert all(map(torch.equal, _everything(model, optimizer), before))


def _moments_changed_by_hand_are_noticed(parent: str) -> None:
    """They are copied by the thread; a step and a load wait for it, and anything else is told."""
    model, optimizer, scheduler = _build(2)
    _train(model, optimizer, scheduler, 1)
    start, may_copy = background._LateCopy.make, threading.Event()

    def late(copy: Any) -> None:
        may_copy.wait(20)
        start(copy)

    logging.getLogger("zero_shard").disabled = True
    background._LateCopy.make = late  # type: ignore[method-assign]
    try:
        pending = zero_shard.async_save(f"{parent}/i", model, optimizer)
        for entry in optimizer.state.values():
            entry["exp_avg"].mul_(2.0)
        threading.Timer(0.2, may_copy.set).start()
        begun = time.monotonic()
        _train(model, optimizer, scheduler, 1)  # waits for the copies
        assert time.monotonic() - begun >= 0.15
        with pytest.raises(RuntimeError, match="exp_avg was changed before async_save had copied it"):
            pending.wait()
    finally:
        background._LateCopy.make = start  # type: ignore[method-assign]
        logging.getLogger("zero_shard").disabled = False
    zero_shard.async_save(f"{parent}/i", model, optimizer).wait()


def _memory_is_bounded(parent: str) -> None:
    model, optimizer, scheduler = _build(1)
    _train(model, optimizer, scheduler, 1)
    rooms = []
    with writing(lambda name: time.sleep(0.0005)):
        first = zero_shard.async_save(f"{parent}/g", model, optimizer)
        for _ in range(3):
            last = zero_shard.async_save(f"{parent}/g", model, optimizer)
            assert first.done(), "a call waits for the save before"
            first = last
            rooms.append({tensor.data_ptr() for tensor in background._stagings[optimizer]._used.values()})
        last.wait()
    assert rooms[0] == rooms[1] == rooms[2], "one copy, used again"
    held = sum(tensor.nbytes for tensor in background._stagings[optimizer]._used.values())
    shards = sum(3 * bucket.shard.nbytes for bucket in optimizer.held.buckets)
    plain = sum(tensor.nbytes for tensor in (*model.buffers(), model[2].bias))
    assert held <= shards + plain


def _nothing_is_kept(parent: str) -> None:
    model, optimizer, scheduler = _build(2)
    _train(model, optimizer, scheduler, 1)
    zero_shard.async_save(f"{parent}/h", model, optimizer, scheduler=scheduler).wait()
    alive = [weakref.ref(model), weakref.ref(optimizer), *map(weakref.ref, model.parameters())]
    del model, optimizer, scheduler
    gc.collect()
    assert sum(reference() is not None for reference in alive) == 0
    assert not [each for each in threading.enumerate() if each.name.startswith("zero_shard saves")]
