"""What a checkpoint carries: everything, between all stages, world sizes, precisions, wrappers and ways to build."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler, swa_utils

import zero_shard
from zero_shard.number_formats import split_remainder


class _Net(nn.Module):
    """Tied, frozen, empty, 0-dim and permuted parameters, buffers, dropout, an extra state."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.third = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 5)
        self.second.weight = self.first.weight
        self.norm, self.frozen = nn.BatchNorm1d(5), nn.Linear(3, 3).requires_grad_(False)
        self.empty, self.scalar = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(1.5))
        self.permuted = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
        self.extra: Any = {"seed": seed}
        self.to(dtype)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scalar.fill_(2.5)
            self.permuted.normal_()

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.second(torch.tanh(self.first(x))), 0.3)
        return self.norm(self.third(x)) * self.scalar + self.permuted.pow(2).sum() + self.empty.sum()


def _optimizer(model: nn.Module, module: nn.Module | None = None, **config: Any) -> zero_shard.AdamW:
    params = list(model.parameters())
    groups = [
        {"params": params[:4], "lr": 0.02},
        {"params": [], "lr": 0.5},
        {"params": params[4:], "weight_decay": 0.3, "betas": (0.8, 0.9), "amsgrad": True},
    ]
    return zero_shard.AdamW(groups, lr=0.01, module=module or model, config=config)


def _train(model: nn.Module, optimizer: zero_shard.AdamW, num_steps: int = 2) -> None:
    for number in range(num_steps):
        x = torch.linspace(-1, 1 + number + dist.get_rank(), 56).view(8, 7)
        model(x).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _full(model: nn.Module, optimizer: zero_shard.AdamW) -> dict[str, Any]:
    return {"weights": zero_shard.full_state_dict(model), "optim": optimizer.full_state_dict()}


def _assert_same(got: Any, want: Any, where: Any) -> None:
    """Compare bit for bit: values, dtypes, shapes, keys."""
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor) and (got.dtype, got.shape) == (want.dtype, want.shape), where
        assert torch.equal(got, want), where
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key, each in want.items():
            _assert_same(got[key], each, (where, key))
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for number, each in enumerate(want):
            _assert_same(got[number], each, (where, number))
    else:
        assert got == want, where


# ---- any stage and world size to any other --------------------------------------------------------------------------


def _configs(world_size: int) -> list[dict[str, Any]]:
    shard_size = 2 if world_size % 2 == 0 else None
    return [
        {"stage": 0},
        {"stage": 1, "bucket_mib": 1e-4},
        {"stage": 2, "shard_size": shard_size},
        {"stage": 3, "units": ("Linear",)},
    ]


def _save_all(root: Path) -> dict[int, dict[str, Any]]:
    world_size, found = dist.get_world_size(), {}
    for config in _configs(world_size):
        model = _Net(seed=1)
        optimizer = _optimizer(model, **config)
        average = zero_shard.ExponentialMovingAverage(optimizer, decay=0.9)
        torch.manual_seed(dist.get_rank())  # dropout differs between ranks, not between stages
        for _ in range(3):
            _train(model, optimizer, 1)
            average.update()
        zero_shard.save(root / f"{world_size}-{config['stage']}", model, optimizer, average=average)
        found[config["stage"]] = {**_full(model, optimizer), "average": average.full_state_dict()}
    return found


def _load_all(root: Path, saved: dict[int, dict[int, dict[str, Any]]]) -> None:
    """Into optimizers that have been used already; and training goes on alike at equal world size."""
    world_size, after = dist.get_world_size(), []
    for config in _configs(world_size):
        model = _Net(seed=2)
        optimizer = _optimizer(model, **config)
        average = zero_shard.ExponentialMovingAverage(optimizer, decay=0.9)
        for other, stage in itertools.product(saved, range(4)):
            zero_shard.load(root / f"{other}-{stage}", model, optimizer, average=average)
            got = {**_full(model, optimizer), "average": average.full_state_dict()}
            if dist.get_rank() == 0:
                _assert_same(got, saved[other][stage], f"stage {stage} on {other} to {config} on {world_size}")
            assert model.extra == {"seed": 1}
        if config.get("shard_size", world_size) in (None, world_size):  # replicas of shards sum in another order
            zero_shard.load(root / f"{world_size}-3", model, optimizer)
            _train(model, optimizer)
            after.append(_full(model, optimizer))
    for each in after[1:]:
        _assert_same(each, after[0], "going on, with dropout")


