"""Nothing leaks: reference counting frees what is deleted, as in torch, and thirty builds in a row do not grow."""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

import zero_shard
from zero_shard import collectives
from zero_shard.stages import backward_end

LIMIT_S = 150.0  # many cases in one launch

Pair = tuple[nn.Module, Any]


def _net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 2)).to(dtype)


def _build(stage: int, dtype: torch.dtype = torch.float32, **config: Any) -> Pair:
    model = _net(dtype)
    config = {"stage": stage, "bucket_mib": 1e-3, **config}
    return model, zero_shard.AdamW(model.parameters(), lr=0.01, module=model, config=config)


def _step(model: nn.Module, optimizer: Any, step: int = 0) -> None:
    optimizer.zero_grad()
    rows = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
    model(rows).float().square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _storages(model: nn.Module, optimizer: zero_shard.AdamW) -> list[weakref.ref[Any]]:
    """Return weak references to every tensor that holds memory of the two."""
    tensors: list[Tensor | None] = [*model.parameters(), optimizer._tables.steps]
    for bucket in optimizer._reducer.buckets:
        tensors += [value for value in vars(bucket).values() if isinstance(value, Tensor)]
    for entry in optimizer.state.values():
        tensors += list(entry.values())
    return [weakref.ref(tensor) for tensor in tensors if tensor is not None]


def _alive(references: list[weakref.ref[Any]]) -> list[Any]:
    return [type(found) for reference in references if (found := reference()) is not None]


# --- deletion ---


def _delete_all(stage: int, order: str) -> None:
    model, optimizer = _build(stage, torch.bfloat16 if stage % 2 else torch.float32)
    for step in range(2):
        _step(model, optimizer, step)
    references = [weakref.ref(model), weakref.ref(optimizer), *_storages(model, optimizer)]
    references += [weakref.ref(slot) for slot in optimizer._reducer.slots]
    references += [weakref.ref(part) for part in (optimizer._reducer, optimizer._stage, optimizer._communicator)]
    if order == "model":
        del model
        del optimizer
    else:
        del optimizer
        del model
    assert not _alive(references), f"stage {stage}, {order} first, without gc.collect(): {_alive(references)}"


def _delete_in_mid_backward(stage: int) -> None:
    """Gradients that nobody has read, a scheduler, a closure over all of it, and an exception."""
    model, optimizer = _build(stage)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _step(model, optimizer)
    with optimizer.no_sync():
        model(torch.ones(1, 16)).sum().backward()
    model(torch.ones(1, 16)).sum().backward()
    with pytest.raises(ArithmeticError):
        model(_Fail.apply(torch.ones(1, 16, requires_grad=True))).sum().backward()
    references = [weakref.ref(model), weakref.ref(optimizer), *_storages(model, optimizer)]
    del model, optimizer, scheduler
    gc.collect()
    assert not _alive(references), f"stage {stage}: {_alive(references)}"


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


def _raise(*_: Any) -> None:
    raise ArithmeticError("on purpose")


def _hooks_of(model: nn.Module) -> int:
    count = 0
    for module in model.modules():
        count += sum(len(value) for name, value in vars(module).items() if name.endswith("hooks") and value)
    for param in model.parameters():
        count += len(param._backward_hooks or ()) + len(getattr(param, "_post_accumulate_grad_hooks", None) or ())
    return count


def _hooks_are_removed(stage: int) -> None:
    registries = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    registries += [value for name, value in vars(nn.modules.module).items() if name.startswith("_global_")]
    before = [len(registry) for registry in registries if hasattr(registry, "__len__")]
    model, optimizer = _build(stage)
    _step(model, optimizer)
    assert [len(registry) for registry in registries if hasattr(registry, "__len__")] == before
    del optimizer
    assert _hooks_of(model) == 0
    assert not [param for param in model.parameters() if isinstance(param.grad, zero_shard.ShardedGrad)]
    assert len(backward_end._participants) == 0


def _delete_average(stage: int) -> None:
    model, optimizer = _build(stage)
    _step(model, optimizer)
    average = zero_shard.ExponentialMovingAverage(optimizer)
    average.update()
    with average.applied():
        pass
    held = [weakref.ref(tensor) for tensor in average._averages.values()]
    references = [weakref.ref(average), *held, weakref.ref(optimizer), *_storages(model, optimizer)]
    del average
    assert not _alive(references[: 1 + len(held)])
    del optimizer, model
    assert not _alive(references)


