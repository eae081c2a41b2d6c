"""Norms of the mean gradient: always those of the gradients as they are, without a pass over them where it can be."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import EXACT, Snapshot, Tolerance, assert_snapshots_close, sharded_snapshot
from stacks import build, make_model, train
from torch import Tensor, nn

import zero_shard
from zero_shard import skipping


def _norms_of_small(scale: float) -> list[tuple[float, float]]:
    """Return norms of a parameter that lies on one rank alone, by torch and as they must be."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(4096))]
    optimizer = zero_shard.AdamW(weights)
    (weights[0] * scale * torch.arange(1.0, 17.0)).sum().backward()
    grad = weights[0].grad
    full = grad.full().double()
    found = [(float(grad.norm(dtype=torch.float64)), float(full.norm()))]
    found.append(
        (float(torch.linalg.vector_norm(grad, 3, dtype=torch.float64)), float((full.abs() ** 3).sum() ** (1 / 3)))
    )
    del optimizer
    return found


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e-15, 1e-18])
def test_norms_of_tiny_gradients_keep_their_digits(scale: float) -> None:
    for found in ranks.run(2, _norms_of_small, scale):
        for norm, want in found:
            assert norm == pytest.approx(want, rel=1e-6)


def _read_a_part_alone() -> None:
    model, optimizer = build(torch.float32, {"stage": 2})
    model(torch.ones(2, 37)).sum().backward()
    grad = model[0].weight.grad
    before = grad.norm()
    if dist.get_rank() == 0:
        grad.part.abs().sum()  # logging on one rank
    assert torch.equal(grad.norm(), before)
    grad.part.mul_(3)
    torch.testing.assert_close(grad.norm(), 3 * before)
    optimizer.step()


def test_one_rank_may_look_at_its_part() -> None:
    ranks.run(2, _read_a_part_alone)


def _keep_a_part(how: str) -> None:
    model, optimizer = build(torch.float32, {"stage": 2})
    model(torch.ones(2, 37)).sum().backward()
    grad = model[0].weight.grad
    part = grad.part
    before = grad.norm()
    if how == "a part changed later":
        part.mul_(3)
    else:
        optimizer.clip_grad_norm_(1e-3)
        with optimizer.no_sync():
            model[4].bias.sum().backward()  # now the clip is applied to what is there
    torch.testing.assert_close(grad.norm(), grad.full().norm())
    assert not torch.equal(grad.norm(), before)


@pytest.mark.parametrize("how", ["a part changed later", "a clip applied later"])
def test_norms_follow_gradients_that_change_later(how: str) -> None:
    ranks.run(2, _keep_a_part, how)


# --- passes over memory ---


@contextmanager
def counted(optimizer: zero_shard.AdamW) -> Iterator[dict[str, int]]:
    """Count the calls of every operator."""
    calls: dict[str, int] = {}

    def counting(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            kernel(*args)

        return call

    kernels = optimizer._kernels
    names = [name for name in kernels._fields if name != "name"]
    wrapped = kernels._replace(**{name: counting(name, getattr(kernels, name)) for name in names})
    reducer = optimizer._reducer
    holders: list[Any] = [optimizer, optimizer._update, reducer.exchanges, reducer.norms, reducer.plain_gradients]
    for holder in holders:
        holder._kernels = wrapped
    try:
        yield calls
    finally:
        for holder in holders:
            holder._kernels = kernels


def test_a_world_of_one_reads_gradients_where_they_are() -> None:
    model, optimizer = build(torch.float32, {"max_grad_norm": 0.1})
    with counted(optimizer) as calls:
        train(model, optimizer, torch.float32, range(2))
    num_buckets = len(optimizer._reducer.buckets)
    assert calls == {"sum_squares_": 2 * num_buckets, "sum_pairs_": 4, "adamw_": 2 * num_buckets}


def test_gradients_of_mixed_dtypes_are_flattened_first() -> None:
    def run(plain: bool) -> list[Tensor]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(20).bfloat16()) for _ in range(3)]
        params[1].grad_dtype = torch.float64
        kind = torch.optim.AdamW if plain else zero_shard.AdamW
        optimizer = kind(params, lr=0.1)
        for step in range(2):
            for number, param in enumerate(params):
                grad = torch.full((20,), 1.0 + step + number)
                param.grad = grad.to(torch.float64 if number == 1 else torch.bfloat16)
            if plain:
                for param in params:
                    param.grad_dtype = None
                    param.grad = param.grad.to(torch.bfloat16)
            optimizer.step()
        return [param.detach() for param in params]

    for got, want in zip(run(plain=False), run(plain=True), strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)


