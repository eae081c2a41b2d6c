"""The optimizer as people use it: groups edited in mid-run, schedulers, closures, hooks, clipping, state dicts."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import (
    EXACT,
    TOLERANCE,
    Tolerance,
    assert_ranks_agree,
    assert_snapshots_close,
    fingerprint,
    full_grad,
    mean_over_ranks,
    plain_snapshot,
    sharded_snapshot,
)
from torch import Tensor, nn

import zero_shard

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
_F64 = torch.float64


def _net(dtype: torch.dtype = _F64) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(4, 5, dtype=_F64, generator=torch.Generator().manual_seed(31 * rank + step))
    return model(x.to(_dtype_of(model))).square().mean()


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _build(model: nn.Module, stage: int, config: dict[str, Any] | None = None, **hyper: Any) -> zero_shard.AdamW:
    config = {"stage": stage, "bucket_mib": 1e-4, **(config or {})}
    return zero_shard.AdamW(model.parameters(), module=model, config=config, **{"lr": 0.01, **hyper})


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    _loss(model, dist.get_rank(), step).backward()
    optimizer.step()


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, world_size: int) -> None:
    mean_over_ranks(model.parameters(), [[lambda r=r: _loss(model, r, step)] for r in range(world_size)])
    optimizer.step()


def _per_step(steps: int, dtype: torch.dtype = _F64) -> Tolerance:
    return Tolerance(TOLERANCE[dtype].rtol * steps, TOLERANCE[dtype].atol * steps)


# --- scripts, run with plain AdamW and sharded, and compared after every step ---


class _Script:
    """What happens in a run. The same code drives the plain optimizer, with all ranks' losses in turn."""

    hyper: ClassVar[dict[str, Any]] = {}
    num_steps = 5

    def groups(self, model: nn.Module) -> Any:
        return model.parameters()

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        pass

    def before(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        pass

    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        pass

    def after(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        pass

    def is_zeroed_to_none(self, step: int) -> bool:
        return True


class _AddedGroup(_Script):
    def groups(self, model: nn.Module) -> Any:
        return list(model[0].parameters())

    def before(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 1:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1, "weight_decay": 0.0})
        if step == 3:
            optimizer.add_param_group({"params": list(model[4].parameters()), "betas": (0.5, 0.6)})


class _Freezing(_Script):
    num_steps = 7

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model[2].requires_grad_(False)

    def before(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        model[2].requires_grad_(step in (2, 3, 6))
        model[0].weight.requires_grad_(step != 3)


class _FrozenAtTheStart(_Freezing):
    """Frozen before the optimizer is built."""

    def groups(self, model: nn.Module) -> Any:
        model[2].requires_grad_(False)
        return model.parameters()


class _EditedGroups(_Script):
    def groups(self, model: nn.Module) -> Any:
        params = list(model.parameters())
        return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.003, "betas": (0.7, 0.8)}]

    def before(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        first, second = optimizer.param_groups
        if step == 2:
            first["lr"], second["weight_decay"], first["eps"] = 0.05, 0.3, 1e-3
        if step == 3:
            second["maximize"], second["betas"] = True, (0.2, 0.3)
        if step == 4:  # a parameter moves to the other group
            second["params"].append(first["params"].pop())


class _Scheduler(_Script):
    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        self.scheduler = torch.optim.lr_scheduler.ChainedScheduler([warm, decay])

    def after(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        self.scheduler.step()


class _TensorLr(_Script):
    def groups(self, model: nn.Module) -> Any:
        self.lr = torch.tensor(0.02, dtype=_F64)
        return [{"params": model.parameters(), "lr": self.lr}]

    def before(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        self.lr.mul_(0.7)


class _Hooks(_Script):
    """Step hooks see every step, and may change gradients and weights."""

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: self.seen.append("pre"))
        optimizer.register_step_post_hook(lambda *_: self.seen.append("post"))
        optimizer.register_step_pre_hook(lambda *_: [p.grad.mul_(0.5) for p in model.parameters()] and None)

    def after(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        assert self.seen == ["pre", "post"] * (step + 1)


class _TorchClip(_Script):
    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert norm.shape == () and type(norm) is Tensor and 0.01 < norm.item() < 100


class _TorchClipValue(_Script):
    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


class _Clip(_Script):
    """The library's clip is torch's."""

    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, zero_shard.AdamW):
            optimizer.clip_grad_norm_(0.01)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


class _ClipInf(_Script):
    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, zero_shard.AdamW):
            optimizer.clip_grad_norm_(0.01, norm_type=math.inf)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, math.inf)