def test_every_stage_and_world_size_loads_into_every_other(tmp_path: Path) -> None:
    saved = {world_size: ranks.run(world_size, _save_all, tmp_path)[0] for world_size in (1, 2, 3, 4)}
    for world_size, of_stages in saved.items():
        for stage in (0, 1, 3) if world_size == 4 else range(4):  # replicas of shards sum in another order
            _assert_same(of_stages[stage], of_stages[0], f"stage {stage} on {world_size}")
    for world_size in (1, 2, 3, 4):
        ranks.run(world_size, _load_all, tmp_path, saved)


# ---- precision -------------------------------------------------------------------------------------------------------

_PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "fp16": (torch.float16, {}),
    "cast to bf16": (torch.float32, {"param_dtype": "bfloat16"}),
    "cast to fp16": (torch.float32, {"param_dtype": "float16"}),
    "fp64": (torch.float64, {}),
    "bf16 moments": (torch.float32, {"state_dtype": "bfloat16"}),
    "int8 moments": (torch.float32, {"state_dtype": "int8"}),
    "no master": (torch.bfloat16, {"master": "none"}),
}


def _wide(kind: str, stage: int, seed: int) -> tuple[nn.Module, zero_shard.AdamW]:
    dtype, config = _PRECISIONS[kind]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(80, 70), nn.Tanh(), nn.Linear(70, 9)).to(dtype)
    return model, zero_shard.AdamW(model.parameters(), lr=1e-3, module=model, config={"stage": stage, **config})


def _through(root: Path, *kinds: str) -> list[dict[str, Any]]:
    """Train the first, then load each from what the one before saved; return the full state of each, on rank 0."""
    found: list[dict[str, Any]] = []
    for number, kind in enumerate(kinds):
        model, optimizer = _wide(kind, (number + 3) % 4, seed=number)
        if number == 0:
            for step in range(3):
                x = torch.linspace(-1, 1 + step, 320).view(4, 80).to(model[0].weight.dtype)
                model(x).float().pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            zero_shard.load(root / f"{kinds[0]}-{number - 1}", model, optimizer)
        zero_shard.save(root / f"{kinds[0]}-{number}", model, optimizer)
        found.append(_full(model, optimizer))
    return found


