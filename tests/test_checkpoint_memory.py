"""Saving and loading raise resident memory by no more than a parameter and 8 MiB; a full state dict does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from torch import nn

import zero_shard

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))  # as when a benchmark is run

from checkpoint_bench.memory import peak_above_nbytes

_WIDTH, _NUM_LAYERS = 1024, 6
_LIMIT_NBYTES = _WIDTH * _WIDTH * 4 + (8 << 20)
_KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32, stage 3": (torch.float32, {"stage": 3}),
    "bf16, stage 2": (torch.bfloat16, {"stage": 2}),
    "cast to bf16, stage 3": (torch.float32, {"stage": 3, "param_dtype": "bfloat16"}),
    "8-bit moments, stage 1": (torch.float32, {"stage": 1, "state_dtype": "int8"}),
}


def _build(kind: str) -> tuple[nn.Module, zero_shard.AdamW]:
    """A model that has been trained for a step, so that its optimizer state is there."""
    dtype, config = _KINDS[kind]
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NUM_LAYERS))).to(dtype)
    model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())  # not row-major
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config=config)
    model(torch.ones(1, _WIDTH, dtype=dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _peaks(root: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    small = nn.Linear(3, 3)
    small_optimizer = zero_shard.AdamW(small.parameters(), module=small)
    for _ in range(2):  # what is imported and compiled at the first use is not measured
        zero_shard.save(root / "small", small, small_optimizer)
        zero_shard.load(root / "small", small, small_optimizer)
    before = None
    for kind in _KINDS:
        model, optimizer = _build(kind)
        found[f"save {kind}"] = peak_above_nbytes(lambda: zero_shard.save(root / kind, model, optimizer))  # noqa: B023
        for source in (before,) if before else (kind,):
            found[f"load {source} into {kind}"] = peak_above_nbytes(
                lambda: zero_shard.load(root / source, model, optimizer)  # noqa: B023
            )
        before = kind

    def control() -> None:
        torch.save((zero_shard.full_state_dict(model), optimizer.full_state_dict()), root / f"{dist.get_rank()}.pt")

    found["control"] = peak_above_nbytes(control)
    return found


def test_peak_of_saving_and_loading(tmp_path: Path) -> None:
    of_ranks = ranks.run(2, _peaks, tmp_path, fresh=True)
    assert of_ranks[0].pop("control") > _LIMIT_NBYTES, "the limit says nothing"
    of_ranks[1].pop("control")
    for rank, found in enumerate(of_ranks):
        for what, nbytes in found.items():
            assert nbytes <= _LIMIT_NBYTES, f"rank {rank}, {what}: {nbytes / 2**20:.1f} MiB"