def _deletions() -> None:
    model = _net()
    _step(model, torch.optim.AdamW(model.parameters()))  # what torch imports late keeps frames until it is collected
    del model
    gc.collect()
    gc.disable()  # so that reference counting has to do it
    try:
        for stage in range(4):
            for order in ("model", "optimizer"):
                _delete_all(stage, order)
            _delete_average(stage)
            _delete_in_mid_backward(stage)
            if stage < 3:
                _hooks_are_removed(stage)
    finally:
        gc.enable()


@pytest.mark.parametrize("world_size", [1, 2])
def test_deleting_model_and_optimizer_frees_everything(world_size: int) -> None:
    ranks.run(world_size, _deletions, limit_s=LIMIT_S)


# --- repetition ---


def _census() -> dict[str, int]:
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == collectives.DRAIN:  # holds what an exception left on the wire
            thread.join(10)
    objects = gc.get_objects()
    return {
        "tensors": sum(issubclass(type(each), Tensor) for each in objects),
        "objects of ours": sum(str(type(each).__module__).startswith("zero_shard") for each in objects),
        "threads": threading.active_count(),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "files": len(os.listdir("/proc/self/fd")),
    }


def _settled(before: dict[str, int]) -> dict[str, int]:
    """Return the census once it is no more than before, or after 10 s: gloo's threads hold tensors for a moment."""
    for _ in range(20):
        after = _census()
        if all(after[kind] <= count for kind, count in before.items()):
            break
        time.sleep(0.5)
    return after


def _assert_no_more(after: dict[str, int], before: dict[str, int], where: str) -> None:
    assert all(after[kind] <= count for kind, count in before.items()), f"{where}: {before}, then {after}"


def _rss_mib() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _train(stage: int) -> None:
    model, optimizer = _build(stage)
    _step(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.full_state_dict()


def _train_16_bit(stage: int) -> None:
    model, optimizer = _build(stage, torch.bfloat16, shard_size=1, state_dtype="int8")
    _step(model, optimizer)
    torch.save(optimizer.state_dict(), io.BytesIO())


def _fail_to_build(stage: int) -> None:
    with pytest.raises(ValueError, match="bukcet_mib"):
        _build(stage, bukcet_mib=3)
    model = _net()
    if dist.get_rank() == 0:
        model[0] = nn.Linear(16, 16, bias=False)
    with pytest.raises(ValueError, match="ranks differ"):
        zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage})
    with pytest.raises(ValueError, match="Invalid learning rate"):
        zero_shard.AdamW(model.parameters(), lr=-1.0, module=model, config={"stage": stage})


def _fail_in_training(stage: int) -> None:
    model, optimizer = _build(stage)
    _step(model, optimizer)
    for module in (model[0], model[2]):
        handle = module.register_forward_pre_hook(_raise)
        with pytest.raises(ArithmeticError):
            model(torch.ones(1, 16))
        handle.remove()
    with pytest.raises(ArithmeticError):
        model(_Fail.apply(torch.ones(1, 16, requires_grad=True))).sum().backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)


def _copy_and_average(stage: int) -> None:
    model, optimizer = _build(stage)
    average = zero_shard.ExponentialMovingAverage(optimizer)
    _step(model, optimizer)
    average.update()
    with average.applied():
        pass
    if stage < 3:
        _step(*copy.deepcopy((model, optimizer)))


CYCLES = (_train, _train_16_bit, _fail_to_build, _fail_in_training, _copy_and_average)


def _repeat(cycle: Callable[[int], None], num_rounds: int) -> tuple[dict[str, int], dict[str, int]]:
    for stage in range(4):
        cycle(stage)
    before = _census()
    for number in range(num_rounds):
        cycle(number % 4)
    return before, _settled(before)


def _repeat_all() -> list[Any]:
    return [_repeat(cycle, 4) for cycle in CYCLES]


def test_repeated_runs_leave_nothing_behind() -> None:
    for results in ranks.run(2, _repeat_all, limit_s=LIMIT_S):
        for cycle, (before, after) in zip(CYCLES, results, strict=True):
            _assert_no_more(after, before, cycle.__name__)


def _build_and_step(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))  # 4 MiB
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage, "bucket_mib": 1})
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()


def _thirty_builds() -> tuple[float, float, dict[str, int], dict[str, int]]:
    for number in range(8):
        _build_and_step(number % 4)
    before, start = _census(), _rss_mib()
    for number in range(30):
        _build_and_step(number % 4)
    return start, _rss_mib(), before, _settled(before)


def test_thirty_builds_in_a_row_do_not_grow() -> None:
    """At every stage there are seven builds; one copy of the parameters that each leaves behind would be 28 MiB."""
    for start, end, before, after in ranks.run(2, _thirty_builds, fresh=True, limit_s=LIMIT_S):
        _assert_no_more(after, before, "thirty builds")
        assert end - start < 20, f"{start:.0f} MiB, then {end:.0f} MiB"
