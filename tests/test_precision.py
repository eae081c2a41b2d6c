"""8-bit moments, stochastic rounding, norms without a pass of their own, and steps that the device skips."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import EXACT, Snapshot, Tolerance, assert_ranks_agree, assert_snapshots_close, sharded_snapshot
from torch import Tensor, nn

import zero_shard
from zero_shard import adamw as adamw_file
from zero_shard import ops

HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
# What the storage of state is; all of them must train alike at every stage and world size.
SCHEMES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32, 8-bit moments": (torch.float32, {"state_dtype": "int8"}),
    "bf16, 8-bit moments": (torch.bfloat16, {"state_dtype": "int8"}),
    "bf16, stochastic": (torch.bfloat16, {"master": "stochastic"}),
    "bf16, stochastic, 8-bit moments": (torch.bfloat16, {"master": "stochastic", "state_dtype": "int8"}),
    "bf16, stochastic, bf16 moments": (torch.bfloat16, {"master": "stochastic", "state_dtype": "bfloat16"}),
}


def make_model(dtype: torch.dtype) -> nn.Module:
    """Parameters above and below the size from which moments have 8 bits, none a multiple of 256; one not row-major."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(37, 131), nn.Tanh(), nn.Linear(131, 41), nn.Tanh(), nn.Linear(41, 3))
    model[2].weight = nn.Parameter((torch.randn(131, 41) / 11).t())
    return model.to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, steps: range) -> None:
    """Every rank sees the same rows, so that the mean gradient is the same in every world of 2^k ranks."""
    for step in steps:
        rows = torch.randn(8, 37, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        model(rows).float().pow(2).sum().backward()
        optimizer.step()


def build(dtype: torch.dtype, config: dict[str, Any]) -> tuple[nn.Module, zero_shard.AdamW]:
    model = make_model(dtype)
    return model, zero_shard.AdamW(model.parameters(), **HYPER, module=model, config=config)


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


# --- state dicts of apex ---


@pytest.mark.parametrize("kind", ["FusedAdam", "DistributedFusedAdam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_dicts_of_apex_load(kind: str, dtype: torch.dtype) -> None:
    """FusedAdam counts steps by group, DistributedFusedAdam once; the latter has the fp32 master as ``param``."""
    source, source_optimizer = build(dtype, {})
    train(source, source_optimizer, dtype, range(3))
    plain = copy.deepcopy(source_optimizer.full_state_dict())
    (group,) = plain["param_groups"]
    kept = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "params")} | {"bias_correction": True}
    state: dict[Any, Any] = {n: {k: e[k] for k in ("exp_avg", "exp_avg_sq")} for n, e in plain["state"].items()}
    if kind == "FusedAdam":
        kept["step"] = 3
    else:
        state["step"] = 3
        for number, slot in enumerate(source_optimizer._reducer.slots):
            assert slot.index == number, "one bucket in the order of the groups"
        masters = _masters(source, source_optimizer)
        for number, master in enumerate(masters):
            state[number]["param"] = master
    target = copy.deepcopy({name: value.clone() for name, value in source.state_dict().items()})
    model = make_model(dtype)
    model.load_state_dict(target)
    optimizer = zero_shard.AdamW(model.parameters(), **HYPER)
    optimizer.load_state_dict({"state": state, "param_groups": [kept]})
    got, want = sharded_snapshot(model, optimizer), sharded_snapshot(source, source_optimizer)
    assert_snapshots_close(got, want, EXACT, kind)
    if kind == "DistributedFusedAdam" or dtype == torch.float32:  # else the low halves of the masters are not known
        train(model, optimizer, dtype, range(3, 5))
        train(source, source_optimizer, dtype, range(3, 5))
        assert_snapshots_close(sharded_snapshot(model, optimizer), sharded_snapshot(source, source_optimizer), EXACT)


def _masters(model: nn.Module, optimizer: zero_shard.AdamW) -> list[Tensor]:
    """Return the fp32 masters, whole, in the order of the groups, of a world of one."""
    state = optimizer.state_dict()["state"]
    masters = []
    for number, param in enumerate(model.parameters()):
        master = param.detach().float()
        low = state[number].get("low")
        if low is not None and low.dtype == torch.int16:
            high = param.detach().view(torch.int16).to(torch.int32) << 16
            master = (high + low.to(torch.int32)).view(torch.float32)
        elif low is not None:
            master = low.clone()
        masters.append(master)
    return masters


def test_a_dict_without_bias_correction_is_refused() -> None:
    model, optimizer = build(torch.float32, {})
    saved = torch.optim.AdamW(model.parameters()).state_dict()
    saved["param_groups"][0]["bias_correction"] = False
    with pytest.raises(ValueError, match="bias_correction=False"):
        optimizer.load_state_dict(saved)


def test_what_apex_keeps_in_its_groups_does_not_stay() -> None:
    model = make_model(torch.float32)
    optimizer = zero_shard.AdamW(model.parameters(), **HYPER, maximize=True)
    saved = copy.deepcopy(torch.optim.AdamW(model.parameters(), lr=0.5).state_dict())
    (group,) = saved["param_groups"]
    kept = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "params")}
    optimizer.load_state_dict({"state": {}, "param_groups": [{**kept, "step": 10, "bias_correction": 1}]})
    (loaded,) = optimizer.param_groups
    assert loaded["lr"] == 0.5
    assert loaded["maximize"] is True, "apex has no such setting"
    assert not {"step", "bias_correction"} & set(loaded)


