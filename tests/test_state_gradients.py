"""Gradients as people use them: clipped, skipped, assigned by hand, read whole, kept from being averaged."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import (
    assert_ranks_agree,
    assert_snapshots_close,
    fingerprint,
    full_grad,
    mean_over_ranks,
    plain_snapshot,
    sharded_snapshot,
)
from small_net import F64, build, loss_of, net, per_step, train_step
from torch import Tensor, nn

import zero_shard

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])


# --- clipping ---


class _Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.Linear(4, 1, bias=False), nn.Linear(1, 1, bias=False), nn.Linear(2, 1, bias=False)]
        )
        self.to(F64)
        for part in self.parts:
            nn.init.ones_(part.weight)

    def forward(self, scale: float) -> Tensor:
        gradients = ([3.0, 0, 0, 0], [4.0], [12.0, 0])
        return sum(  # type: ignore[return-value]
            scale * part(torch.tensor(gradient, dtype=F64)).sum()
            for part, gradient in zip(self.parts, gradients, strict=True)
        )


def _clip_to(stage: int, limit: float, how: str) -> list[float]:
    """Return the norm that the clip returns, and the first moments of the three parameters after a step, on rank 0."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = _Three()
    optimizer = build(model, stage, {"max_grad_norm": limit} if how == "config" else {})
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
    model = net()
    optimizer = build(model, stage, {"skip_nonfinite": True, **config})
    train_step(model, optimizer, 0)
    before, state = fingerprint(model), copy.deepcopy(optimizer.state_dict()["state"])
    for bad in (math.nan, math.inf):
        optimizer.zero_grad()
        (loss_of(model, dist.get_rank(), 1) * (bad if dist.get_rank() == 1 else 1.0)).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert [str(each.message)[:25] for each in caught] == ["zero_shard skipped a step"]
        assert fingerprint(model) == before
        for number, entry in optimizer.state_dict()["state"].items():
            for key, value in entry.items():
                assert torch.equal(value, state[number][key]), f"{key} of parameter {number} changed"
    train_step(model, optimizer, 2)
    assert fingerprint(model) != before
    assert_ranks_agree(model)


@every_stage
@pytest.mark.parametrize("config", [{}, {"max_grad_norm": 1.0}], ids=str)
def test_a_step_that_one_rank_can_not_take_is_skipped_by_all(stage: int, config: dict[str, Any]) -> None:
    ranks.run(2, _skip, stage, config)


# --- gradients by hand ---


def _assign_gradients(stage: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain_model = net(), net()
    optimizer, plain = build(model, stage), torch.optim.AdamW(plain_model.parameters(), lr=0.01)

    def local(r: int, number: int, shape: torch.Size) -> Tensor:
        return torch.full(tuple(shape), (r + 1.0) * (number + 1), dtype=F64)

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
        assert_snapshots_close(snapshot, plain_snapshot(plain_model, plain), per_step(6), f"stage {stage}")
    assert_ranks_agree(model)


@every_stage
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gradient_assigned_by_hand_is_averaged(world_size: int, stage: int) -> None:
    ranks.run(world_size, _assign_gradients, stage)


def _full_gradients(stage: int, under_no_sync: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain_model = net(), net()
    optimizer = build(model, stage)
    if under_no_sync:
        with optimizer.no_sync():
            loss_of(model, rank, 7).backward()
    loss_of(model, rank, 3).backward()
    micros = (7, 3) if under_no_sync else (3,)
    mean_over_ranks(
        plain_model.parameters(),
        [[lambda r=r, m=m: loss_of(plain_model, r, m) for m in micros] for r in range(world_size)],
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
        assert_snapshots_close(snapshot, plain_snapshot(plain_model, plain), per_step(2), f"stage {stage}")


@every_stage
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("under_no_sync", [False, True])
def test_full_gives_the_mean_gradient(world_size: int, stage: int, under_no_sync: bool) -> None:
    ranks.run(world_size, _full_gradients, stage, under_no_sync)


def _no_sync(stage: int) -> None:
    """All backwards under no_sync, the step after it; gradients kept over a step; nothing sent inside."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain_model = net(), net()
    optimizer, plain = build(model, stage), torch.optim.AdamW(plain_model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        labels: list[str] = []
        zero_shard.collectives.pending.before_collective = labels.append
        with optimizer.no_sync():
            loss_of(model, rank, step).backward()
            loss_of(model, rank, step + 40).backward()
        zero_shard.collectives.pending.before_collective = None
        assert not [label for label in labels if "gradient" in label], labels
        optimizer.step()
        losses = [[lambda r=r, s=s: loss_of(plain_model, r, s) for s in (step, step + 40)] for r in range(world_size)]
        mean_over_ranks(plain_model.parameters(), losses)
        plain.step()
        snapshot = sharded_snapshot(model, optimizer)
        if rank == 0:
            want = plain_snapshot(plain_model, plain)
            assert_snapshots_close(snapshot, want, per_step(2 * step + 2), f"stage {stage}, step {step}")


@every_stage
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_sync_around_every_backward(world_size: int, stage: int) -> None:
    ranks.run(world_size, _no_sync, stage)