def _check_precisions(root: Path) -> None:
    chains = [
        ["fp32", "bf16", "fp16", "cast to bf16", "cast to fp16", "fp64", "fp32"],
        ["bf16", "fp32", "cast to bf16", "bf16"],
        ["fp16", "bf16", "fp32", "fp16"],
        ["bf16 moments", "fp32", "bf16 moments"],
        ["int8 moments", "fp32", "int8 moments"],
        ["no master", "bf16", "fp32", "no master"],
    ]
    for chain in chains:
        first, *_, last = states = _through(root, *chain)
        _assert_same(last, first, chain)
        masters = [state["weights"] for state in states if state["weights"] and "fp32" in chain]
        master = next((each for each in masters if each["0.weight"].dtype == torch.float32), {})
        for kind, state in zip(chain, states, strict=True):
            for name, values in master.items():
                weight = state["weights"][name]
                is_split = weight.dtype == torch.bfloat16
                want = split_remainder(values)[0] if is_split else values.to(weight.dtype)
                _assert_same(weight, want, (chain, kind, name))
    exact, rounded = _through(root, "fp32", "bf16 moments")
    _, coded = _through(root, "fp32", "int8 moments")
    if dist.get_rank() == 0:
        _assert_same(rounded["weights"], exact["weights"], "bf16 moments")
        _assert_same(coded["weights"], exact["weights"], "int8 moments")
        for number, entry in exact["optim"]["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                got = rounded["optim"]["state"][number][key]
                _assert_same(got.float(), entry[key].bfloat16().float(), (number, key))
                off = (coded["optim"]["state"][number][key] - entry[key]).abs().max()
                assert off <= entry[key].abs().max() * (0.02 if entry[key].numel() >= 4096 else 0), (number, key)
        assert not torch.equal(coded["optim"]["state"][0]["exp_avg"], exact["optim"]["state"][0]["exp_avg"])


def test_masters_and_moments_survive_every_change_of_precision(tmp_path: Path) -> None:
    ranks.run(2, _check_precisions, tmp_path)


# ---- ways to build, and what else is saved ---------------------------------------------------------------------------


def _bare(model: nn.Module) -> nn.Module:
    return model


def _checkpointed(model: nn.Module) -> nn.Module:
    model.third = checkpoint_wrapper(model.third)
    return model


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def _parallel(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _check_wrappers(root: Path) -> None:
    warnings.filterwarnings("ignore", message="(?s).*DistributedDataParallel")
    wrappers: list[Callable[[nn.Module], nn.Module]] = [_bare, _checkpointed, _compiled, _parallel]
    want: Any = None
    for number, wrap in enumerate(wrappers):
        model = wrap(_Net(seed=1))
        optimizer = _optimizer(model, stage=3 - number)
        if number == 0:
            _train(model, optimizer)
            want = _full(model, optimizer)
        else:
            zero_shard.load(root / f"wrapped-{number - 1}", model, optimizer)
        got = _full(model, optimizer)
        _assert_same(list(got["weights"].values()), list(want["weights"].values()), wrap)
        _assert_same(got["optim"], want["optim"], wrap)
        zero_shard.save(root / f"wrapped-{number}", model, optimizer)
    with torch.device("meta"):
        model = _Net(seed=2)
    optimizer = _optimizer(model, stage=3)
    zero_shard.load(root / "wrapped-0", model, optimizer)
    _assert_same(_full(model, optimizer), want, "from meta")
    model = _Net(seed=2)
    optimizer = _optimizer(model, stage=3)
    zero_shard.load(root / "wrapped-0", model)  # weights only
    _assert_same(zero_shard.full_state_dict(model), want["weights"], "weights only")
    assert not optimizer.state
    plain = _Net(seed=2)
    zero_shard.load(root / "wrapped-0", plain)
    if dist.get_rank() == 0:
        _assert_same({**plain.state_dict()}, {**want["weights"], "_extra_state": plain.extra}, "into a plain module")


def _check_frozen(root: Path) -> None:
    """Case O16, and freezing between."""
    model = _Net(seed=1)
    optimizer = _optimizer(model, stage=2)
    _train(model, optimizer)
    zero_shard.save(root / "frozen", model, optimizer)
    want = _full(model, optimizer)
    for stage in range(4):
        model = _Net(seed=2)
        optimizer = _optimizer(model, stage=stage)
        zero_shard.load(root / "frozen", model, optimizer)
        _assert_same(_full(model, optimizer), want, stage)
        assert not any(param in optimizer.state for param in model.frozen.parameters())
        model.frozen.requires_grad_(True)
        (model(torch.ones(8, 7)).sum() + model.frozen(torch.ones(2, 3)).sum()).backward()
        optimizer.step()
        steps = [float(optimizer.state[param]["step"]) for param in (model.scalar, *model.frozen.parameters())]
        assert steps == [3, 1, 1]


def _check_added_group(root: Path) -> None:
    """Case O20."""

    def build(seed: int, stage: int) -> tuple[nn.Module, zero_shard.AdamW, list[nn.Parameter]]:
        model = _Net(seed)
        params = list(model.parameters())
        groups = [{"params": params[:3]}, {"params": [], "lr": 0.5}]
        return model, zero_shard.AdamW(groups, lr=torch.tensor(0.1), module=model, config={"stage": stage}), params

    model, optimizer, params = build(1, 2)
    _train(model, optimizer, 1)
    optimizer.add_param_group({"params": params[3:], "lr": 0.2})
    _train(model, optimizer, 1)
    zero_shard.save(root / "added", model, optimizer)
    want = _full(model, optimizer)
    for stage in range(4):
        model, optimizer, params = build(2, stage)
        with pytest.raises((ValueError, RuntimeError), match="the same groups in the same order"):
            zero_shard.load(root / "added", model, optimizer)
        optimizer.add_param_group({"params": params[3:], "lr": 0.1})
        zero_shard.load(root / "added", model, optimizer)
        _assert_same(_full(model, optimizer), want, stage)
        assert isinstance(optimizer.param_groups[0]["lr"], Tensor)


def _check_two_optimizers(root: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, list[zero_shard.AdamW]]:
        model = _Net(seed)
        params = list(model.parameters())
        halves = (params[:4], params[4:])
        return model, [zero_shard.AdamW(half, lr=0.1, module=model, config={"stage": 2}) for half in halves]

    model, pair = build(1)
    model(torch.ones(8, 7)).sum().backward()
    for optimizer in pair:
        optimizer.step()
    for number, optimizer in enumerate(pair):
        zero_shard.save(root / f"half-{number}", model, optimizer)
    with pytest.raises((TypeError, RuntimeError), match=r"other: .* part of this optimizer"):
        zero_shard.save(root / "both", model, pair[0], other=pair[1])
    want = [zero_shard.full_state_dict(model), *(each.full_state_dict() for each in pair)]
    model, pair = build(2)
    for number, optimizer in enumerate(pair):
        zero_shard.load(root / f"half-{number}", model, optimizer)
    _assert_same([zero_shard.full_state_dict(model), *(each.full_state_dict() for each in pair)], want, "halves")


def _check_extra_states(root: Path) -> None:
    for extra in ({"a": 1}, torch.arange(4), torch.tensor(2.0), 3, None):
        model = _Net(seed=1)
        model.extra = extra
        optimizer = _optimizer(model, stage=3)
        zero_shard.save(root / "extra", model, optimizer)
        model.extra = torch.zeros(7)
        zero_shard.load(root / "extra", model, optimizer)
        _assert_same(model.extra, extra, extra)
    for source, target in ((nn.Linear, _Linear), (_Linear, nn.Linear)):
        model = source(3, 3)
        zero_shard.save(root / "extra", model, zero_shard.AdamW(model.parameters(), module=model))
        with pytest.raises(ValueError, match=r"model\._extra_state"):
            zero_shard.load(root / "extra", target(3, 3))


class _Linear(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        assert state == 1


_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 1),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "linear": lr_scheduler.LinearLR,
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lr_scheduler.PolynomialLR,
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, cycle_momentum=False),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "swa": lambda o: swa_utils.SWALR(o, 0.05),
}


