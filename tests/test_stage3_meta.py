"""Models that are built on the meta device, at every stage: the numbers of a real build, without holding the whole."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from live_tensors import Live
from oracle import assert_ranks_agree
from torch import nn

import zero_shard


def _parts(device: str) -> nn.Module:
    with torch.device(device):
        return nn.Sequential(
            nn.Embedding(300, 64),
            nn.Linear(64, 256),
            nn.LayerNorm(256),
            nn.Sequential(nn.BatchNorm1d(256), *(nn.Linear(256, 256) for _ in range(8))),
            nn.Linear(256, 7),
        )


def _build_on_meta(config: dict[str, Any], rank_seeds: bool) -> None:
    """Compare a model that was built on the meta device with one that was built on the CPU after the same seed."""
    torch.manual_seed(12)
    real = _parts("cpu")
    total = sum(param.nbytes for param in real.parameters())
    state = {name: tensor.clone() for name, tensor in real.state_dict().items()}
    live, peaks = Live(), [0]
    torch.manual_seed(12 + (rank_seeds and dist.get_rank()))
    model = _parts("meta")
    identities = {name: id(param) for name, param in model.named_parameters()}
    zero_shard.collectives.pending.before_collective = lambda _: peaks.append(live.nbytes())
    try:
        optimizer = zero_shard.AdamW(model.parameters(), module=model, config=config)
    finally:
        zero_shard.collectives.pending.before_collective = None
    assert {name: id(param) for name, param in model.named_parameters()} == identities
    with zero_shard.gathered(model):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, state[name]), f"{config}: {name} differs from that of a real build"
    model(torch.arange(6)).sum().backward()
    optimizer.step()
    assert_ranks_agree(model)
    if config["stage"] == 3 and dist.get_world_size() == 4:
        unit_nbytes = 256 * 257 * 4
        limit = total / 4 + 2 * unit_nbytes + 50_000  # own shards, and a unit before and after it moved into its bucket
        assert limit < total, "the limit says something"
        assert 0 < max(peaks) <= limit, f"held {max(peaks)} of {total} bytes while building, limit {limit:.0f}"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_meta_build_equals_a_real_build_and_never_holds_the_whole(world_size: int) -> None:
    for stage in range(4):
        ranks.run(world_size, _build_on_meta, {"stage": stage}, False)
    ranks.run(world_size, _build_on_meta, {"stage": 3, "units": ["Linear", "Embedding"]}, world_size > 1)


class _NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3, device="meta"))


def _build_without_reset(stage: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3, device="meta"), _NoReset())
    zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage})


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_meta_parameters_that_nothing_initialises_are_refused_by_name(stage: int) -> None:
    for error in ranks.run_expecting_errors(2, _build_without_reset, stage):
        assert isinstance(error, ValueError), repr(error)
        assert "_NoReset" in str(error) and "gain" in str(error) and "reset_parameters" in str(error), str(error)
