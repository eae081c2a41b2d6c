"""Evaluation before, between and inside steps changes nothing, is right, and leaves nothing behind."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from live_tensors import storages
from oracle import (
    EXACT,
    Snapshot,
    assert_ranks_agree,
    assert_snapshots_close,
    mean_over_ranks,
    sharded_snapshot,
)
from torch import Tensor, nn

import zero_shard


def _net() -> nn.Module:
    torch.manual_seed(5)
    parts = [nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)]
    return nn.Sequential(*parts).to(torch.float64)


def _input(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))


def _live_nbytes() -> int:
    return sum(storage.nbytes() for storage in storages().values())


def _assert_at_most(nbytes: int, outputs: list[Tensor], step: int) -> None:
    """Gloo's thread holds what was sent for a moment after the send has ended; what stays is held by us."""
    give_up_s = time.monotonic() + 5
    while (held := _live_nbytes() - sum(output.untyped_storage().nbytes() for output in outputs)) > nbytes:
        assert time.monotonic() < give_up_s, f"step {step}: an evaluation left {held - nbytes} bytes"
        time.sleep(0.01)


def _evaluate(model: nn.Module, is_inference: bool, evaluations: list[Tensor]) -> None:
    with torch.inference_mode() if is_inference else torch.no_grad():
        evaluations.append(model(_input(0, 99)).clone())


def _round_trip(model: nn.Module, optimizer: zero_shard.AdamW) -> None:
    with torch.inference_mode():
        with zero_shard.gathered(model, modify=True):
            model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())


def _train_with_evaluations(stage: int, variant: str, config: dict[str, Any]) -> tuple[Snapshot, list[Tensor]]:
    """Take 5 steps; ``variant`` says what happens between them. Returns the evaluations made, in order."""
    rank, evaluations = dist.get_rank(), list[Tensor]()
    model = _net()
    config = {"stage": stage, **config}
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.05, module=model, config=config)
    if variant == "first":
        _evaluate(model, True, evaluations)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(_input(rank, step)).square().mean()
        if variant == "inside":
            _evaluate(model, False, evaluations)
        loss.backward()
        optimizer.step()
        del loss
        if variant == "between":
            before = _live_nbytes()
            model.eval()
            outputs: list[Tensor] = []
            for is_inference in (False, True):
                _evaluate(model, is_inference, outputs)
                _assert_at_most(before, outputs, step)
            model.train()
            assert torch.equal(*outputs)
            evaluations.append(torch.from_numpy(outputs[0].numpy().copy()))
            del outputs
        if variant == "state dicts":
            _round_trip(model, optimizer)
    assert_ranks_agree(model)
    return sharded_snapshot(model, optimizer), [torch.from_numpy(value.numpy().copy()) for value in evaluations]


def _evaluation_oracle(world_size: int) -> list[Tensor]:
    """Return what the plain model says before the first and after each step."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    outputs = [model(_input(0, 99)).detach()]
    for step in range(5):
        losses = [
            [lambda rank=rank, step=step: model(_input(rank, step)).square().mean()] for rank in range(world_size)
        ]
        mean_over_ranks(model.parameters(), losses)
        optimizer.step()
        outputs.append(model(_input(0, 99)).detach())
    return outputs


_EVALUATION_CONFIGS = [(stage, {}) for stage in (0, 1, 2)] + [(3, {}), (3, {"reshard_after_forward": False})]


@pytest.mark.parametrize(("stage", "config"), _EVALUATION_CONFIGS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_between_steps_changes_nothing(world_size: int, stage: int, config: dict[str, Any]) -> None:
    """Evaluation before or between steps crashed, used the weights of a step ago, or left gathered weights behind.

    Source: pytorch/pytorch issues #113203 and #95957.
    """
    undisturbed, _ = ranks.run(world_size, _train_with_evaluations, stage, "none", config)[0]
    plain = _evaluation_oracle(world_size)
    expected = {"first": plain[:1], "between": plain[1:], "inside": plain[:5], "state dicts": []}
    for variant, outputs in expected.items():
        snapshot, evaluations = ranks.run(world_size, _train_with_evaluations, stage, variant, config)[0]
        assert_snapshots_close(snapshot, undisturbed, EXACT, f"stage {stage}, evaluation {variant}")
        for got, want in zip(evaluations, outputs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
