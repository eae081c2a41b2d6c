"""8-bit moments and stochastic rounding: one result at every stage and world size, a quarter of the memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import EXACT, Snapshot, assert_ranks_agree, assert_snapshots_close, sharded_snapshot
from stacks import HYPER, build, make_model, train
from torch import nn

import zero_shard

# What the storage of state is; all of them must train alike at every stage and world size.
SCHEMES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32, 8-bit moments": (torch.float32, {"state_dtype": "int8"}),
    "bf16, 8-bit moments": (torch.bfloat16, {"state_dtype": "int8"}),
    "bf16, stochastic": (torch.bfloat16, {"master": "stochastic"}),
    "bf16, stochastic, 8-bit moments": (torch.bfloat16, {"master": "stochastic", "state_dtype": "int8"}),
    "bf16, stochastic, bf16 moments": (torch.bfloat16, {"master": "stochastic", "state_dtype": "bfloat16"}),
}


def run_stages(dtype: torch.dtype, config: dict[str, Any]) -> list[Snapshot]:
    found = []
    for way in ({"stage": 0}, {"stage": 1}, {"stage": 2, "bucket_mib": 0.02}, {"stage": 3}):
        model, optimizer = build(dtype, {**config, **way})
        train(model, optimizer, dtype, range(4))
        assert_ranks_agree(model, str(way))
        found.append(sharded_snapshot(model, optimizer))
    return found


@pytest.mark.parametrize("name", SCHEMES)
def test_result_does_not_depend_on_stage_bucket_or_world_size(name: str) -> None:
    dtype, config = SCHEMES[name]
    alone, *rest = [snapshot for size in (1, 2, 4) for snapshot in ranks.run(size, run_stages, dtype, config)[0]]
    assert alone["0.weight"]["exp_avg"].float().abs().sum() > 0
    for snapshot in rest:
        assert_snapshots_close(snapshot, alone, EXACT, name)


def test_hybrid_sharding_gives_the_same_with_8_bit_moments() -> None:
    dtype, config = SCHEMES["fp32, 8-bit moments"]
    want = ranks.run(4, run_stages, dtype, config)[0][0]
    for snapshot in ranks.run(4, run_stages, dtype, {**config, "shard_size": 2})[0]:
        assert_snapshots_close(snapshot, want, EXACT)


def _difference_from_plain(dtype: torch.dtype, config: dict[str, Any], num_steps: int) -> float:
    """Return how far the weights go from those of plain AdamW in float32, as a part of how far those have moved."""
    model, optimizer = build(dtype, config)
    plain = make_model(dtype).float()
    start = [param.detach().clone() for param in plain.parameters()]
    train(model, optimizer, dtype, range(num_steps))
    train(plain, torch.optim.AdamW(plain.parameters(), **HYPER), torch.float32, range(num_steps))
    pairs = list(zip(model.parameters(), plain.parameters(), start, strict=True))
    away = sum(float((got.detach().float() - want.detach()).square().sum()) for got, want, _ in pairs)
    moved = sum(float((want.detach() - old).square().sum()) for _, want, old in pairs)
    return (away / moved) ** 0.5


def test_8_bit_moments_stay_close_to_plain_adamw() -> None:
    assert _difference_from_plain(torch.float32, {"state_dtype": "int8"}, 30) < 0.1


def test_stochastic_rounding_keeps_small_updates_and_decay() -> None:
    """Steps of a sixteenth of a bf16 unit: rounding to the nearest loses all of them, at random they add up."""

    def moved(master: str) -> tuple[float, float]:
        weight = nn.Parameter(torch.ones(100_000, dtype=torch.bfloat16))
        optimizer = zero_shard.AdamW([weight], lr=2**-12, weight_decay=0.25, config={"master": master})
        for _ in range(64):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        weight.requires_grad_(False)
        return float(weight.float().mean()), float(weight.float().std())

    assert moved("none") == (1.0, 0.0), "the control"
    mean, _ = moved("stochastic")
    # 64 factors of 1 - 2^-14; the standard error of the mean over 100,000 weights is about 1.2e-5.
    assert abs(mean - (1 - 2**-14) ** 64) < 5e-5


def test_stochastic_rounding_refuses_float16() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"param_groups\[0\].*float16.*stochastic.*bfloat16"):
        zero_shard.AdamW([weight], config={"master": "stochastic"})


# --- 8-bit moments: memory, dicts, checkpoints ---


def _state_nbytes(stage: int, state_dtype: str) -> tuple[int, int, int]:
    model = nn.Linear(512, 2048, bias=False)
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage, "state_dtype": state_dtype})
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    (state,) = optimizer.state.values()
    usage = optimizer.usage()
    return sum(value.nbytes for value in state.values()), usage.held_nbytes, usage.promised_nbytes


@pytest.mark.parametrize("stage", range(4))
def test_8_bit_moments_take_a_quarter_of_the_memory(stage: int) -> None:
    (wide, *_), (narrow, held, promised) = (ranks.run(2, _state_nbytes, stage, kind)[0] for kind in ("float32", "int8"))
    assert narrow < 0.26 * wide
    assert held <= 1.02 * promised


def test_small_parameters_keep_float32_moments() -> None:
    model, optimizer = build(torch.float32, {"state_dtype": "int8"})
    train(model, optimizer, torch.float32, range(1))
    kinds = {name: optimizer.state[param]["exp_avg"].dtype for name, param in model.named_parameters()}
    assert kinds["0.weight"] == kinds["2.weight"] == torch.int8
    assert kinds["0.bias"] == kinds["4.weight"] == torch.float32
    assert optimizer.state[model[0].weight]["exp_avg_sq"].dtype == torch.uint8
    assert optimizer.full_state_dict()["state"][0]["exp_avg_sq"].dtype == torch.float32


def _load_own_and_plain(stage: int) -> None:
    dtype = torch.float32
    model, optimizer = build(dtype, {"stage": stage, "state_dtype": "int8"})
    train(model, optimizer, dtype, range(2))
    before, saved = sharded_snapshot(model, optimizer), copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert_snapshots_close(sharded_snapshot(model, optimizer), before, EXACT, "its own live state")
    weights = copy.deepcopy(before)
    train(model, optimizer, dtype, range(2, 4))
    after = sharded_snapshot(model, optimizer)
    optimizer.load_state_dict(saved)
    with zero_shard.gathered(model, modify=True):
        shared = [{name: entry["param"] for name, entry in weights.items()}]
        dist.broadcast_object_list(shared)
        for name, param in model.named_parameters():
            param.detach().copy_(shared[0][name])
    train(model, optimizer, dtype, range(2, 4))
    assert_snapshots_close(sharded_snapshot(model, optimizer), after, EXACT, "a state dict of two steps ago")

    plain = make_model(dtype)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), **HYPER)
    train(plain, plain_optimizer, dtype, range(2))
    optimizer.load_state_dict(plain_optimizer.state_dict())
    full = optimizer.full_state_dict()
    for number, entry in plain_optimizer.state_dict()["state"].items() if full else ():
        got = full["state"][number]
        assert got["step"] == entry["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            largest = float(entry[key].abs().max())
            torch.testing.assert_close(got[key], entry[key], rtol=0, atol=0.01 * largest, msg=f"{key} of {number}")


@pytest.mark.parametrize("stage", range(4))
def test_8_bit_moments_in_state_dicts(stage: int) -> None:
    ranks.run(2, _load_own_and_plain, stage)


def _save_and_go_on(path: str, dtype: torch.dtype, config: dict[str, Any]) -> Snapshot:
    model, optimizer = build(dtype, {**config, "stage": 2})
    train(model, optimizer, dtype, range(2))
    zero_shard.save(path, model, optimizer)
    train(model, optimizer, dtype, range(2, 4))
    return sharded_snapshot(model, optimizer)


def _load_then_go_on(path: str, dtype: torch.dtype, config: dict[str, Any], stage: int) -> Snapshot:
    model, optimizer = build(dtype, {**config, "stage": stage})
    zero_shard.load(path, model, optimizer)
    train(model, optimizer, dtype, range(2, 4))
    return sharded_snapshot(model, optimizer)


@pytest.mark.parametrize("name", SCHEMES)
def test_checkpoints_load_at_another_stage_and_world_size_bit_for_bit(name: str, tmp_path: Path) -> None:
    dtype, config = SCHEMES[name]
    want = ranks.run(2, _save_and_go_on, str(tmp_path / "saved"), dtype, config)[0]
    for world_size, stage in ((1, 0), (4, 1), (4, 3)):
        got = ranks.run(world_size, _load_then_go_on, str(tmp_path / "saved"), dtype, config, stage)[0]
        assert_snapshots_close(got, want, EXACT, f"{world_size} ranks, stage {stage}")


def test_a_checkpoint_of_8_bit_moments_loads_with_float32_moments(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    model, optimizer = build(torch.float32, {"state_dtype": "int8"})
    train(model, optimizer, torch.float32, range(2))
    zero_shard.save(path, model, optimizer)
    other, wide = build(torch.float32, {})
    zero_shard.load(path, other, wide)
    assert_snapshots_close(sharded_snapshot(other, wide), sharded_snapshot(model, optimizer), EXACT)
    assert wide.state[other[0].weight]["exp_avg"].dtype == torch.float32


def test_amsgrad_is_refused_with_8_bit_moments() -> None:
    model = make_model(torch.float32)
    with pytest.raises(NotImplementedError, match=r"amsgrad .*int8.*bfloat16"):
        zero_shard.AdamW(model.parameters(), amsgrad=True, config={"state_dtype": "int8"})
    model, optimizer = build(torch.float32, {"state_dtype": "int8"})
    train(model, optimizer, torch.float32, range(1))
    before = sharded_snapshot(model, optimizer)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(NotImplementedError, match=r"amsgrad .*int8"):
        train(model, optimizer, torch.float32, range(1, 2))
    assert_snapshots_close(sharded_snapshot(model, optimizer), before, EXACT, "after the refusal")
