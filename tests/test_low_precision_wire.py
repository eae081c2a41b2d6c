"""reduce_dtype = "int8": one result at every stage, within the proven error of the exact mean, and no NaN is lost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from models import Cells, linear_use
from oracle import EXACT, Snapshot, assert_ranks_agree, assert_snapshots_close, full_grad, sharded_snapshot
from torch import Tensor

import zero_shard
from zero_shard.fake_group import FakeGroup

# One that is not whole blocks, one that is, one with strides, and one below 4096 elements, which travels as it is.
_SHAPES = [(67, 91), (16, 256), (70, 64), (300,)]
_STRIDED = 2
_WAYS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 0, "bucket_mib": 0.01},
    {"stage": 1},
    {"stage": 2},
    {"stage": 2, "bucket_mib": 0.01},
    {"stage": 3},
    {"stage": 3, "prefetch": 0, "kernels": "torch"},
]
_BETA1 = 0.9
_HALF_STEP = 0.5 / 127  # of a block's largest magnitude


def _model(dtype: torch.dtype = torch.float32) -> Cells:
    torch.manual_seed(1)
    values = [torch.randn(shape, dtype=dtype) for shape in _SHAPES]
    values[_STRIDED] = values[_STRIDED].t().contiguous().t()
    return Cells(values)


def _gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return gradients whose magnitudes differ from block to block by some orders."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = []
    for shape in _SHAPES:
        exponent = torch.randint(-4, 4, shape[:1], generator=generator)
        scale = (10.0**exponent).view(-1, *(1 for _ in shape[1:]))
        found.append((torch.randn(shape, generator=generator) * scale).to(dtype))
    return found


def _backward(model: Cells, gradients: Sequence[Tensor]) -> None:
    model({index: linear_use(gradient) for index, gradient in enumerate(gradients)}).backward()


def _optimizer(model: Cells, config: dict[str, Any]) -> zero_shard.AdamW:
    config = {"reduce_dtype": "int8", **config}
    return zero_shard.AdamW(model.parameters(), lr=0.01, betas=(_BETA1, 0.999), module=model, config=config)


def _train(config: dict[str, Any], dtype: torch.dtype) -> tuple[list[Snapshot], list[Tensor]]:
    """Take 3 steps of two backwards, the first of which is local; return what rank 0 has after each, and the norms."""
    model = _model(dtype)
    optimizer, snapshots, norms = _optimizer(model, config), [], []
    for step, micro in itertools.product(range(3), range(2)):
        with optimizer.no_sync() if micro == 0 else nullcontext():
            _backward(model, _gradients(dist.get_rank(), 2 * step + micro, dtype))
        if micro == 1:
            norms.append(optimizer.clip_grad_norm_(1.0))
            optimizer.step()
            optimizer.zero_grad()
            snapshots.append(sharded_snapshot(model, optimizer))
    assert_ranks_agree(model, str(config))
    return snapshots, norms


def _train_ways(ways: list[dict[str, Any]], dtype: torch.dtype) -> list[tuple[list[Snapshot], list[Tensor]]]:
    return [_train(config, dtype) for config in ways]


def _assert_equal(results: list[tuple[list[Snapshot], list[Tensor]]], ways: list[dict[str, Any]]) -> None:
    for way, (snapshots, norms) in zip(ways, results, strict=True):
        for step, (got, want) in enumerate(zip(snapshots, results[0][0], strict=True)):
            assert_snapshots_close(got, want, EXACT, f"{way}, step {step}")
        assert torch.equal(torch.stack(norms), torch.stack(results[0][1])), way


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float32), (4, torch.float32), (2, torch.bfloat16)])
def test_all_stages_and_buckets_give_the_same_bits(world_size: int, dtype: torch.dtype) -> None:
    _assert_equal(ranks.run(world_size, _train_ways, _WAYS, dtype)[0], _WAYS)


def test_replicated_shards_give_the_same_bits_at_every_stage() -> None:
    """Sums cross replicas in 8 bits, too; at stage 1 to 3 alike."""
    ways = [{"stage": stage, "shard_size": 2} for stage in (1, 2, 3)]
    _assert_equal(ranks.run(4, _train_ways, ways, torch.float32)[0], ways)


# --- the error ---


def _blocks(flat: Tensor) -> Tensor:
    return torch.nn.functional.pad(flat, (0, -flat.numel() % 256)).view(-1, 256)


def _in_memory_order(index: int, tensor: Tensor) -> Tensor:
    """Return the elements of a parameter's gradient as its slot has them."""
    return (tensor.t() if index == _STRIDED else tensor).reshape(-1)


def _half_steps(flat: Tensor) -> Tensor:
    """Return for each element the largest error that its block allows: half a step, and the roundings on the way."""
    limit = _blocks(flat.abs()).amax(1, keepdim=True) * _HALF_STEP * (1 + 2.0**-14)
    return limit.expand(-1, 256).reshape(-1)[: flat.numel()]