def _check_schedulers(root: Path) -> None:
    warnings.simplefilter("ignore")  # of sequential schedulers, about their own way to call step

    def build(kind: str) -> tuple[nn.Module, zero_shard.AdamW, Any, torch.amp.GradScaler]:
        model = nn.Linear(2, 2)
        optimizer = zero_shard.AdamW(model.parameters(), lr=0.1, module=model, config={"stage": 1})
        return model, optimizer, _SCHEDULERS[kind](optimizer), torch.amp.GradScaler("cpu", init_scale=64.0)

    def rates(optimizer: zero_shard.AdamW, scheduler: Any) -> list[float]:
        found = []
        for _ in range(3):
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    for kind in _SCHEDULERS:
        model, optimizer, scheduler, scaler = build(kind)
        rates(optimizer, scheduler)
        scaler.scale(torch.ones(1))
        scaler.update(32.0)
        zero_shard.save(root / "scheduled", model, optimizer, scheduler=scheduler, scaler=scaler)
        want = rates(optimizer, scheduler)
        model, optimizer, scheduler, scaler = build(kind)
        zero_shard.load(root / "scheduled", model, optimizer, scheduler=scheduler, scaler=scaler)
        assert rates(optimizer, scheduler) == want, kind
        assert scaler.get_scale() == 32, kind


def _check_kinds(root: Path) -> None:
    for check in (
        _check_wrappers,
        _check_frozen,
        _check_added_group,
        _check_two_optimizers,
        _check_extra_states,
    ):
        check(root)


def test_all_ways_to_build_a_model_and_its_optimizer(tmp_path: Path) -> None:
    ranks.run(2, _check_kinds, tmp_path)


def test_schedulers_and_the_scaler_go_on(tmp_path: Path) -> None:
    ranks.run(1, _check_schedulers, tmp_path)
