"""The optimizer as an object: state dicts without communication, two of them on one parameter, flags of torch."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import EXACT, Tolerance, assert_snapshots_close, mean_over_ranks, plain_snapshot, sharded_snapshot
from torch import Tensor, nn

import zero_shard
from zero_shard import collectives

LIMIT_S = 150.0  # many cases in one launch

D = torch.float64
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "amsgrad": {"amsgrad": True, "maximize": True},
    "tensor lr": {"lr": torch.tensor(0.02, dtype=D)},
    "capturable": {"capturable": True},  # torch refuses it on the CPU; here there is nothing to capture
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def _net() -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model[2].weight = nn.Parameter(torch.randn(7, 3).t())  # not row-major
    return model.to(D)


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    rows = torch.randn(4, 5, dtype=D, generator=torch.Generator().manual_seed(31 * rank + step))
    return model(rows).square().mean()


def _build(model: nn.Module, stage: int, **hyper: Any) -> zero_shard.AdamW:
    config = {"stage": stage, "bucket_mib": 1e-4}
    return zero_shard.AdamW(list(model.named_parameters()), module=model, config=config, **{"lr": 0.02, **hyper})


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    _loss(model, dist.get_rank(), step).backward()
    optimizer.step()


def _plain(world_size: int, steps: int, **hyper: Any) -> tuple[nn.Module, torch.optim.AdamW]:
    hyper = {key: value for key, value in hyper.items() if key not in ("capturable", "fused", "foreach")}
    model = _net()
    optimizer = torch.optim.AdamW(list(model.named_parameters()), **{"lr": 0.02, **hyper})
    for step in range(steps):
        losses = [[lambda r=r, s=step: _loss(model, r, s)] for r in range(world_size)]
        mean_over_ranks(model.parameters(), losses)
        optimizer.step()
    return model, optimizer


def _silently(call: Callable[[], Any]) -> Any:
    def refuse(label: str) -> None:
        raise AssertionError(f"communicates: {label}")

    collectives.pending.before_collective = refuse
    try:
        return call()
    finally:
        collectives.pending.before_collective = None


def _state_dicts(stage: int, name: str) -> None:
    world, hyper = dist.get_world_size(), FORMS[name]
    model = _net()
    optimizer = _build(model, stage, **hyper)
    for step in range(2):
        _step(model, optimizer, step)
    file = io.BytesIO()
    torch.save(_silently(optimizer.state_dict), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    full = optimizer.full_state_dict()
    _, plain = _plain(world, 2, **hyper)
    expected = plain.state_dict()
    if dist.get_rank() == 0:
        flags = {key: hyper[key] for key in ("capturable", "fused", "foreach") if key in hyper}
        assert full["param_groups"] == [{**group, **flags} for group in expected["param_groups"]]
        assert full.keys() == expected.keys() and list(full["state"]) == list(expected["state"])
        for number, entry in expected["state"].items():
            assert list(full["state"][number]) == list(entry)
            for key, value in entry.items():
                got = full["state"][number][key]
                assert got.dtype == value.dtype and got.stride() == value.stride(), f"{name}, {key}"
                torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-12)

    # What plain AdamW has written loads without communication, and training goes on as it would have.
    other = _net()
    other.load_state_dict(_plain(world, 2, **hyper)[0].state_dict())
    loading = _build(other, stage, **hyper)
    _silently(lambda: loading.load_state_dict(expected))
    _step(other, loading, 2)
    _silently(lambda: optimizer.load_state_dict(saved))
    _step(model, optimizer, 2)
    for each, its in ((model, optimizer), (other, loading)):
        snapshot = sharded_snapshot(each, its)
        if dist.get_rank() == 0:
            assert_snapshots_close(snapshot, plain_snapshot(*_plain(world, 3, **hyper)), Tolerance(1e-9, 1e-9), name)


def _assert_refused(model: nn.Module, first: zero_shard.AdamW) -> None:
    refused: list[Callable[[], Any]] = [first.step, lambda: first.clip_grad_norm_(1.0)]
    refused += [lambda: zero_shard.save("nowhere", model, first), lambda: zero_shard.load("nowhere", model, first)]
    refused += [zero_shard.ExponentialMovingAverage(first).update, lambda: first.__deepcopy__({})]
    for call in refused:
        with pytest.raises(RuntimeError, match=r"built later has taken over parameter 0\.bias"):
            call()


def _second_optimizer(stage: int) -> None:
    model = _net()
    first = _build(model, stage)
    _step(model, first, 0)
    before = first.full_state_dict()
    second = zero_shard.AdamW(model[0].parameters(), lr=0.05, module=model[0], config={"stage": (stage + 1) % 3})
    _step(model, second, 1)
    _assert_refused(model, first)
    state = first.full_state_dict()
    if dist.get_rank() == 0:
        assert all(torch.equal(state["state"][n]["exp_avg"], before["state"][n]["exp_avg"]) for n in before["state"])
    weights = [param.detach().clone() for param in model.parameters()]
    first.load_state_dict(first.state_dict())  # must not move the parameters back
    assert all(torch.equal(left, right) for left, right in zip(model.parameters(), weights, strict=True))
    second.zero_grad()
    _loss(model, dist.get_rank(), 2).backward()
    grads = [param.grad for param in model[0].parameters()]
    del first, state
    gc.collect()
    assert all(param.grad is grad for param, grad in zip(model[0].parameters(), grads, strict=True))
    second.step()
    assert [entry["step"].item() for entry in second.state.values()] == [2, 2]


def _second_at_stage_3() -> None:
    model = _net()
    first = _build(model, 3)
    _step(model, first, 0)
    for stage in (1, 3):
        with pytest.raises(ValueError, match=r"parameter 0\.weight is sharded by another .*zero_shard\.save"):
            _build(model, stage)
    before = sharded_snapshot(model, first)
    after = sharded_snapshot(model, first)
    if dist.get_rank() == 0:
        assert_snapshots_close(after, before, EXACT, "after a refusal")
    _step(model, first, 1)
    del first
    gc.collect()
    with pytest.raises(ValueError, match=r"0\.weight was sharded by .* deleted.*load a checkpoint"):
        _build(model, 2)
    with pytest.raises(RuntimeError, match=r"0\.weight .* deleted.*load a checkpoint"):
        zero_shard.full_state_dict(model)


def _all() -> None:
    for number, name in enumerate(FORMS):
        for stage in range(4) if number < 2 else [number % 4]:
            _state_dicts(stage, name)
    for stage in range(3):
        _second_optimizer(stage)
    if dist.get_world_size() > 1:
        _second_at_stage_3()


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_dicts_and_second_optimizers(world_size: int) -> None:
    ranks.run(world_size, _all, limit_s=LIMIT_S)
