"""Faults that people reported in other sharded optimizers: ranks that disagree, unusual use of modules, configuration.

Each test states the fault and where it was reported; every one runs at every stage that it concerns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from models import Cells, OneModule, Scale, linear_use
from oracle import (
    REPORTED,
    Snapshot,
    assert_ranks_agree,
    assert_snapshots_close,
    full_grad,
    mean_over_ranks,
    plain_snapshot,
    sharded_snapshot,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_shard

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
every_world = pytest.mark.parametrize("world_size", [1, 2, 3, 4])

# --- unused parameters ---


def _partly_used(model: nn.Module, rank: int, step: int, is_swapping: bool) -> Tensor:
    """Rank 0's loss is used + 4 some, rank 1's 3 used; ``extra`` is used nowhere. Further ranks repeat the two."""
    role = (rank + step * is_swapping) % 2
    factors = {0: 1.0, 1: 4.0} if role == 0 else {0: 3.0}
    return model({index: linear_use(torch.tensor([factor])) for index, factor in factors.items()})


def _three_weights(is_one_module: bool) -> nn.Module:
    values = [torch.ones(1, dtype=torch.float64) for _ in range(3)]
    return OneModule(values) if is_one_module else Cells(values)


def _train_partly_used(stage: int, is_one_module: bool, is_swapping: bool, config: dict[str, Any]) -> list[Snapshot]:
    model = _three_weights(is_one_module)
    config = {"stage": stage, **config}
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, module=model, config=config)
    snapshots = []
    for step in range(3):
        optimizer.zero_grad()
        _partly_used(model, dist.get_rank(), step, is_swapping).backward()
        optimizer.step()
        assert_ranks_agree(model, f"step {step}")
        snapshots.append(sharded_snapshot(model, optimizer))
    return snapshots


@every_stage
@every_world
@pytest.mark.parametrize("is_swapping", [False, True], ids=["same roles", "swapped roles"])
@pytest.mark.parametrize("is_one_module", [False, True], ids=["three modules", "one module"])
def test_parameter_used_nowhere_or_on_one_rank(
    world_size: int, stage: int, is_swapping: bool, is_one_module: bool
) -> None:
    """An unused parameter made the ranks hang; a gradient of one rank was divided by one; an unused weight decayed.

    Source: deepspeedai/DeepSpeed issue #777 and PR #945.
    """
    config = {"bucket_mib": 1e-5} if is_swapping else {}
    got = ranks.run(world_size, _train_partly_used, stage, is_one_module, is_swapping, config)[0]
    model = _three_weights(is_one_module)
    plain = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        losses = [
            [lambda rank=rank, step=step: _partly_used(model, rank, step, is_swapping)] for rank in range(world_size)
        ]
        mean_over_ranks(model.parameters(), losses)
        plain.step()
        assert_snapshots_close(got[step], plain_snapshot(model, plain), REPORTED, f"step {step}")
    used, some, extra = got[0].values()
    if world_size == 2:
        for entry in (used, some):
            torch.testing.assert_close(entry["param"].item(), 0.8900000005, rtol=0, atol=1e-10)
            torch.testing.assert_close(entry["exp_avg"].item(), 0.2, rtol=1e-12, atol=0)
    assert extra["param"].item() == 1.0
    assert list(extra) == ["param"], f"a parameter that nobody used has state: {list(extra)}"


# --- a path that depends on the data ---


class _Chain(nn.Module):
    """y = c(b(...b(a(x)))), b applied a given number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Scale(1.0), Scale(2.0), Scale(3.0)])

    def forward(self, x: Tensor, num_b: int) -> Tensor:
        y = self.parts[0](x)
        for _ in range(num_b):
            y = self.parts[1](y)
        return self.parts[2](y).sum()


_B_NAME = "parts.1.weight"


def _train_chain(stage: int, plans: list[list[int]], config: dict[str, Any]) -> list[Snapshot]:
    """Train with ``plans[step][rank]`` uses of b."""
    rank = dist.get_rank()
    model = _Chain()
    config = {"stage": stage, **config}
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, module=model, config=config)
    snapshots = []
    for step, plan in enumerate(plans):
        optimizer.zero_grad()
        model(torch.tensor(rank + 1.0, dtype=torch.float64), plan[rank]).backward()
        optimizer.step()
        assert_ranks_agree(model, f"step {step}")
        snapshots.append(sharded_snapshot(model, optimizer))
    return snapshots