def _first_step(config: dict[str, Any], dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return what one backward leaves: the mean gradients, their norm, and the first moments after a step."""
    model = _model(dtype)
    optimizer = _optimizer(model, config)
    _backward(model, _gradients(dist.get_rank(), 0, dtype))
    means = [full_grad(param) for param in model.parameters()]
    norm = optimizer.clip_grad_norm_(float("inf"))
    optimizer.step()
    state = sharded_snapshot(model, optimizer)
    moments = [entry["exp_avg"] for entry in state.values()]
    assert all(mean is not None for mean in means)
    return [(mean, norm, moment) for mean, moment in zip(means, moments, strict=False)]


@pytest.mark.parametrize("config", [{"stage": 2}, {"stage": 3}, {"stage": 2, "shard_size": 2}], ids=str)
def test_moments_are_within_the_proven_error(config: dict[str, Any]) -> None:
    """Half a step of every block that was sent, averaged: those of all ranks, and of the sums that cross replicas.

    The clip's norm is that of the reduced gradient.
    """
    world_size = 4
    found = ranks.run(world_size, _first_step, config, torch.float32)[0]
    per_rank = [_gradients(rank, 0) for rank in range(world_size)]
    square, norm = 0.0, found[0][1]
    for index, (mean, _, moment) in enumerate(found):
        flats = [_in_memory_order(index, gradients[index]) for gradients in per_rank]
        exact = sum(flat.double() for flat in flats) / world_size
        limit = sum(map(_half_steps, flats)) / world_size
        if "shard_size" in config:  # neighbours share a copy
            limit += sum(_half_steps(flats[i] + flats[i + 1]) * (1 + 2 / 254) for i in (0, 2)) / world_size
            limit += sum(map(_half_steps, flats)) * _HALF_STEP / world_size
        is_coded = mean.numel() >= 4096
        error = (_in_memory_order(index, moment) / (1 - _BETA1) - exact).abs()
        rounding = 1e-6 * sum(flat.abs() for flat in flats)
        assert (error <= (limit if is_coded else 0) + rounding).all(), f"{index}: {(error / limit).max()}"
        assert not is_coded or error.max() > 0.2 * limit[error.argmax()], f"{index} has not travelled in 8 bits"
        square += float(mean.double().square().sum())
    assert float(norm) == pytest.approx(square**0.5, rel=1e-6)


def _accumulate(config: dict[str, Any]) -> list[Tensor]:
    model = _model()
    optimizer = _optimizer(model, config)
    for micro in range(3):
        _backward(model, _gradients(dist.get_rank(), micro))
    means = [full_grad(param) for param in model.parameters()]
    optimizer.step()
    return [mean for mean in means if mean is not None]


@pytest.mark.parametrize("config", [{"stage": 2}, {"stage": 3, "shard_size": 1}], ids=str)
def test_backwards_without_no_sync_add_up(config: dict[str, Any]) -> None:
    """Each backward is quantized by itself, or their sum is: the error stays below that of all of them."""
    found = ranks.run(2, _accumulate, config)[0]
    for index, mean in enumerate(found):
        flats = [
            _in_memory_order(index, _gradients(rank, micro)[index])
            for rank, micro in itertools.product(range(2), range(3))
        ]
        limit = sum(map(_half_steps, flats)) / 2 + 1e-6 * sum(flat.abs() for flat in flats)
        error = (_in_memory_order(index, mean) - sum(flats) / 2).abs()
        assert (error <= limit).all(), index


# --- what is not finite, and a world of one ---


def _skip(stage: int, bad: float) -> tuple[bool, list[bool]]:
    model = _model()
    optimizer = _optimizer(model, {"stage": stage, "skip_nonfinite": True})
    before = sharded_snapshot(model, optimizer)
    gradients = _gradients(dist.get_rank(), 0)
    if dist.get_rank() == 1:
        gradients[0][66, 90] = bad
    _backward(model, gradients)
    mean = full_grad(model.weights[0])
    assert mean is not None
    with pytest.warns(UserWarning, match="skipped"):
        optimizer.step()
    after = sharded_snapshot(model, optimizer)
    is_same = all(torch.equal(after[name]["param"], before[name]["param"]) for name in before)
    return is_same, mean.reshape(-1).isnan().tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_is_not_finite_makes_its_block_nan_on_all_ranks(stage: int, bad: float) -> None:
    for is_same, is_nan in ranks.run(2, _skip, stage, bad):
        assert is_same, "the step was not skipped"
        last = len(is_nan) // 256 * 256
        assert is_nan == [index >= last for index in range(len(is_nan))]


def _alone(reduce_dtype: str | None) -> Snapshot:
    model = _model()
    optimizer = _optimizer(model, {"stage": 2, "reduce_dtype": reduce_dtype})
    for step in range(2):
        optimizer.zero_grad()
        _backward(model, _gradients(0, step))
        optimizer.step()
    assert optimizer.usage().sent_nbytes == 0
    return sharded_snapshot(model, optimizer)


def test_a_world_of_one_sends_nothing_and_changes_nothing() -> None:
    quantized, plain = (ranks.run(1, _alone, reduce_dtype)[0] for reduce_dtype in ("int8", None))
    assert_snapshots_close(quantized, plain, EXACT)


@pytest.mark.parametrize("is_native", [False, True])
def test_a_rehearsal_counts_codes_and_scales(is_native: bool) -> None:
    """NCCL can't add codes: slices go to all ranks at once, as many bytes as a reduction sends."""
    group = FakeGroup(8, is_native)
    with torch.device("meta"):
        model = torch.nn.Linear(1024, 1024, bias=False)
    optimizer = zero_shard.AdamW(
        model.parameters(), module=model, process_group=group, config={"stage": 2, "reduce_dtype": "int8"}
    )
    for _ in range(2):  # the first step also counts what the start has sent
        group.messages.clear()
        model(torch.ones(1, 1024, device="meta")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    kind = "all_to_all" if is_native else "send"
    sent = sum(message.sent_nbytes for message in group.messages if message.kind == kind and not message.is_host)
    gathered = 0 if is_native else 7 * 1024 * 1024 * 4 // 8
    assert sent - gathered == 7 * (1024 * 1024 // 256 * 260) // 8
    usage = optimizer.usage()
    assert usage.floor_sent_nbytes <= usage.sent_nbytes <= 1.02 * usage.floor_sent_nbytes
