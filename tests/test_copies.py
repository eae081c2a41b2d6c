"""copy.deepcopy of model and optimizer, copy.copy and pickle."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import EXACT, Snapshot, assert_snapshots_close, sharded_snapshot
from torch import Tensor, nn

import zero_shard
from zero_shard import collectives

LIMIT_S = 150.0  # many cases in one launch

D = torch.float64
STAGES = (0, 1, 2)


def _net() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1), nn.BatchNorm1d(1))
    model[4].weight.requires_grad_(False)
    return model.to(D)


def _build(model: nn.Module, stage: int, **config: Any) -> zero_shard.AdamW:
    config = {"stage": stage, "bucket_mib": 1e-4, **config}
    return zero_shard.AdamW(model.parameters(), lr=0.05, amsgrad=True, module=model, config=config)


def _loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(31 * dist.get_rank() + step)
    rows = torch.randn(4, 5, dtype=D, generator=generator)
    return model(rows if model[0].bias.dtype == D else rows.float()).square().mean()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()


def _silent_deepcopy(value: Any) -> Any:
    """Copy while every communication raises."""

    def refuse(label: str) -> None:
        raise AssertionError(f"deepcopy communicates: {label}")

    collectives.pending.before_collective = refuse
    try:
        return copy.deepcopy(value)
    finally:
        collectives.pending.before_collective = None


def _assert_equal(got: Snapshot, want: Snapshot, where: str) -> None:
    if dist.get_rank() == 0:
        assert_snapshots_close(got, want, EXACT, where)


def _reference(stage: int, steps: range, **config: Any) -> Snapshot:
    model = _net()
    optimizer = _build(model, stage, **config)
    _train(model, optimizer, steps)
    return sharded_snapshot(model, optimizer)


def _train_both(stage: int) -> None:
    model = _net()
    optimizer = _build(model, stage)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    _train(model, optimizer, range(3))
    before = sharded_snapshot(model, optimizer)
    versions = [param._version for param in model.parameters()]
    twin, twin_optimizer, twin_scheduler = _silent_deepcopy((model, optimizer, scheduler))
    assert versions == [param._version for param in model.parameters()]

    assert twin_scheduler.optimizer is twin_optimizer
    assert twin_optimizer.defaults == optimizer.defaults and repr(twin_optimizer) == repr(optimizer)
    params = twin_optimizer.param_groups[0]["params"]
    assert all(left is right for left, right in zip(params, twin.parameters(), strict=True))
    ours = {param.untyped_storage()._cdata for param in model.parameters()}
    assert not ours & {param.untyped_storage()._cdata for param in params}
    assert all(param.grad is None for param in params)
    for bucket in twin_optimizer._reducer.buckets:
        for param, view in zip(bucket.params, bucket.views, strict=True):
            assert param.data_ptr() == view.data_ptr() and view.untyped_storage().data_ptr() == bucket.full.data_ptr()
    entries = optimizer.state_dict()["state"], twin_optimizer.state_dict()["state"]
    for number, entry in entries[0].items():
        for key, value in entry.items():
            copied = entries[1][number][key]
            assert torch.equal(copied, value) and (not value.numel() or copied.data_ptr() != value.data_ptr()), key
    _assert_equal(sharded_snapshot(twin, twin_optimizer), before, "the copy")

    _train(twin, twin_optimizer, range(3, 5))
    _assert_equal(sharded_snapshot(model, optimizer), before, "the original, after its copy has trained")
    _train(model, optimizer, range(3, 5))
    _assert_equal(sharded_snapshot(twin, twin_optimizer), sharded_snapshot(model, optimizer), "both")
    _assert_equal(sharded_snapshot(twin, twin_optimizer), _reference(stage, range(5)), "a run without a copy")
    _one_backward_for_both(model, optimizer, twin, twin_optimizer)
    _assert_equal(sharded_snapshot(model, optimizer), _reference(stage, range(6)), "trained together with the copy")
    _later_parameters(twin, twin_optimizer, stage)


def _one_backward_for_both(model: nn.Module, optimizer: Any, twin: nn.Module, twin_optimizer: Any) -> None:
    """Ranks meet the two in different orders; their messages must not be mixed up."""
    for each in (optimizer, twin_optimizer):
        each.zero_grad()
    losses = [_loss(model, 5), 2 * _loss(twin, 5)]
    losses = losses if dist.get_rank() % 2 else losses[::-1]
    (losses[0] + losses[1]).backward()
    for each in (optimizer, twin_optimizer):
        each.step()


def _later_parameters(twin: nn.Module, optimizer: Any, stage: int) -> None:
    """The copy takes charge of what is unfrozen or added later, under its name."""
    twin[4].weight.requires_grad_(True)
    extra = nn.Parameter(torch.ones(3, dtype=D))
    optimizer.add_param_group({"params": [extra]})
    optimizer.zero_grad()
    (_loss(twin, 7) + extra.sum()).backward()
    optimizer.step()
    assert optimizer.state[twin[4].weight]["step"] == 1 and optimizer.state[extra]["step"] == 1
    assert "4.weight" in [slot.name for slot in optimizer._reducer.slots]


def _of_the_optimizer_alone(stage: int) -> None:
    model = _net()
    optimizer = _build(model, stage)
    _train(model, optimizer, range(2))
    before = sharded_snapshot(model, optimizer)
    twin_optimizer = _silent_deepcopy(optimizer)
    for mine, theirs in zip(model.parameters(), twin_optimizer.param_groups[0]["params"], strict=True):
        assert mine is not theirs and torch.equal(mine, theirs)
        theirs.grad = torch.ones_like(theirs)
    twin_optimizer.step()
    assert all(entry["step"] == 3 for param, entry in twin_optimizer.state.items() if param.shape != (1, 3))
    _assert_equal(sharded_snapshot(model, optimizer), before, "the original")
    both = copy.deepcopy({"optimizer": optimizer, "model": model})  # the other order
    assert both["optimizer"].param_groups[0]["params"][0] is both["model"][0].weight
    _train(both["model"], both["optimizer"], range(2, 4))
    _assert_equal(sharded_snapshot(both["model"], both["optimizer"]), _reference(stage, range(4)), "the other order")


def _deleted(stage: int, first: str) -> None:
    model = _net()
    optimizer = _build(model, stage)
    _train(model, optimizer, range(2))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    _train(twin, twin_optimizer, range(2, 3))
    pairs = {"original": (model, optimizer), "copy": (twin, twin_optimizer)}
    doomed_model, doomed = pairs.pop(first)
    references = [
        weakref.ref(each) for each in (doomed_model, doomed, *doomed_model.parameters(), *doomed._reducer.buckets)
    ]
    del model, optimizer, twin, twin_optimizer, doomed_model, doomed
    gc.collect()
    assert not [reference() for reference in references if reference() is not None]
    ((survivor_model, survivor),) = pairs.values()
    start = 3 if first == "original" else 2
    _train(survivor_model, survivor, range(start, 4))
    _assert_equal(sharded_snapshot(survivor_model, survivor), _reference(stage, range(4)), "the survivor")


def _copied_on_one_rank(stage: int) -> None:
    """Copies that only one rank makes and nobody trains do not shift the messages of later optimizers."""
    model = _net()
    optimizer = _build(model, stage)
    kept = [copy.deepcopy((model, optimizer)) for _ in range(3 * dist.get_rank())]
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    _train(twin, twin_optimizer, range(2))
    other = _net()
    other_optimizer = _build(other, stage)
    _train(other, other_optimizer, range(2))
    numbers = [each._communicator.number for each in (optimizer, twin_optimizer, other_optimizer)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, numbers)
    assert gathered[0] == gathered[-1] and len(set(numbers)) == 3, gathered
    _assert_equal(sharded_snapshot(twin, twin_optimizer), sharded_snapshot(other, other_optimizer), "one rank copied")
    del kept


def _every_kind_of_state(stage: int) -> None:
    """16-bit weights with masters and 8-bit moments are copied bit for bit."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(70, 80), nn.Linear(80, 2)).bfloat16()
    config = {"stage": stage, "state_dtype": "int8"}
    optimizer = zero_shard.AdamW(model.parameters(), lr=1e-3, module=model, config=config)

    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        rows = torch.randn(4, 70, generator=torch.Generator().manual_seed(number)).bfloat16()
        model(rows).float().square().sum().backward()
        optimizer.step()

    step(model, optimizer, 0)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    for number in (1, 2):
        step(model, optimizer, number)
        step(twin, twin_optimizer, number)
    _assert_equal(sharded_snapshot(twin, twin_optimizer), sharded_snapshot(model, optimizer), "bf16")
    for mine, theirs in zip(optimizer._reducer.buckets, twin_optimizer._reducer.buckets, strict=True):
        assert torch.equal(mine.low, theirs.low) and torch.equal(mine.exp_avg, theirs.exp_avg)


