"""State dicts: there and back bit for bit, from and to plain AdamW, and refused where they do not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import (
    EXACT,
    assert_snapshots_close,
    plain_snapshot,
    sharded_snapshot,
)
from small_net import F64, build, net, per_step, plain_step, train_step
from torch import Tensor, nn

import zero_shard

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def _round_trip(stage: int, dtype: torch.dtype, config: dict[str, Any], hyper: dict[str, Any]) -> None:
    """Train, save, train on; load into a second optimizer, train on: equal bits."""
    model = net(dtype)
    optimizer = build(model, stage, config, **hyper)
    for step in range(3):
        train_step(model, optimizer, step)
    labels: list[str] = []
    zero_shard.collectives.pending.before_collective = labels.append
    saved = copy.deepcopy(optimizer.state_dict())
    zero_shard.collectives.pending.before_collective = None
    assert not labels, "state_dict() never communicates"
    weights = _weights(model)
    for step in range(3, 6):
        train_step(model, optimizer, step)
    expected = sharded_snapshot(model, optimizer)
    other = net(dtype)
    loaded = build(other, stage, config, **{**hyper, "lr": 0.5})
    with zero_shard.gathered(other, modify=True), torch.no_grad():
        for param, weight in zip(other.parameters(), weights, strict=True):
            param.copy_(weight)
    before = copy.deepcopy(saved)
    loaded.load_state_dict(saved)
    _assert_same_state(saved, before)  # not changed, and not shared
    assert loaded.param_groups[0]["lr"] == 0.01
    for step in range(3, 6):
        train_step(other, loaded, step)
    _assert_same_state(saved, before)
    snapshot = sharded_snapshot(other, loaded)
    if dist.get_rank() == 0:
        assert_snapshots_close(snapshot, expected, EXACT, f"stage {stage}, {dtype}, {config}")
    for key in ("state", "param_groups"):
        assert key in saved
    for entry in saved["state"].values():
        assert {"step", "exp_avg", "exp_avg_sq"} <= set(entry)


def _weights(model: nn.Module) -> list[Tensor]:
    with zero_shard.gathered(model):
        return [param.detach().clone() for param in model.parameters()]


def _assert_same_state(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["param_groups"] == want["param_groups"]
    for number, entry in want["state"].items():
        for key, value in entry.items():
            assert torch.equal(got["state"][number][key], value), f"{key} of parameter {number}"


def _round_trips(stage: int) -> None:
    for dtype, config, hyper in (
        (F64, {}, {}),
        (torch.float32, {}, {"amsgrad": True}),
        (torch.bfloat16, {}, {}),
        (torch.float16, {}, {}),
        (torch.float32, {"state_dtype": "bfloat16"}, {}),
        (torch.bfloat16, {"master": "none"}, {}),
        (torch.bfloat16, {"shard_size": 1}, {"amsgrad": True}),
    ):
        _round_trip(stage, dtype, config, hyper)


@every_stage
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_state_dict_round_trip_is_bitwise(world_size: int, stage: int) -> None:
    ranks.run(world_size, _round_trips, stage)


def _plain_there_and_back(stage: int) -> None:
    """Plain AdamW trains, its dict goes into the sharded one, which trains on, and back into plain AdamW."""
    world_size = dist.get_world_size()
    plain_model = net()
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.01, amsgrad=True)
    for step in range(2):
        plain_step(plain_model, plain, step, world_size)
    model = net()
    model.load_state_dict(plain_model.state_dict())
    optimizer = build(model, stage, amsgrad=True)
    optimizer.load_state_dict(plain.state_dict())
    for step in range(2, 4):
        train_step(model, optimizer, step)
        plain_step(plain_model, plain, step, world_size)
    snapshot, full = sharded_snapshot(model, optimizer), optimizer.full_state_dict()
    full_weights = zero_shard.full_state_dict(model)
    if dist.get_rank() > 0:
        assert full == {} and full_weights == {}
        return
    assert_snapshots_close(snapshot, plain_snapshot(plain_model, plain), per_step(4), f"stage {stage}")
    assert set(full) == set(plain.state_dict())
    assert full["param_groups"] == plain.state_dict()["param_groups"]
    back_model = net()
    back_model.load_state_dict(full_weights)
    back = torch.optim.AdamW(back_model.parameters(), lr=3.0, amsgrad=True)
    back.load_state_dict(full)
    plain_step(back_model, back, 9, world_size)
    plain_step(plain_model, plain, 9, world_size)
    assert_snapshots_close(
        plain_snapshot(back_model, back),
        plain_snapshot(plain_model, plain),
        per_step(5),
        f"stage {stage}, back in plain",
    )


@every_stage
@pytest.mark.parametrize("world_size", [1, 3])
def test_plain_adamw_state_goes_in_and_comes_back(world_size: int, stage: int) -> None:
    ranks.run(world_size, _plain_there_and_back, stage)


def _refused(stage: int) -> dict[str, str]:
    """Return the text of the refusal of each unfit dict, after checking that nothing has changed."""
    model = net()
    optimizer = build(model, stage)
    for step in range(2):
        train_step(model, optimizer, step)
    good = copy.deepcopy(optimizer.state_dict())
    plain_model = net()
    plain = torch.optim.AdamW(plain_model.parameters(), lr=7.0)
    plain_step(plain_model, plain, 0, 1)
    full = plain.state_dict()

    def spoiled(source: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        copied = copy.deepcopy(source)
        copied["param_groups"][0]["lr"] = 7.0
        change(copied)
        return copied

    attempts = {
        "no state": {"param_groups": full["param_groups"]},
        "no groups": {"state": full["state"]},
        "group size": spoiled(full, lambda d: d["param_groups"][0]["params"].pop()),
        "shape": spoiled(full, lambda d: d["state"][2].update(exp_avg=torch.ones(2, 2))),
        "moment missing": spoiled(full, lambda d: d["state"][5].pop("exp_avg_sq")),
        "other layout": spoiled(good, lambda d: d["zero_shard"]["parts"].update({5: (1, 999, 1000)})),
    }
    texts = {}
    for name, attempt in attempts.items():
        texts[name] = ""
        try:
            optimizer.load_state_dict(attempt)
        except ValueError as error:
            texts[name] = str(error)
        _assert_same_state(optimizer.state_dict(), good)
    return texts


@every_stage
@pytest.mark.parametrize("world_size", [1, 2])
def test_unfit_state_dicts_are_refused_and_change_nothing(world_size: int, stage: int) -> None:
    words = {
        "no state": ["'state'"],
        "no groups": ["'param_groups'"],
        "group size": ["5", "6"],
        "shape": ["2.weight", "(2, 2)", "(3, 7)"],
        "moment missing": ["4.bias", "exp_avg_sq"],
        "other layout": ["4.bias", "full_state_dict"],
    }
    for texts in ranks.run(world_size, _refused, stage):
        for name, text in texts.items():
            assert text and all(word in text for word in words[name]), f"{name}: {text!r}"


def _of_another_layout() -> list[str]:
    """Load what other stages and sharding sizes have written; return the refusals."""
    texts = []
    source_model = net()
    source = build(source_model, 2, {"bucket_mib": 25, "shard_size": 1})
    train_step(source_model, source, 0)
    for stage in (1, 2, 3):
        model = net()
        optimizer = build(model, stage)
        try:
            optimizer.load_state_dict(source.state_dict())
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
        train_step(model, optimizer, 0)
    return texts


def test_state_of_another_layout_is_refused_with_the_way_out() -> None:
    for texts in ranks.run(2, _of_another_layout):
        for text in texts:
            assert "another stage, world size or config" in text and "full_state_dict" in text, text
