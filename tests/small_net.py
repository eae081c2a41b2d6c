"""A small network, its optimizer, and a step of both kinds: what the tests of an optimizer in use share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from oracle import TOLERANCE, Tolerance, mean_over_ranks
from torch import Tensor, nn

import zero_shard

F64 = torch.float64


def net(dtype: torch.dtype = F64) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(4, 5, dtype=F64, generator=torch.Generator().manual_seed(31 * rank + step))
    return model(x.to(dtype_of(model))).square().mean()


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def build(model: nn.Module, stage: int, config: dict[str, Any] | None = None, **hyper: Any) -> zero_shard.AdamW:
    config = {"stage": stage, "bucket_mib": 1e-4, **(config or {})}
    return zero_shard.AdamW(model.parameters(), module=model, config=config, **{"lr": 0.01, **hyper})


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, dist.get_rank(), step).backward()
    optimizer.step()


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, world_size: int) -> None:
    mean_over_ranks(model.parameters(), [[lambda r=r: loss_of(model, r, step)] for r in range(world_size)])
    optimizer.step()


def per_step(steps: int, dtype: torch.dtype = F64) -> Tolerance:
    return Tolerance(TOLERANCE[dtype].rtol * steps, TOLERANCE[dtype].atol * steps)