def _split_parameters(stage: int) -> None:
    """Float32 parameters stored as 16 bits and a rest: neither a copy nor averages that come and go lose the rest."""
    for dtype in ("bfloat16", "float16"):
        pairs = []
        for _ in range(2):
            model = _net().float()
            pairs.append((model, _build(model, stage, param_dtype=dtype)))
        (model, optimizer), (other, other_optimizer) = pairs
        average = zero_shard.ExponentialMovingAverage(optimizer, 0.5)
        for step in range(3):
            _train(model, optimizer, range(step, step + 1))
            _train(other, other_optimizer, range(step, step + 1))
            average.update()
        with average.applied():
            zero_shard.full_state_dict(model)
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
        _train(other, other_optimizer, range(3, 4))
        want = sharded_snapshot(other, other_optimizer)
        for each, its in ((model, optimizer), (twin, twin_optimizer)):
            _train(each, its, range(3, 4))
            _assert_equal(sharded_snapshot(each, its), want, f"{dtype}, stage {stage}")


def _refusals(stage: int) -> None:
    model = _net()
    optimizer = _build(model, stage)
    with pytest.raises(NotImplementedError, match=r"pickling zero_shard.AdamW .* full_state_dict"):
        pickle.dumps(optimizer)
    with pytest.raises(NotImplementedError, match=r"share buffers.*copy.deepcopy\(\(model, optimizer\)\)"):
        copy.copy(optimizer)
    if stage == 3 and dist.get_world_size() > 1:
        with pytest.raises(NotImplementedError, match=r"stage 3.*ExponentialMovingAverage.*zero_shard.save"):
            copy.deepcopy(optimizer)


def _all(*tests: Any) -> None:
    for test in tests:
        for stage in STAGES if dist.get_world_size() > 1 else (2,):
            test(stage)
    for stage in (0, 3):
        _refusals(stage)


def _deleted_original(stage: int) -> None:
    _deleted(stage, "original")


def _deleted_copy(stage: int) -> None:
    _deleted(stage, "copy")


@pytest.mark.parametrize("world_size", [1, 2])
def test_deepcopy_gives_a_pair_that_trains_on_by_itself(world_size: int) -> None:
    ranks.run(world_size, _all, _train_both, _of_the_optimizer_alone, limit_s=LIMIT_S)


def test_copies_and_originals_are_freed_one_by_one() -> None:
    ranks.run(2, _all, _deleted_original, _deleted_copy, limit_s=LIMIT_S)


def test_copies_of_one_rank_and_of_every_kind_of_state() -> None:
    ranks.run(2, _all, _copied_on_one_rank, _every_kind_of_state, _split_parameters, limit_s=LIMIT_S)