def _chain_oracle(plans: list[list[int]]) -> list[Snapshot]:
    model = _Chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    snapshots = []
    for plan in plans:
        inputs = [torch.tensor(rank + 1.0, dtype=torch.float64) for rank in range(len(plan))]
        losses = [[lambda x=x, num_b=num_b: model(x, num_b)] for x, num_b in zip(inputs, plan, strict=True)]
        mean_over_ranks(model.parameters(), losses)
        optimizer.step()
        snapshots.append(plain_snapshot(model, optimizer))
    return snapshots


def _assert_chain(plans: list[list[int]], stage: int, config: dict[str, Any]) -> list[Snapshot]:
    got = ranks.run(len(plans[0]), _train_chain, stage, plans, config)[0]
    for step, (ours, plain) in enumerate(zip(got, _chain_oracle(plans), strict=True)):
        assert_snapshots_close(ours, plain, REPORTED, f"stage {stage}, step {step}")
    return got


_STAGE3_CONFIGS = [{}, {"prefetch": 0}, {"prefetch": 3}, {"reshard_after_forward": False}]
_CONFIGS = [(stage, {}) for stage in (0, 1, 2)] + [(3, config) for config in _STAGE3_CONFIGS]
_every_path_config = pytest.mark.parametrize(("stage", "config"), _CONFIGS, ids=str)


@_every_path_config
@every_world
def test_module_left_out_by_all_ranks_after_a_step_with_it(world_size: int, stage: int, config: dict[str, Any]) -> None:
    """Prefetching in the order of the step before left parameters in flight when all ranks took another path.

    Source: deepspeedai/DeepSpeed issues #5828 and #7998.
    """
    _assert_chain([[num_b] * world_size for num_b in (1, 0, 2, 0, 1)], stage, config)


def _assert_values_or_refusal(plans: list[list[int]], stage: int, config: dict[str, Any]) -> list[Snapshot] | None:
    """Check that the run gives the oracle's values, or that every rank raises with b's name (allowed at stage 3)."""
    world_size = len(plans[0])
    errors = ranks.run_expecting_errors(world_size, _train_chain, stage, plans, config)
    if errors == [None] * world_size:
        return _assert_chain(plans, stage, config)
    assert stage == 3, f"stage {stage} needs no agreement about paths: {errors}"
    for rank, error in enumerate(errors):
        assert error is not None, f"rank {rank} went on while another raised: {errors}"
        assert "parts.1" in str(error), f"rank {rank} doesn't name the module: {error!r}"
    return None


@_every_path_config
def test_module_left_out_by_one_rank(stage: int, config: dict[str, Any]) -> None:
    """The rank that used the module waited for ever for the one that did not.

    Source: deepspeedai/DeepSpeed issues #5828 and #7998.
    """
    got = _assert_values_or_refusal([[1, 1], [0, 1], [0, 0]], stage, config)
    if got is not None:
        weights = [[entry["param"].item() for entry in snapshot.values()] for snapshot in got]
        expected = [
            [0.9, 1.9, 2.9],
            [0.8014681229, 1.8046965059, 2.8021371707],
            [0.7078757249, 1.8046965059, 2.7104320756],
        ]
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(expected), rtol=1e-7, atol=1e-7)
        assert [entry["step"].item() for entry in got[2].values()] == [3, 2, 3]


@_every_path_config
def test_module_called_more_often_on_one_rank(stage: int, config: dict[str, Any]) -> None:
    """The same with a different number of calls of one module.

    Source: deepspeedai/DeepSpeed issue #7998.
    """
    _assert_values_or_refusal([[1, 3], [1, 3], [1, 1]], stage, config)


# --- a module used twice, with activation checkpointing ---


class _Twice(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(3, 3, dtype=torch.float64)
        self.b = nn.Linear(3, 1, dtype=torch.float64)
        self.mode = mode

    def _hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))

    def _branch(self, x: Tensor) -> Tensor:
        if self.mode == "plain":
            return self.b(self._hidden(x)).sum()
        return self.b(checkpoint(self._hidden, x, use_reentrant=self.mode == "reentrant")).sum()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self._branch(x) - self._branch(y)