def _norm_passes(stage: int) -> list[dict[str, int]]:
    model, optimizer = build(torch.float32, {"stage": stage, "max_grad_norm": 0.1})
    found = []
    with counted(optimizer) as calls:
        train(model, optimizer, torch.float32, range(2))
    found.append(calls)
    model, optimizer = build(torch.float32, {"stage": stage})
    with counted(optimizer) as calls:
        train(model, optimizer, torch.float32, range(1))
        model(torch.ones(2, 37)).sum().backward()
        optimizer.clip_grad_norm_(0.1)  # the first to ask for a norm pays for a pass
        optimizer.step()
        optimizer.zero_grad()
        first = calls.get("sum_squares_", 0)
        model(torch.ones(2, 37)).sum().backward()
        optimizer.clip_grad_norm_(0.1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return [*found, {"first": first, "then": calls.get("sum_squares_", 0) - first}]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_costs_no_pass_where_gradients_are_reduced(stage: int) -> None:
    for in_step, by_call in ranks.run(2, _norm_passes, stage):
        assert "sum_squares_" not in in_step
        assert in_step["reduce_slices_"] > 0
        assert by_call["first"] > 0, "the control"
        assert by_call["then"] == 0


def _norm_after(stage: int, change: str) -> tuple[float, float]:
    """Return the norm that clipping reports after a change of the reduced gradients, and the right one."""
    model, optimizer = build(torch.float32, {"stage": stage})
    for _ in range(2):  # from the second round on squares are taken while reducing
        optimizer.zero_grad()
        model(torch.ones(2, 37)).sum().backward()
        optimizer.clip_grad_norm_(1e9)
    kept = [
        param.grad.part if isinstance(param.grad, zero_shard.ShardedGrad) else param.grad
        for param in model.parameters()
    ]
    for param, part in zip(model.parameters(), kept, strict=True):
        if change == "mul":
            param.grad.mul_(2.0)
        elif change == "data" and stage == 0:
            param.grad.data.mul_(2.0)
        elif change == "kept":
            part.mul_(2.0)
    if change == "drop":
        model[0].weight.grad = None
    if change == "more":
        model(torch.ones(2, 37)).sum().backward()
    if change == "zero":
        optimizer.zero_grad(set_to_none=False)
    norm = float(optimizer.clip_grad_norm_(1e9))
    squares = 0.0
    for param in model.parameters():
        grad = param.grad
        if grad is not None:
            full = grad.full() if isinstance(grad, zero_shard.ShardedGrad) else grad
            squares += float(full.double().square().sum())
    return norm, squares**0.5


@pytest.mark.parametrize("change", ["none", "mul", "data", "kept", "drop", "more", "zero"])
@pytest.mark.parametrize("stage", range(4))
def test_the_norm_is_that_of_the_gradients_as_they_are(stage: int, change: str) -> None:
    for norm, want in ranks.run(2, _norm_after, stage, change):
        assert norm == pytest.approx(want, rel=1e-6)


# --- steps that are skipped without the host looking ---


def _skip(stage: int, is_deferred: bool) -> list[Snapshot]:
    if is_deferred:
        skipping._HOST = "no device"
    try:
        model, optimizer = build(torch.float32, {"stage": stage, "skip_nonfinite": True})
        train(model, optimizer, torch.float32, range(2))
        before = sharded_snapshot(model, optimizer)
        model(torch.full((2, 37), torch.nan if dist.get_rank() else 1.0)).sum().backward()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.step()
            skipped = sharded_snapshot(model, optimizer)
            assert len(seen) == (0 if is_deferred else 1)
            train(model, optimizer, torch.float32, range(2, 3))
            assert [str(each.message)[:39] for each in seen] == ["zero_shard skipped a step on all ranks:"]
            assert Path(seen[0].filename).parent.name == "tests", "it points at the line that called step()"
        return [before, skipped, sharded_snapshot(model, optimizer)]
    finally:
        skipping._HOST = "cpu"


@pytest.mark.parametrize("stage", range(4))
def test_a_step_that_the_device_skips_changes_nothing(stage: int) -> None:
    before, skipped, after = ranks.run(2, _skip, stage, True)[0]
    assert_snapshots_close(skipped, before, EXACT, "skipped")
    assert_snapshots_close(after, ranks.run(2, _skip, stage, False)[0][2], EXACT, "and one more step")


def _split_norms(stage: int, dtype: torch.dtype) -> tuple[list[float], float]:
    model, _optimizer = build(dtype, {"stage": stage})
    model(torch.ones(2, 37, dtype=dtype)).sum().backward()
    norms = [float(torch.linalg.vector_norm(param.grad)) for param in model.parameters()]
    return norms, float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_single_parameters_do_not_depend_on_the_sharding(dtype: torch.dtype) -> None:
    found = [result for size in (2, 4) for stage in (1, 2, 3) for result in ranks.run(size, _split_norms, stage, dtype)]
    tolerance = Tolerance(1e-6, 0.0) if dtype == torch.float32 else Tolerance(1e-14, 0.0)
    model = make_model(dtype)
    model(torch.ones(2, 37, dtype=dtype)).sum().backward()
    for norms, total in found:
        assert (norms, total) == found[0]
    for norm, param in zip(found[0][0], model.parameters(), strict=True):
        assert norm == pytest.approx(float(param.grad.norm()), rel=tolerance.rtol)
