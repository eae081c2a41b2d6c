"""Faults that state has had: what stays behind, what is half loaded, what is counted though it did not happen."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from oracle import EXACT, assert_snapshots_close, sharded_snapshot
from stacks import HYPER, build, make_model, train

import zero_shard


def _load_over_nan(path: str) -> None:
    model, optimizer = build(torch.float32, {"state_dtype": "int8"})
    zero_shard.save(path, model, optimizer)  # no state yet
    model(torch.full((2, 37), torch.nan)).sum().backward()
    optimizer.step()
    zero_shard.load(path, model, optimizer)
    train(model, optimizer, torch.float32, range(1))
    with zero_shard.gathered(model):
        assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_scales_of_8_bit_moments_are_cleared_with_their_codes(world_size: int, tmp_path: Path) -> None:
    ranks.run(world_size, _load_over_nan, str(tmp_path / "saved"))


def _save_with_amsgrad(path: str) -> dict[str, Any]:
    model = make_model(torch.float32)
    optimizer = zero_shard.AdamW(model.parameters(), **HYPER, amsgrad=True)
    train(model, optimizer, torch.float32, range(2))
    zero_shard.save(path, model, optimizer)
    return optimizer.full_state_dict()


def _load_amsgrad_into_codes(path: str, full: dict[str, Any]) -> None:
    model, optimizer = build(torch.float32, {"state_dtype": "int8"})
    train(model, optimizer, torch.float32, range(1))
    before = sharded_snapshot(model, optimizer)
    for load in (lambda: optimizer.load_state_dict(full), lambda: zero_shard.load(path, model, optimizer)):
        with pytest.raises(Exception, match=r"amsgrad .*int8"):
            load()
        assert_snapshots_close(sharded_snapshot(model, optimizer), before, EXACT, "after a refusal")
        assert optimizer.param_groups[0]["amsgrad"] is False


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_with_amsgrad_is_refused_before_8_bit_moments_change(world_size: int, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    full = ranks.run(1, _save_with_amsgrad, path)[0]
    ranks.run(world_size, _load_amsgrad_into_codes, path, full)


def test_codes_that_lost_their_scales_are_refused() -> None:
    model, optimizer = build(torch.float32, {"state_dtype": "int8"})
    train(model, optimizer, torch.float32, range(1))
    before, saved = sharded_snapshot(model, optimizer), optimizer.state_dict()
    without_layout = {key: value for key, value in saved.items() if key != "zero_shard"}
    without_scale = {
        **saved,
        "state": {n: {k: v for k, v in e.items() if k != "exp_avg_scale"} for n, e in saved["state"].items()},
    }
    for broken in (without_layout, without_scale):
        with pytest.raises(ValueError, match=r"exp_avg.* of parameter 0 \(0\.weight\) has 8-bit codes"):
            optimizer.load_state_dict(broken)
        assert_snapshots_close(sharded_snapshot(model, optimizer), before, EXACT, "after a refusal")


def _clear_then(how: str, config: dict[str, Any]) -> None:
    model = make_model(torch.float32)
    model[4].bias.requires_grad_(False)
    trained = [param for param in model.parameters() if param is not model[0].bias]
    optimizer = zero_shard.AdamW(trained, **HYPER, module=model, config=config)
    train(model, optimizer, torch.float32, range(3))
    optimizer.state.clear()
    if how == "unfreeze":
        model[4].bias.requires_grad_(True)
    else:
        optimizer.add_param_group({"params": [model[0].bias]})
    train(model, optimizer, torch.float32, range(1))
    assert {float(entry["step"]) for entry in optimizer.state.values()} == {1.0}


@pytest.mark.parametrize("how", ["unfreeze", "add a group"])
@pytest.mark.parametrize("config", [{"stage": 1}, {"stage": 2, "state_dtype": "int8"}], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_cleared_state_stays_cleared_when_parameters_come(world_size: int, how: str, config: dict[str, Any]) -> None:
    ranks.run(world_size, _clear_then, how, config)


def test_a_deleted_optimizer_frees_its_state_at_once() -> None:
    model, optimizer = build(torch.float32, {})
    train(model, optimizer, torch.float32, range(1))
    reducer = weakref.ref(optimizer._reducer)
    gc.disable()
    try:
        del optimizer
        assert reducer() is None, "something holds it in a circle"
    finally:
        gc.enable()


def test_a_step_that_is_refused_has_not_counted() -> None:
    model, optimizer = build(torch.float32, {})
    train(model, optimizer, torch.float32, range(1))
    model[4].weight.grad = model[4].weight.grad.to_sparse()
    with pytest.raises(RuntimeError, match=r"4\.weight.*sparse"):
        optimizer.step()
    assert {float(entry["step"]) for entry in optimizer.state.values()} == {1.0}