def _grads_of_twice(stage: int, mode: str, num_micros: int, config: dict[str, Any]) -> dict[str, Tensor]:
    model = _Twice(mode)
    config = {"stage": stage, **config}
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.1, module=model, config=config)
    for _ in range(num_micros):
        x = torch.arange(6, dtype=torch.float64).reshape(2, 3)
        y = (-x / 3).requires_grad_()
        model(x.requires_grad_(), y).backward()
    grads = {name: full_grad(param) for name, param in model.named_parameters()}
    optimizer.step()
    assert_ranks_agree(model)
    return {name: grad.detach().clone() for name, grad in grads.items() if grad is not None}


_UNITS = [{}, {"units": ["Linear"]}, {"units": ["Linear"], "reshard_after_forward": False}]


@pytest.mark.parametrize(
    ("stage", "config"), [(s, {}) for s in (0, 1, 2)] + [(3, config) for config in _UNITS], ids=str
)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mode", ["plain", "reentrant", "non-reentrant"])
def test_module_used_twice_under_activation_checkpointing(
    world_size: int, stage: int, config: dict[str, Any], mode: str
) -> None:
    """The second use met "gradient computed twice", or only one of the two uses reached the gradient.

    Source: deepspeedai/DeepSpeed issue #988; pytorch/pytorch issue #81296.
    """
    plain = _Twice("plain")
    x = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    plain(x, -x / 3).backward()
    for num_micros in (1, 2):
        grads = ranks.run(world_size, _grads_of_twice, stage, mode, num_micros, config)[0]
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], num_micros * param.grad, rtol=1e-12, atol=1e-12)
        reported = torch.tensor([-0.0957989562, -0.3444282928, -0.5930576294], dtype=torch.float64)
        torch.testing.assert_close(grads["a.weight"][0], num_micros * reported, rtol=0, atol=2e-10)


# --- configuration ---


def _build_with(config: Any, hyper: dict[str, Any], stage_on_rank_1: int | None) -> None:
    model = nn.Linear(3, 3)
    if stage_on_rank_1 is not None and dist.get_rank() == 1:
        config = {"stage": stage_on_rank_1}
    zero_shard.AdamW(model.parameters(), module=model, config=config, **hyper)


def _errors_of(config: Any, hyper: dict[str, Any] | None = None, stage_on_rank_1: int | None = None) -> list[str]:
    """Build on 2 ranks and return every rank's error text, after checking its class."""
    errors = ranks.run_expecting_errors(2, _build_with, config, hyper or {}, stage_on_rank_1)
    for rank, error in enumerate(errors):
        assert type(error) in (ValueError, TypeError, FileNotFoundError), f"rank {rank}: {error!r}"
    return [str(error) for error in errors]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bucket_mi": 25}, ["bucket_mi", "25", "bucket_mib"]),
        ({"reshard_after_forwrd": True}, ["reshard_after_forwrd", "True", "reshard_after_forward"]),
        ({"stage": 4}, ["stage", "4"]),
        ({"stage": -1}, ["stage", "-1"]),
        ({"stage": "two"}, ["stage", "two"]),
        ({"stage": 2.5}, ["stage", "2.5"]),
        ({"stage": True}, ["stage", "True"]),
        ({"bucket_mib": -1}, ["bucket_mib", "-1"]),
        ({"bucket_mib": 0}, ["bucket_mib", "0"]),
        ({"bucket_mib": 1e300}, ["bucket_mib", "1e+300"]),
        ({"bucket_mib": float("nan")}, ["bucket_mib", "nan"]),
        ({"param_dtype": "bf61"}, ["param_dtype", "bf61"]),
        ({"reduce_dtype": "bf61"}, ["reduce_dtype", "bf61"]),
        ({"state_dtype": "bf61"}, ["state_dtype", "bf61"]),
        ({"master": "yes"}, ["master", "yes"]),
        ({"stage": 3, "units": ["Liner"]}, ["units", "Liner", "Linear"]),
        ({"prefetch": -1}, ["prefetch", "-1"]),
        ({"kernels": "cuda"}, ["kernels", "cuda"]),
        ({"check": "sometimes"}, ["check", "sometimes"]),
        ({"max_grad_norm": -1.0}, ["max_grad_norm", "-1"]),
        (17, ["config", "17"]),
    ],
    ids=str,
)
def test_impossible_option_is_refused_on_every_rank(config: Any, words: list[str]) -> None:
    """A misspelled option was ignored and the default used.

    Source: deepspeedai/DeepSpeed issue #1809.
    """
    for text in _errors_of(config):
        assert all(word in text for word in words), f"{text!r} lacks one of {words}"