# --- faults found in review ---


def _norms_of_small(scale: float) -> list[tuple[float, float]]:
    """Return norms of a parameter that lies on one rank alone, by torch and as they must be."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(4096))]
    optimizer = zero_shard.AdamW(weights)
    (weights[0] * scale * torch.arange(1.0, 17.0)).sum().backward()
    grad = weights[0].grad
    full = grad.full().double()
    found = [(float(grad.norm(dtype=torch.float64)), float(full.norm()))]
    found.append(
        (float(torch.linalg.vector_norm(grad, 3, dtype=torch.float64)), float((full.abs() ** 3).sum() ** (1 / 3)))
    )
    del optimizer
    return found


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e-15, 1e-18])
def test_norms_of_tiny_gradients_keep_their_digits(scale: float) -> None:
    for found in ranks.run(2, _norms_of_small, scale):
        for norm, want in found:
            assert norm == pytest.approx(want, rel=1e-6)


def _read_a_part_alone() -> None:
    model, optimizer = build(torch.float32, {"stage": 2})
    model(torch.ones(2, 37)).sum().backward()
    grad = model[0].weight.grad
    before = grad.norm()
    if dist.get_rank() == 0:
        grad.part.abs().sum()  # logging on one rank
    assert torch.equal(grad.norm(), before)
    grad.part.mul_(3)
    torch.testing.assert_close(grad.norm(), 3 * before)
    optimizer.step()


def test_one_rank_may_look_at_its_part() -> None:
    ranks.run(2, _read_a_part_alone)


def _keep_a_part(how: str) -> None:
    model, optimizer = build(torch.float32, {"stage": 2})
    model(torch.ones(2, 37)).sum().backward()
    grad = model[0].weight.grad
    part = grad.part
    before = grad.norm()
    if how == "a part changed later":
        part.mul_(3)
    else:
        optimizer.clip_grad_norm_(1e-3)
        with optimizer.no_sync():
            model[4].bias.sum().backward()  # now the clip is applied to what is there
    torch.testing.assert_close(grad.norm(), grad.full().norm())
    assert not torch.equal(grad.norm(), before)


@pytest.mark.parametrize("how", ["a part changed later", "a clip applied later"])
def test_norms_follow_gradients_that_change_later(how: str) -> None:
    ranks.run(2, _keep_a_part, how)


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


# --- passes over memory ---


@contextmanager
def counted(optimizer: zero_shard.AdamW) -> Iterator[dict[str, int]]:
    """Count the calls of every operator."""
    calls: dict[str, int] = {}

    def counting(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            kernel(*args)

        return call

    kernels = optimizer._kernels
    names = [name for name in kernels._fields if name != "name"]
    wrapped = kernels._replace(**{name: counting(name, getattr(kernels, name)) for name in names})
    reducer = optimizer._reducer
    holders: list[Any] = [optimizer, reducer.exchanges, reducer.norms, reducer.plain_gradients]
    for holder in holders:
        holder._kernels = wrapped
    try:
        yield calls
    finally:
        for holder in holders:
            holder._kernels = kernels


def test_a_world_of_one_reads_gradients_where_they_are() -> None:
    model, optimizer = build(torch.float32, {"max_grad_norm": 0.1})
    with counted(optimizer) as calls:
        train(model, optimizer, torch.float32, range(2))
    num_buckets = len(optimizer._reducer.buckets)
    assert calls == {"sum_squares_": 2 * num_buckets, "sum_pairs_": 4, "adamw_": 2 * num_buckets}


def test_gradients_of_mixed_dtypes_are_flattened_first() -> None:
    def run(plain: bool) -> list[Tensor]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(20).bfloat16()) for _ in range(3)]
        params[1].grad_dtype = torch.float64
        kind = torch.optim.AdamW if plain else zero_shard.AdamW
        optimizer = kind(params, lr=0.1)
        for step in range(2):
            for number, param in enumerate(params):
                grad = torch.full((20,), 1.0 + step + number)
                param.grad = grad.to(torch.float64 if number == 1 else torch.bfloat16)
            if plain:
                for param in params:
                    param.grad_dtype = None
                    param.grad = param.grad.to(torch.bfloat16)
            optimizer.step()
        return [param.detach() for param in params]

    for got, want in zip(run(plain=False), run(plain=True), strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)


def _norm_passes(stage: int) -> list[dict[str, int]]:
    model, optimizer = build(torch.float32, {"stage": stage, "max_grad_norm": 0.1})
    found = []
    with counted(optimizer) as calls:
        train(model, optimizer, torch.float32, range(2))
    found.append(calls)
    model, optimizer = build(torch.float32, {"stage": stage})
    with counted(optimizer) as calls:
        train(model, optimizer, torch.float32, range(1))
        model(torch.ones(2, 37)).sum().backward()
        optimizer.clip_grad_norm_(0.1)  # the first to ask for a norm pays for a pass
        optimizer.step()
        optimizer.zero_grad()
        first = calls.get("sum_squares_", 0)
        model(torch.ones(2, 37)).sum().backward()
        optimizer.clip_grad_norm_(0.1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return [*found, {"first": first, "then": calls.get("sum_squares_", 0) - first}]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_costs_no_pass_where_gradients_are_reduced(stage: int) -> None:
    for in_step, by_call in ranks.run(2, _norm_passes, stage):
        assert "sum_squares_" not in in_step
        assert in_step["reduce_slices_"] > 0
        assert by_call["first"] > 0, "the control"
        assert by_call["then"] == 0


def _norm_after(stage: int, change: str) -> tuple[float, float]:
    """Return the norm that clipping reports after a change of the reduced gradients, and the right one."""
    model, optimizer = build(torch.float32, {"stage": stage})
    for _ in range(2):  # from the second round on squares are taken while reducing
        optimizer.zero_grad()
        model(torch.ones(2, 37)).sum().backward()
        optimizer.clip_grad_norm_(1e9)
    kept = [
        param.grad.part if isinstance(param.grad, zero_shard.ShardedGrad) else param.grad
        for param in model.parameters()
    ]
    for param, part in zip(model.parameters(), kept, strict=True):
        if change == "mul":
            param.grad.mul_(2.0)
        elif change == "data" and stage == 0:
            param.grad.data.mul_(2.0)
        elif change == "kept":
            part.mul_(2.0)
    if change == "drop":
        model[0].weight.grad = None
    if change == "more":
        model(torch.ones(2, 37)).sum().backward()
    if change == "zero":
        optimizer.zero_grad(set_to_none=False)
    norm = float(optimizer.clip_grad_norm_(1e9))
    squares = 0.0
    for param in model.parameters():
        grad = param.grad
        if grad is not None:
            full = grad.full() if isinstance(grad, zero_shard.ShardedGrad) else grad
            squares += float(full.double().square().sum())
    return norm, squares**0.5


@pytest.mark.parametrize("change", ["none", "mul", "data", "kept", "drop", "more", "zero"])
@pytest.mark.parametrize("stage", range(4))
def test_the_norm_is_that_of_the_gradients_as_they_are(stage: int, change: str) -> None:
    for norm, want in ranks.run(2, _norm_after, stage, change):
        assert norm == pytest.approx(want, rel=1e-6)


# --- steps that are skipped without the host looking ---


def _skip(stage: int, is_deferred: bool) -> list[Snapshot]:
    if is_deferred:
        adamw_file._HOST = "no device"
    try:
        model, optimizer = build(torch.float32, {"stage": stage, "skip_nonfinite": True})
        train(model, optimizer, torch.float32, range(2))
        before = sharded_snapshot(model, optimizer)
        model(torch.full((2, 37), torch.nan if dist.get_rank() else 1.0)).sum().backward()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.step()
            skipped = sharded_snapshot(model, optimizer)
            assert len(seen) == (0 if is_deferred else 1)
            train(model, optimizer, torch.float32, range(2, 3))
            assert [str(each.message)[:39] for each in seen] == ["zero_shard skipped a step on all ranks:"]
            assert "test_precision" in seen[0].filename, "it points at the line that called step()"
        return [before, skipped, sharded_snapshot(model, optimizer)]
    finally:
        adamw_file._HOST = "cpu"


@pytest.mark.parametrize("stage", range(4))
def test_a_step_that_the_device_skips_changes_nothing(stage: int) -> None:
    before, skipped, after = ranks.run(2, _skip, stage, True)[0]
    assert_snapshots_close(skipped, before, EXACT, "skipped")
    assert_snapshots_close(after, ranks.run(2, _skip, stage, False)[0][2], EXACT, "and one more step")


def _split_norms(stage: int, dtype: torch.dtype) -> tuple[list[float], float]:
    model, _optimizer = build(dtype, {"stage": stage})
    model(torch.ones(2, 37, dtype=dtype)).sum().backward()
    norms = [float(torch.linalg.vector_norm(param.grad)) for param in model.parameters()]
    return norms, float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_single_parameters_do_not_depend_on_the_sharding(dtype: torch.dtype) -> None:
    found = [result for size in (2, 4) for stage in (1, 2, 3) for result in ranks.run(size, _split_norms, stage, dtype)]
    tolerance = Tolerance(1e-6, 0.0) if dtype == torch.float32 else Tolerance(1e-14, 0.0)
    model = make_model(dtype)
    model(torch.ones(2, 37, dtype=dtype)).sum().backward()
    for norms, total in found:
        assert (norms, total) == found[0]
    for norm, param in zip(found[0][0], model.parameters(), strict=True):
        assert norm == pytest.approx(float(param.grad.norm()), rel=tolerance.rtol)


# --- what kernels="apex" cannot store ---


@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (torch.bfloat16, {}),
        (torch.float16, {}),
        (torch.float64, {"master": "none"}),
        (torch.bfloat16, {"master": "stochastic"}),
        (torch.float32, {"state_dtype": "int8"}),
        (torch.float32, {"state_dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_apex_kernels_are_refused_where_they_cannot_store_the_state(
    dtype: torch.dtype, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = ops.select("torch")
    monkeypatch.setattr(ops, "select", lambda *_: kernels)
    with pytest.raises(ValueError, match=r"0\.weight.*kernels='apex'.*use kernels='auto'"):
        build(dtype, {**config, "kernels": "apex"})
    build(torch.bfloat16, {"kernels": "apex", "master": "none"})
