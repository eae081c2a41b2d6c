"""Features that meet: each of these gave wrong numbers at some stage."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import ranks
import torch
from oracle import assert_snapshots_close, plain_snapshot, sharded_snapshot
from scripts import Job, loss_of, net
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zero_shard

DECAY = 0.5


def _compare(script: Any, stage: int, where: str = "") -> None:
    """Run a script (job -> model, optimizer) on this rank and with plain AdamW, and compare weights and moments."""
    got = sharded_snapshot(*script(Job(stage)))
    if got:
        want = plain_snapshot(*script(Job(None)))
        assert_snapshots_close(got, want, where=f"stage {stage} {where}", num_steps=100)


def _scaled_and_clipped(stage: int, config: dict[str, Any]) -> None:
    model = net().float()
    optimizer = zero_shard.AdamW(
        model.parameters(), module=model, config={"stage": stage, "param_dtype": "float16", **config}
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        x, y = Job(stage).batch(step)
        scaler.scale(nn.functional.mse_loss(model(x.float()).float(), y.float())).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), norm, rtol=1e-5, atol=0)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(("stage", "config"), [(0, {}), (2, {}), (2, {"shard_size": 1})])
def test_the_norm_of_unscaled_float16_gradients(stage: int, config: dict[str, Any]) -> None:
    ranks.run(2, _scaled_and_clipped, stage, config)


def _unfrozen(job: Job) -> Any:
    model = net()
    model[0].requires_grad_(False)
    optimizer = job.adamw(model.parameters(), model, lr=0.05)
    for step in range(5):
        model[0].requires_grad_(step >= 2)
        optimizer.zero_grad()
        loss_of(model, job.batch(step)).backward()
        loss_of(model, job.batch(step + 50)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("stage", range(4))
def test_unfrozen_gradients_are_averaged_from_the_first_one_on(stage: int) -> None:
    ranks.run(2, _compare, _unfrozen, stage)
