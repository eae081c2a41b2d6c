"""Habits and accidents of real training loops, each compared with plain AdamW on the mean gradient over the ranks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import PlainWithMean, assert_trained_alike
from torch import Tensor, nn

import zero_shard

D = torch.float64
Step = Callable[[nn.Module, Any, int], None]


def _mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(4, 4, dtype=D) for _ in range(3)))


def _x(step: int, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(31 * step + dist.get_rank())
    return torch.randn(rows, 4, generator=generator, dtype=D)


def _compare(stage: int, build: Callable[[], nn.Module], loop: Step, config: dict[str, Any] | None = None) -> None:
    """Run three steps of ``loop`` with the oracle and with ours; it calls ``optimizer.average()`` before it steps."""
    plain_model, model = build(), build()
    plain = PlainWithMean(plain_model.parameters(), lr=0.05, weight_decay=0.1)
    ours = zero_shard.AdamW(
        model.parameters(), lr=0.05, weight_decay=0.1, module=model, config={"stage": stage, **(config or {})}
    )
    ours.average = lambda: None  # type: ignore[attr-defined]
    for step in range(3):
        loop(plain_model, plain, step)
        loop(model, ours, step)
    assert_trained_alike(model, ours, plain_model, plain)


def _end(optimizer: Any) -> None:
    optimizer.average()
    optimizer.step()
    optimizer.zero_grad()


# --- loops over a plain model ---


def _failing_backward(model: nn.Module, optimizer: Any, step: int) -> None:
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError):
        model[2](Fail.apply(model[1](model[0](_x(step))))).sum().backward()
    if step % 2:
        optimizer.zero_grad()
    else:
        model.zero_grad()
    model(_x(step)).square().sum().backward()
    _end(optimizer)


def _replaced_data(model: nn.Module, optimizer: Any, step: int) -> None:
    model(_x(step)).square().sum().backward()
    _end(optimizer)
    is_ours = isinstance(optimizer, zero_shard.AdamW)
    with zero_shard.gathered(model, modify=True) if is_ours else nullcontext():
        model[1].weight.data = model[1].weight.data * 0.5


def _cleared_state(model: nn.Module, optimizer: Any, step: int) -> None:
    model(_x(step)).square().sum().backward()
    if step == 2:
        optimizer.state.clear()
    _end(optimizer)


def _rank_without_backward(model: nn.Module, optimizer: Any, step: int) -> None:
    if dist.get_rank() != step % 2:
        model(_x(step)).square().sum().backward()
    elif isinstance(optimizer, zero_shard.AdamW) and optimizer.config.stage == 3:
        model(_x(step))  # at stage 3 a forward needs all ranks
    _end(optimizer)


def _penalty(model: nn.Module, optimizer: Any, step: int) -> None:
    x = _x(step).requires_grad_()
    y = model(x).square()
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.sum() + slope.square().sum()).backward()
    _end(optimizer)


def _side_gradient(model: nn.Module, optimizer: Any, step: int) -> None:
    model(_x(step)).square().sum().backward()
    y = model(_x(step + 1)).sum()
    torch.autograd.grad(y, [model[0].bias])
    _end(optimizer)


def _fused_scaler(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.param_groups[0]["fused"] = True
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    bad = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
    scaler.scale(model(_x(step)).square().sum() * bad).backward()
    optimizer.average()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (512.0 if step == 1 else 1024.0)
    optimizer.zero_grad()


def _torch_clip(model: nn.Module, optimizer: Any, step: int) -> None:
    (model[0](_x(step)) if dist.get_rank() else model(_x(step))).square().sum().backward()
    optimizer.average()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=(1.0, 2.0, float("inf"))[step])
    optimizer.step()
    optimizer.zero_grad()


LOOPS = {
    "failing backward": _failing_backward,
    "replaced data": _replaced_data,
    "cleared state": _cleared_state,
    "rank without backward": _rank_without_backward,
    "gradient penalty": _penalty,
    "autograd.grad beside": _side_gradient,
    "fused and GradScaler": _fused_scaler,
    "torch clip, ranks differ": _torch_clip,
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_loop_trains_as_plain_adamw_does(stage: int, name: str) -> None:
    ranks.run(2, _compare, stage, _mlp, LOOPS[name], {"bucket_mib": 1e-4})


# --- models ---


class _Pair(NamedTuple):
    value: Tensor
    weight: Tensor


@dataclass
class _Record:
    value: Tensor
    weight: Tensor


class _ReturnsWeight(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(4, 4, dtype=D), kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(self.inner(x), self.inner.weight[:2])


class _Holder(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.parts = nn.ModuleList([_ReturnsWeight(kind), nn.Linear(4, 4, dtype=D)])

    def forward(self, x: Tensor) -> Tensor:
        out = self.parts[0](x)
        return self.parts[1](out.value) + out.weight.sum()


class _MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.parts = nn.ModuleList([nn.Embedding(5, 4, max_norm=0.7, dtype=D), nn.Linear(4, 4, dtype=D)])

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[1](self.parts[0](torch.arange(x.shape[0])))


class _Catches(nn.Module):
    """Falls back to another block when one raises, as a retry after running out of memory does."""

    class Raises(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise MemoryError("on purpose")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.parts = nn.ModuleList([self.Raises(4, 4, dtype=D), nn.Linear(4, 4, dtype=D), nn.Linear(4, 4, dtype=D)])

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.parts[0](x)
        except MemoryError:
            return self.parts[2](self.parts[1](x))


class _Dict(nn.ModuleDict):
    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__({"a": nn.Linear(4, 4, dtype=D), "b": nn.Linear(4, 4, dtype=D)})


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weight in a named tuple": lambda: _Holder(_Pair),
    "weight in a dataclass": lambda: _Holder(_Record),
    "in-place change in forward": _MaxNorm,
    "a caught exception": _Catches,
}


def _compare_model(stage: int, name: str) -> None:
    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        model(_x(step)).square().sum().backward()
        _end(optimizer)

    _compare(stage, MODELS[name], loop)


def _compare_dict(stage: int) -> None:
    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        model["b"](model["a"](_x(step))).square().sum().backward()
        _end(optimizer)

    _compare(stage, _Dict, loop)


@pytest.mark.parametrize("name", MODELS)
def test_model_trains_as_plain_adamw_does(name: str) -> None:
    for stage in (2, 3):
        ranks.run(2, _compare_model, stage, name)


def test_a_root_without_forward_needs_no_units() -> None:
    ranks.run(2, _compare_dict, 3)


# --- several optimizers, groups, wrappers ---


def _clip_beside_a_foreign_parameter(stage: int) -> tuple[float, Tensor]:
    model = _mlp()
    optimizer = zero_shard.AdamW(model[0].parameters(), lr=0.1, module=model, config={"stage": stage})
    model(_x(0)).square().sum().backward()
    norm = optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    with zero_shard.gathered(model):
        assert torch.equal(model[1].weight, _mlp()[1].weight), "a parameter in no group was updated"
        return norm.item(), model[0].weight.detach().clone()


@pytest.mark.parametrize("world_size", [1, 2])
def test_norm_counts_the_parameters_in_groups_only(world_size: int) -> None:
    results = [ranks.run(world_size, _clip_beside_a_foreign_parameter, stage)[0] for stage in range(4)]
    for norm, weight in results[1:]:
        assert norm == results[0][0]
        assert torch.equal(weight, results[0][1])


def _clip_twice(stage: int) -> None:
    model = _mlp()
    config = {"stage": stage, "max_grad_norm": 0.5}
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.1, module=model, config=config)
    (100 * model(_x(0)).square().sum()).backward()
    assert optimizer.clip_grad_norm_(0.5) > 1
    optimizer.step()
    state = optimizer.full_state_dict()
    if dist.get_rank() == 0:
        moments = [entry["exp_avg"].flatten() for entry in state["state"].values()]
        assert torch.cat(moments).norm().item() == pytest.approx(0.05, rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_clip_before_max_grad_norm_does_not_scale_twice(world_size: int) -> None:
    for stage in (0, 2):
        ranks.run(world_size, _clip_twice, stage)


def _two_optimizers(stage: int) -> None:
    models = [_mlp(), copy.deepcopy(_mlp())]
    with torch.no_grad():
        models[1][0].weight.mul_(2)
    optimizers = [
        zero_shard.AdamW(model.parameters(), lr=0.1, module=model, config={"stage": stage}) for model in models
    ]
    order = (0, 1) if dist.get_rank() == 0 else (1, 0)
    losses = [model(_x(0)).square().sum() * (number + 1) for number, model in enumerate(models)]
    (losses[order[0]] + losses[order[1]]).backward()
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.step()
        state = optimizer.full_state_dict()
        plain = _mlp()
        if model is models[1]:
            with torch.no_grad():
                plain[0].weight.mul_(2)
        (plain(_x(0)).square().sum() * (1 + (model is models[1]))).backward()
        for number, param in enumerate(plain.parameters()):
            dist.all_reduce(param.grad)
            if dist.get_rank() == 0:
                torch.testing.assert_close(state["state"][number]["exp_avg"], 0.1 * param.grad / 2, rtol=1e-10, atol=0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_optimizers_met_in_another_order_keep_their_gradients(stage: int) -> None:
    ranks.run(2, _two_optimizers, stage)


def _deleted(stage: int) -> None:
    model, plain = _mlp(), _mlp()
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage})
    model(_x(0)).sum().backward()
    del optimizer
    gc.collect()
    for each in (model, plain):
        torch_optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        torch_optimizer.zero_grad()
        each(_x(1)).square().sum().backward()
        torch_optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_model_of_a_deleted_optimizer_is_an_ordinary_model(stage: int) -> None:
    ranks.run(2, _deleted, stage)


def _built_in_inference_mode(stage: int) -> None:
    model = _mlp()
    with torch.inference_mode():
        optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage})
    model(_x(0)).sum().backward()
    optimizer.step()


def test_optimizer_may_be_built_in_inference_mode() -> None:
    for stage in range(4):
        ranks.run(2, _built_in_inference_mode, stage)


def _never_reduces_scatter(stage: int) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("gloo's reduce_scatter is a clone and an all-reduce")

    names = [
        name for name in ("reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter") if hasattr(dist, name)
    ]
    before = {name: getattr(dist, name) for name in names}
    try:
        for name in names:
            setattr(dist, name, forbidden)
        _built_in_inference_mode(stage)
    finally:
        for name, call in before.items():
            setattr(dist, name, call)


def test_gloo_never_reduces_scatter() -> None:
    for stage in range(4):
        ranks.run(2, _never_reduces_scatter, stage)


def _native_and_exchanged(stage: int, shard_size: int | None) -> None:
    """Run the calls that NCCL takes, which gloo knows too, and compare with the exchange."""
    results = []
    for is_native in (False, True):
        model = _mlp().float()
        config = {"stage": stage, "shard_size": shard_size}
        optimizer = zero_shard.AdamW(model.parameters(), lr=0.1, module=model, config=config)
        if is_native:
            optimizer._communicator._native_devices.add("cpu")
        for step in range(2):
            model(_x(step).float()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(zero_shard.full_state_dict(model))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=1e-5, atol=1e-7)


def test_native_collectives_give_the_same() -> None:
    for stage in range(4):
        ranks.run(2, _native_and_exchanged, stage, None)
    ranks.run(4, _native_and_exchanged, 2, 2)


def _num_groups(shard_size: int) -> int:
    for _ in range(3):
        model = _mlp()
        zero_shard.AdamW(model.parameters(), module=model, config={"stage": 2, "shard_size": shard_size})
    return len(dist.distributed_c10d._world.pg_map)


def test_building_again_makes_no_more_process_groups() -> None:
    counts = ranks.run(4, _num_groups, 2)
    assert max(counts) <= 1 + 2 + 1, counts  # the harness's own, two sub-groups, and the default group


def test_missing_process_group_under_a_launcher_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group first"):
        zero_shard.AdamW(nn.Linear(2, 2).parameters())
