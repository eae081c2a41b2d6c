"""A small stack of layers with parameters on both sides of what 8-bit moments take, and how it is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zero_shard

HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


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