@pytest.mark.parametrize("hyper", [{"lr": -1.0}, {"betas": (1.0, 0.999)}], ids=str)
@every_stage
def test_hyperparameters_are_refused_as_torch_does(hyper: dict[str, Any], stage: int) -> None:
    """The error class and text are those of ``torch.optim.AdamW``.

    Source: deepspeedai/DeepSpeed issue #1809.
    """
    with pytest.raises(ValueError) as plain:
        torch.optim.AdamW([nn.Parameter(torch.ones(1))], **hyper)
    assert _errors_of({"stage": stage}, hyper) == [str(plain.value)] * 2


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml", "ini"])
def test_config_file_that_is_missing_or_broken(suffix: str, tmp_path: Path) -> None:
    """A config file that isn't there, or isn't valid, stops every rank with the file's name.

    Source: deepspeedai/DeepSpeed issue #1809.
    """
    if suffix == "yaml":
        pytest.importorskip("yaml")
    missing, broken = tmp_path / f"missing.{suffix}", tmp_path / f"broken.{suffix}"
    errors = ranks.run_expecting_errors(2, _build_with, str(missing), {}, None)
    assert [type(error) for error in errors] == [FileNotFoundError] * 2
    assert all(missing.name in str(error) for error in errors)
    broken.write_text('stage = [1, "open\n{')
    for text in _errors_of(str(broken)):
        assert broken.name in text


def test_different_stages_are_refused_on_every_rank() -> None:
    """Ranks with different stages exchanged different things; every rank raises and says both values.

    Source: deepspeedai/DeepSpeed issue #1809.
    """
    for first in range(4):
        for second in range(4):
            if first != second:
                for text in _errors_of({"stage": first}, None, second):
                    assert "stage" in text and str(first) in text and str(second) in text, text


# --- ranks that start with different weights ---


def _different_net() -> nn.Module:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).to(torch.float64)
    model[1].running_mean.fill_(rank)
    return model


def _full_tensors(model: nn.Module) -> dict[str, Tensor]:
    with zero_shard.gathered(model):
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _start_and_train(stage: int) -> dict[str, Any]:
    model = _different_net()
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.1, module=model, config={"stage": stage})
    start = _full_tensors(model)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * dist.get_rank() + step))
        model(x).square().sum().backward()
        optimizer.step()
        assert_ranks_agree(model, f"step {step}")
    return {"own": own, "start": start, "end": _full_tensors(model), "saved": zero_shard.full_state_dict(model)}


@every_stage
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_ranks_start_from_rank_0(world_size: int, stage: int) -> None:
    """Every rank kept its own start for the part that it does not own, or got a mix.

    Buffers are rank 0's at the start, differ later (each rank sees its own data), and the saved ones are rank 0's.
    Source: pytorch/pytorch issue #75870.
    """
    results = ranks.run(world_size, _start_and_train, stage)
    first = results[0]
    for rank, result in enumerate(results):
        for name, tensor in result["start"].items():
            assert torch.equal(tensor, first["own"][name]), f"rank {rank} doesn't start with rank 0's {name}"
    assert not torch.equal(results[1]["own"]["0.weight"], first["own"]["0.weight"])
    assert not torch.equal(results[1]["end"]["1.running_mean"], first["end"]["1.running_mean"])
    assert list(first["saved"]) == list(first["end"])
    for name, tensor in first["saved"].items():
        assert torch.equal(tensor, first["end"][name]), name


def _start_unsynchronised(stage: int, differing: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    if differing:
        with torch.no_grad():
            model.state_dict()[differing].add_(dist.get_rank())
    zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage, "sync_module_states": False})


@every_stage
@pytest.mark.parametrize("differing", ["0.bias", "2.weight", "1.running_mean"])
def test_different_starts_are_refused_when_not_synchronised(stage: int, differing: str) -> None:
    """With ``sync_module_states=False`` every rank raises and names the first tensor that differs.

    Source: pytorch/pytorch issue #75870.
    """
    assert ranks.run_expecting_errors(3, _start_unsynchronised, stage, "") == [None] * 3
    for rank, error in enumerate(ranks.run_expecting_errors(3, _start_unsynchronised, stage, differing)):
        assert error is not None and differing in str(error), f"rank {rank}: {error!r}"
