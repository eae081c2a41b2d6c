"""Checkpoints: any stage and world size to any other, bit for bit; refusals that change nothing; nothing leaks."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zero_shard
from zero_shard.checkpoint.rectangles import rectangles

Full = tuple[dict[str, Any], dict[str, Any]]


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(dist.get_rank() + 1 if dist.is_initialized() else 9)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).to(dtype)
    model[2].weight = nn.Parameter(torch.randn(7, 3, dtype=dtype).t())  # dense, not row-major
    model[4].bias.requires_grad_(False)
    return model


def _optimizer(model: nn.Module, stage: int) -> zero_shard.AdamW:
    return zero_shard.AdamW(model.parameters(), lr=0.1, module=model, config={"stage": stage})


def _train(model: nn.Module, optimizer: zero_shard.AdamW, dtype: torch.dtype) -> None:
    rows = torch.arange(4).to(dtype)[:, None]
    for _ in range(2):
        model(torch.ones(4, 5, dtype=dtype) * rows).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _full(model: nn.Module, optimizer: zero_shard.AdamW) -> Full:
    return zero_shard.full_state_dict(model), optimizer.full_state_dict()


def _save(stage: int, path: str, dtype: torch.dtype) -> Full:
    model = _model(dtype)
    optimizer = _optimizer(model, stage)
    _train(model, optimizer, dtype)
    zero_shard.save(path, model, optimizer, epoch=3, order=torch.arange(4))
    return _full(model, optimizer)


def _load_and_go_on(stages: list[int], path: str, dtype: torch.dtype) -> list[tuple[Full, Full]]:
    """Load at each stage; return the state then, and after two more steps."""
    results = []
    for stage in stages:
        model = _model(dtype)
        optimizer = _optimizer(model, stage)
        extra = zero_shard.load(path, model, optimizer)
        assert extra["epoch"] == 3
        assert torch.equal(extra["order"], torch.arange(4))
        loaded = _full(model, optimizer)
        _train(model, optimizer, dtype)
        results.append((loaded, _full(model, optimizer)))
    return results


def _assert_equal(got: Full, want: Full) -> None:
    assert got[0].keys() == want[0].keys()
    for name, tensor in want[0].items():
        assert torch.equal(got[0][name], tensor), name
    assert got[1]["param_groups"] == want[1]["param_groups"]
    assert got[1]["state"].keys() == want[1]["state"].keys()
    for number, entry in want[1]["state"].items():
        for key, tensor in entry.items():
            assert torch.equal(got[1]["state"][number][key], tensor), (number, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_loads_anywhere_bit_for_bit(stage: int, world_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    want = ranks.run(world_size, _save, stage, path, dtype)[0]
    after = []
    for other_world in (1, 2, 3):
        for loaded, gone_on in ranks.run(other_world, _load_and_go_on, [0, 1, 2, 3], path, dtype)[0]:
            _assert_equal(loaded, want)
            after.append((other_world, gone_on))
    for other_world in (1, 2, 3):  # training goes on alike at every stage
        first, *rest = [full for size, full in after if size == other_world]
        for full in rest:
            _assert_equal(full, first)


def _load_damaged(path: str) -> None:
    model = nn.Linear(3, 3)
    optimizer = _optimizer(model, 3)
    with zero_shard.gathered(model):
        before = model.weight.detach().clone()
    with pytest.raises((ValueError, RuntimeError), match=r"model\.weight|0\.weight"):
        zero_shard.load(path, model, optimizer)
    with pytest.raises((FileNotFoundError, RuntimeError), match="no complete checkpoint"):
        zero_shard.load(path + "-nowhere", model, optimizer)
    with zero_shard.gathered(model):
        assert torch.equal(model.weight, before)


def test_a_checkpoint_of_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    ranks.run(2, _save, 2, path, torch.float32)
    ranks.run(2, _load_damaged, path)


@given(
    shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@settings(deadline=None, max_examples=300)
def test_rectangles_cover_a_range_once(shape: tuple[int, ...], cut: tuple[float, float]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start, stop = sorted(round(part * whole.numel()) for part in cut)
    seen: list[Tensor] = []
    boxes = list(rectangles(shape, start, stop))
    for box in boxes:
        piece = whole
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            piece = piece.narrow(dim, offset, size)
        assert piece.flatten()[0] == box.start
        seen.append(piece.flatten())
    found = torch.cat(seen) if seen else torch.zeros(0, dtype=torch.int64)
    assert torch.equal(found, torch.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def _build_train_forget(stage: int) -> int:
    model = _model(torch.float32)
    optimizer = _optimizer(model, stage)
    _train(model, optimizer, torch.float32)
    model(torch.ones(4, 5)).sum()  # a forward without a backward
    alive = [weakref.ref(model), weakref.ref(optimizer), *map(weakref.ref, model.parameters())]
    del model, optimizer
    gc.collect()
    return sum(reference() is not None for reference in alive)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deleting_model_and_optimizer_frees_both(stage: int) -> None:
    assert ranks.run(2, _build_train_forget, stage) == [0, 0]