class _ScaledGradients(_Script):
    """Reads and changes of ``p.grad`` that people write between backward and step."""

    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number, param in enumerate(model.parameters()):
            param.grad.mul_(number + 0.5)
            param.grad.div_(2.0)
            param.grad.clamp_(-0.05, 0.05)


class _Zeroing(_Script):
    num_steps = 6

    def is_zeroed_to_none(self, step: int) -> bool:
        return step % 2 == 0


class _DroppedGradient(_Script):
    """A gradient that is set to None before the step is a parameter that is skipped."""

    def clip(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model[2].weight.grad = None


class _Amsgrad(_Script):
    hyper: ClassVar[dict[str, Any]] = {"amsgrad": True, "weight_decay": 0.2}


_SCRIPTS: dict[str, type[_Script]] = {
    "add_param_group": _AddedGroup,
    "freezing and thawing": _Freezing,
    "frozen at the start": _FrozenAtTheStart,
    "groups edited": _EditedGroups,
    "scheduler": _Scheduler,
    "lr as a tensor": _TensorLr,
    "step hooks": _Hooks,
    "clip_grad_norm_ of torch": _TorchClip,
    "clip_grad_value_ of torch": _TorchClipValue,
    "clip_grad_norm_": _Clip,
    "clip_grad_norm_ to the largest": _ClipInf,
    "gradients scaled": _ScaledGradients,
    "zero_grad both ways": _Zeroing,
    "gradient dropped": _DroppedGradient,
    "amsgrad": _Amsgrad,
}


def _play(name: str, config: dict[str, Any]) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    script, plain_script = _SCRIPTS[name](), _SCRIPTS[name]()
    model, plain_model = _net(), _net()
    hyper = {"lr": 0.01, **script.hyper}
    config = {"bucket_mib": 1e-4, **config}
    optimizer = zero_shard.AdamW(script.groups(model), module=model, config=config, **hyper)
    plain = torch.optim.AdamW(plain_script.groups(plain_model), **hyper)
    script.start(model, optimizer)
    plain_script.start(plain_model, plain)
    for step in range(script.num_steps):
        script.before(model, optimizer, step)
        plain_script.before(plain_model, plain, step)
        optimizer.zero_grad(set_to_none=script.is_zeroed_to_none(step))
        _loss(model, rank, step).backward()
        script.clip(model, optimizer)
        optimizer.step()
        script.after(model, optimizer, step)
        losses = [[lambda r=r, step=step: _loss(plain_model, r, step)] for r in range(world_size)]
        mean_over_ranks(plain_model.parameters(), losses)
        plain_script.clip(plain_model, plain)
        plain.step()
        plain_script.after(plain_model, plain, step)
        snapshot = sharded_snapshot(model, optimizer)
        if rank == 0:
            want = plain_snapshot(plain_model, plain)
            assert_snapshots_close(snapshot, want, _per_step(4 * (step + 1)), f"{name}, {config}, step {step}")
    assert_ranks_agree(model, name)


_WAYS: list[dict[str, Any]] = [
    *({"stage": stage} for stage in range(4)),
    {"stage": 1, "bucket_mib": 25},
    {"stage": 3, "prefetch": 0, "check": "every_step"},
]


def _play_all_ways(name: str) -> None:
    for config in _WAYS:
        if name == "add_param_group" and config["stage"] == 3:
            continue  # at stage 3 the optimizer has all parameters of the module; see the test of its own
        _play(name, config)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", _SCRIPTS)
def test_runs_of_all_kinds_give_what_plain_adamw_gives(world_size: int, name: str) -> None:
    ranks.run(world_size, _play_all_ways, name)


def _hybrid(name: str) -> None:
    for stage in (1, 2, 3):
        for shard_size in (1, 2, 4):
            if name == "add_param_group" and stage == 3:
                continue
            _play(name, {"stage": stage, "shard_size": shard_size})


@pytest.mark.parametrize(
    "name", ["groups edited", "clip_grad_norm_", "clip_grad_norm_ of torch", "freezing and thawing"]
)
def test_hybrid_sharding_gives_what_plain_adamw_gives(name: str) -> None:
    """4 ranks as 4 replicas, 2 copies of 2 shards, or 1 copy of 4 shards."""
    ranks.run(4, _hybrid, name)


def _hybrid_memory() -> list[int]:
    held = []
    for shard_size in (1, 2, 4):
        model = nn.Linear(64, 64)
        optimizer = _build(model, 3, {"shard_size": shard_size})
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        held.append(optimizer.usage().held_nbytes)
    return held


def test_hybrid_sharding_holds_what_its_groups_hold() -> None:
    for held in ranks.run(4, _hybrid_memory):
        assert held[0] > 1.9 * held[1] > 3.6 * held[2], held


def _add_group_at_stage_3() -> None:
    model, extra = _net(), nn.Linear(2, 2).to(_F64)
    optimizer = zero_shard.AdamW(model[0].parameters(), lr=0.01, module=model, config={"stage": 3})
    optimizer.add_param_group({"params": list(model[2].parameters())})
    optimizer.add_param_group({"params": list(extra.parameters())})  # outside of the module: never sharded, but trained
    plain_model, plain_extra = _net(), nn.Linear(2, 2).to(_F64)
    plain_extra.load_state_dict(zero_shard.full_state_dict(extra) or extra.state_dict())
    plain = torch.optim.AdamW(
        [*plain_model[0].parameters(), *plain_model[2].parameters(), *plain_extra.parameters()], lr=0.01
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def loss(net: nn.Module, other: nn.Module, r: int, step: int) -> Tensor:
        return _loss(net, r, step) + other(torch.full((2,), r + 1.0, dtype=_F64)).sum()

    for step in range(3):
        optimizer.zero_grad()
        loss(model, extra, rank, step).backward()
        optimizer.step()
        params = [*plain_model.parameters(), *plain_extra.parameters()]
        mean_over_ranks(
            params, [[lambda r=r, step=step: loss(plain_model, plain_extra, r, step)] for r in range(world_size)]
        )
        plain.step()
    for part, plain_part in ((model, plain_model), (extra, plain_extra)):
        snapshot = sharded_snapshot(part, optimizer)
        if rank == 0:
            assert_snapshots_close(snapshot, plain_snapshot(plain_part, plain), _per_step(12))


def test_groups_added_at_stage_3() -> None:
    ranks.run(1, _add_group_at_stage_3)
    ranks.run(2, _add_group_at_stage_3)


# --- closures ---


def _closure(stage: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain_model = _net(), _net()
    optimizer, plain = _build(model, stage), torch.optim.AdamW(plain_model.parameters(), lr=0.01)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = _loss(model, rank, step)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert isinstance(loss, Tensor) and loss.requires_grad
        _plain_step(plain_model, plain, step, world_size)
    snapshot = sharded_snapshot(model, optimizer)
    if rank == 0:
        assert_snapshots_close(snapshot, plain_snapshot(plain_model, plain), _per_step(6))


@every_stage
def test_step_runs_a_closure_and_returns_its_loss(stage: int) -> None:
    ranks.run(2, _closure, stage)


# --- clipping ---


class _Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.Linear(4, 1, bias=False), nn.Linear(1, 1, bias=False), nn.Linear(2, 1, bias=False)]
        )
        self.to(_F64)
        for part in self.parts:
            nn.init.ones_(part.weight)

    def forward(self, scale: float) -> Tensor:
        gradients = ([3.0, 0, 0, 0], [4.0], [12.0, 0])
        return sum(  # type: ignore[return-value]
            scale * part(torch.tensor(gradient, dtype=_F64)).sum()
            for part, gradient in zip(self.parts, gradients, strict=True)
        )


def _clip_to(stage: int, limit: float, how: str) -> list[float]:
    """Return the norm that the clip returns, and the first moments of the three parameters after a step, on rank 0."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = _Three()
    optimizer = _build(model, stage, {"max_grad_norm": limit} if how == "config" else {})
    model(2 * (rank + 1) / (world_size + 1)).backward()
    norm = torch.tensor(13.0)
    if how == "library":
        norm = optimizer.clip_grad_norm_(limit)
        left = [full_grad(param).sum().item() for param in model.parameters()]
        factor = min(1.0, limit / 13) if world_size == 1 else 1.0  # folded into step(), but for a world of one
        assert left == pytest.approx([3 * factor, 4 * factor, 12 * factor], rel=1e-6)
    elif how == "torch":
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    assert type(norm) is Tensor and norm.shape == ()
    optimizer.step()
    state = optimizer.full_state_dict().get("state", {})
    return [norm.item(), *(entry["exp_avg"].sum().item() for entry in state.values())]


@pytest.mark.parametrize("how", ["library", "torch", "config"])
@every_stage
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_clip_norm_is_that_of_the_whole_mean_gradient(world_size: int, stage: int, how: str) -> None:
    """Clipping used the norm of the own shard, or counted each rank, or returned nothing.

    Source: pytorch/pytorch issues #170862 and #87401; pytorch/torchtitan issue #766.
    """
    for limit, moments in ((1.0, [0.02307692, 0.03076923, 0.09230769]), (100.0, [0.3, 0.4, 1.2])):
        results = ranks.run(world_size, _clip_to, stage, limit, how)
        for rank, (norm, *rest) in enumerate(results):
            assert norm == pytest.approx(13.0, rel=1e-12), f"rank {rank}"
            assert rank > 0 or rest == pytest.approx(moments, rel=2e-7)


def _skip(stage: int, config: dict[str, Any]) -> None:
    model = _net()
    optimizer = _build(model, stage, {"skip_nonfinite": True, **config})
    _step(model, optimizer, 0)
    before, state = fingerprint(model), copy.deepcopy(optimizer.state_dict()["state"])
    for bad in (math.nan, math.inf):
        optimizer.zero_grad()
        (_loss(model, dist.get_rank(), 1) * (bad if dist.get_rank() == 1 else 1.0)).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert [str(each.message)[:25] for each in caught] == ["zero_shard skipped a step"]
        assert fingerprint(model) == before
        for number, entry in optimizer.state_dict()["state"].items():
            for key, value in entry.items():
                assert torch.equal(value, state[number][key]), f"{key} of parameter {number} changed"
    _step(model, optimizer, 2)
    assert fingerprint(model) != before
    assert_ranks_agree(model)


@every_stage
@pytest.mark.parametrize("config", [{}, {"max_grad_norm": 1.0}], ids=str)
def test_a_step_that_one_rank_can_not_take_is_skipped_by_all(stage: int, config: dict[str, Any]) -> None:
    ranks.run(2, _skip, stage, config)


# --- gradients by hand ---


def _assign_gradients(stage: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain_model = _net(), _net()
    optimizer, plain = _build(model, stage), torch.optim.AdamW(plain_model.parameters(), lr=0.01)

    def local(r: int, number: int, shape: torch.Size) -> Tensor:
        return torch.full(tuple(shape), (r + 1.0) * (number + 1), dtype=_F64)

    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        for number, (param, other) in enumerate(zip(model.parameters(), plain_model.parameters(), strict=True)):
            if number == 3 and step == 1:
                continue  # nobody has one
            if number != 2 or rank == 0:  # only rank 0 has one
                param.grad = local(rank, number, param.shape)
            owners = range(1) if number == 2 else range(world_size)
            other.grad = sum(local(r, number, other.shape) for r in owners) / world_size  # type: ignore[assignment]
        optimizer.step()
        plain.step()
    snapshot = sharded_snapshot(model, optimizer)
    if rank == 0:
        assert_snapshots_close(snapshot, plain_snapshot(plain_model, plain), _per_step(6), f"stage {stage}")
    assert_ranks_agree(model)


@every_stage
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gradient_assigned_by_hand_is_averaged(world_size: int, stage: int) -> None:
    ranks.run(world_size, _assign_gradients, stage)


def _full_gradients(stage: int, under_no_sync: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain_model = _net(), _net()
    optimizer = _build(model, stage)
    if under_no_sync:
        with optimizer.no_sync():
            _loss(model, rank, 7).backward()
    _loss(model, rank, 3).backward()
    micros = (7, 3) if under_no_sync else (3,)
    mean_over_ranks(
        plain_model.parameters(),
        [[lambda r=r, m=m: _loss(plain_model, r, m) for m in micros] for r in range(world_size)],
    )
    for _ in range(2):  # reading changes nothing
        for (name, param), other in zip(model.named_parameters(), plain_model.parameters(), strict=True):
            full = full_grad(param)
            assert type(full) is Tensor and full.dtype == param.dtype and full.shape == param.shape
            torch.testing.assert_close(full, other.grad, rtol=1e-12, atol=1e-15, msg=f"stage {stage}: {name}")
            norm = torch.linalg.vector_norm(param.grad)
            torch.testing.assert_close(norm, torch.linalg.vector_norm(other.grad), rtol=1e-12, atol=0)
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.01)
    optimizer.step()
    plain.step()
    snapshot = sharded_snapshot(model, optimizer)
    if rank == 0:
        assert_snapshots_close(snapshot, plain_snapshot(plain_model, plain), _per_step(2), f"stage {stage}")


@every_stage
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("under_no_sync", [False, True])
def test_full_gives_the_mean_gradient(world_size: int, stage: int, under_no_sync: bool) -> None:
    ranks.run(world_size, _full_gradients, stage, under_no_sync)


def _no_sync(stage: int) -> None:
    """All backwards under no_sync, the step after it; gradients kept over a step; nothing sent inside."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain_model = _net(), _net()
    optimizer, plain = _build(model, stage), torch.optim.AdamW(plain_model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        labels: list[str] = []
        zero_shard.collectives.pending.before_collective = labels.append
        with optimizer.no_sync():
            _loss(model, rank, step).backward()
            _loss(model, rank, step + 40).backward()
        zero_shard.collectives.pending.before_collective = None
        assert not [label for label in labels if "gradient" in label], labels
        optimizer.step()
        losses = [[lambda r=r, s=s: _loss(plain_model, r, s) for s in (step, step + 40)] for r in range(world_size)]
        mean_over_ranks(plain_model.parameters(), losses)
        plain.step()
        snapshot = sharded_snapshot(model, optimizer)
        if rank == 0:
            want = plain_snapshot(plain_model, plain)
            assert_snapshots_close(snapshot, want, _per_step(2 * step + 2), f"stage {stage}, step {step}")


@every_stage
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_sync_around_every_backward(world_size: int, stage: int) -> None:
    ranks.run(world_size, _no_sync, stage)


# --- state dicts ---


def _round_trip(stage: int, dtype: torch.dtype, config: dict[str, Any], hyper: dict[str, Any]) -> None:
    """Train, save, train on; load into a second optimizer, train on: equal bits."""
    model = _net(dtype)
    optimizer = _build(model, stage, config, **hyper)
    for step in range(3):
        _step(model, optimizer, step)
    labels: list[str] = []
    zero_shard.collectives.pending.before_collective = labels.append
    saved = copy.deepcopy(optimizer.state_dict())
    zero_shard.collectives.pending.before_collective = None
    assert not labels, "state_dict() never communicates"
    weights = _weights(model)
    for step in range(3, 6):
        _step(model, optimizer, step)
    expected = sharded_snapshot(model, optimizer)
    other = _net(dtype)
    loaded = _build(other, stage, config, **{**hyper, "lr": 0.5})
    with zero_shard.gathered(other, modify=True), torch.no_grad():
        for param, weight in zip(other.parameters(), weights, strict=True):
            param.copy_(weight)
    before = copy.deepcopy(saved)
    loaded.load_state_dict(saved)
    _assert_same_state(saved, before)  # not changed, and not shared
    assert loaded.param_groups[0]["lr"] == 0.01
    for step in range(3, 6):
        _step(other, loaded, step)
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
        (_F64, {}, {}),
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
    plain_model = _net()
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.01, amsgrad=True)
    for step in range(2):
        _plain_step(plain_model, plain, step, world_size)
    model = _net()
    model.load_state_dict(plain_model.state_dict())
    optimizer = _build(model, stage, amsgrad=True)
    optimizer.load_state_dict(plain.state_dict())
    for step in range(2, 4):
        _step(model, optimizer, step)
        _plain_step(plain_model, plain, step, world_size)
    snapshot, full = sharded_snapshot(model, optimizer), optimizer.full_state_dict()
    full_weights = zero_shard.full_state_dict(model)
    if dist.get_rank() > 0:
        assert full == {} and full_weights == {}
        return
    assert_snapshots_close(snapshot, plain_snapshot(plain_model, plain), _per_step(4), f"stage {stage}")
    assert set(full) == set(plain.state_dict())
    assert full["param_groups"] == plain.state_dict()["param_groups"]
    back_model = _net()
    back_model.load_state_dict(full_weights)
    back = torch.optim.AdamW(back_model.parameters(), lr=3.0, amsgrad=True)
    back.load_state_dict(full)
    _plain_step(back_model, back, 9, world_size)
    _plain_step(plain_model, plain, 9, world_size)
    assert_snapshots_close(
        plain_snapshot(back_model, back),
        plain_snapshot(plain_model, plain),
        _per_step(5),
        f"stage {stage}, back in plain",
    )


@every_stage
@pytest.mark.parametrize("world_size", [1, 3])
def test_plain_adamw_state_goes_in_and_comes_back(world_size: int, stage: int) -> None:
    ranks.run(world_size, _plain_there_and_back, stage)


def _refused(stage: int) -> dict[str, str]:
    """Return the text of the refusal of each unfit dict, after checking that nothing has changed."""
    model = _net()
    optimizer = _build(model, stage)
    for step in range(2):
        _step(model, optimizer, step)
    good = copy.deepcopy(optimizer.state_dict())
    plain_model = _net()
    plain = torch.optim.AdamW(plain_model.parameters(), lr=7.0)
    _plain_step(plain_model, plain, 0, 1)
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
    source_model = _net()
    source = _build(source_model, 2, {"bucket_mib": 25, "shard_size": 1})
    _step(source_model, source, 0)
    for stage in (1, 2, 3):
        model = _net()
        optimizer = _build(model, stage)
        try:
            optimizer.load_state_dict(source.state_dict())
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
        _step(model, optimizer, 0)
    return texts


def test_state_of_another_layout_is_refused_with_the_way_out() -> None:
    for texts in ranks.run(2, _of_another_layout):
        for text in texts:
            assert "another stage, world size or config" in text and "full_state_dict" in text, text
