"""Promise 4, memory as promised: what is measured is within the formula, and plain torch would break it.

What is held between calls is measured by the storages of all live tensors. What is held for a moment inside of them,
in C++ too, is measured by the allocations and frees that the profiler sees. Activations are kept tiny, so that both
show model state.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import ranks
import torch
from allocations import Allocations
from live_tensors import Live
from torch import nn

import zero_shard

_WIDTH = 512  # so that a bucket is exchanged in two pieces
_LAYER_NUMEL = (_WIDTH + 1) * _WIDTH
_BUCKET_MIB = 2 * _LAYER_NUMEL * 4 / 2**20  # two layers in fp32
_SMALL_NBYTES = 64 << 10  # activations, tables and Python's own tensors; it doesn't grow with the model


def _net(num_layers: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_layers))).to(dtype)


def _formula_itemsize(stage: int, dtype: torch.dtype, world_size: int) -> dict[str, float]:
    """Return bytes per parameter of what a rank keeps, by section 5 of the design."""
    param = dtype.itemsize
    moments = 8 + (2 if dtype == torch.bfloat16 else 0)  # fp32, and the lossless rest of the master
    grad_shard = 4 / world_size if world_size > 1 else param
    return {
        "param": param / world_size if stage == 3 else param,
        "grad": [4 if world_size > 1 else param, param, grad_shard, grad_shard][stage],  # one rank keeps autograd's
        "state": moments if stage == 0 else moments / world_size,
    }


def _extra_nbytes(stage: int, dtype: torch.dtype, world_size: int) -> int:
    """Return what may be held beside the formula in backward: two buckets and a gradient, or two units with gradients.

    See Note [Exchanges in flight] in ``stages/exchanges.py``.
    """
    if stage == 3 and world_size > 1:
        return 2 * 2 * _LAYER_NUMEL * dtype.itemsize + _WIDTH * _WIDTH * dtype.itemsize
    return 2 * int(_BUCKET_MIB * 2**20) + _WIDTH * _WIDTH * dtype.itemsize


def _measure(
    allocations: Allocations, config: dict[str, Any], dtype: torch.dtype, num_layers: int = 16
) -> dict[str, Any]:
    """Return bytes above those before the model was built, at several moments; and names of rises."""
    live = Live()
    model = _net(num_layers, dtype)
    config = {"bucket_mib": _BUCKET_MIB, **config}
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config=config)
    x = torch.ones(1, _WIDTH, dtype=dtype)
    found: dict[str, Any] = {"built": live.nbytes()}

    def backward() -> None:
        model(x).sum().backward()

    def note(name: str) -> None:
        found[name] = live.nbytes()
        held = optimizer.usage().held_nbytes
        assert abs(held - found[name]) <= _SMALL_NBYTES, f"{config}, {dtype}, after {name}: {held} counted, {found}"

    for _ in range(2):
        backward()
        optimizer.step()
        optimizer.zero_grad()
    note("zero_grad")
    found["rise in backward"] = allocations.watch(backward)
    note("backward")
    found["rise in step"] = allocations.watch(optimizer.step)
    note("step")
    found["promised"] = optimizer.usage().promised_nbytes
    return found


def _with_rises(allocations: Allocations, found: dict[str, Any]) -> dict[str, int]:
    return {key: allocations.rise_nbytes(value) if "rise" in key else value for key, value in found.items()}


def _measure_plain(dtype: torch.dtype, num_layers: int = 16) -> int:
    """Return what plain torch holds after backward, with an fp32 master if the model is bf16."""
    live = Live()
    model = _net(num_layers, dtype)
    masters = [param if dtype == torch.float32 else param.detach().float() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, _WIDTH, dtype=dtype)).sum().backward()
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = param.grad if param is master else param.grad.float()
        optimizer.step()
        if dtype != torch.float32:
            for master in masters:
                master.grad = None
    return live.nbytes()


_DTYPES = [torch.float32, torch.bfloat16]


def _measure_all() -> dict[Any, Any]:
    with Allocations() as allocations:
        plain = {("plain", dtype): _measure_plain(dtype) for dtype in _DTYPES}
        found = {(stage, d): _measure(allocations, {"stage": stage}, d) for stage in range(4) for d in _DTYPES}
    return plain | {key: _with_rises(allocations, value) for key, value in found.items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_memory_is_within_the_formula_and_plain_torch_is_not(world_size: int) -> None:
    numel = 16 * _LAYER_NUMEL
    problems = []
    for rank, found in enumerate(ranks.run(world_size, _measure_all)):
        for stage, dtype in itertools.product(range(4), _DTYPES):
            parts, measured = _formula_itemsize(stage, dtype, world_size), found[stage, dtype]
            measured["peak of backward"] = measured["zero_grad"] + measured["rise in backward"]
            limit = 1.02 * sum(parts.values()) * numel
            between = 1.02 * (parts["param"] + parts["state"]) * numel + _SMALL_NBYTES
            peak_limit = limit + _extra_nbytes(stage, dtype, world_size) + _SMALL_NBYTES
            limits = {
                "built": between,
                "zero_grad": between,
                "backward": limit + _SMALL_NBYTES,
                "step": limit + _SMALL_NBYTES,
                "peak of backward": peak_limit,
            }
            problems += [
                f"rank {rank} of {world_size}, stage {stage}, {dtype}: {name} "
                f"{measured[name] / numel:.3f} bytes per parameter, limit {limits[name] / numel:.3f}"
                for name in limits
                if measured[name] > limits[name]
            ]
            assert measured["promised"] == pytest.approx(sum(parts.values()) * numel, rel=1e-3), (stage, dtype)
            if stage > 0 and world_size > 1:
                plain = found["plain", dtype]
                assert plain > peak_limit, (
                    f"stage {stage}: the limit {peak_limit} says nothing, plain torch holds {plain}"
                )
    assert not problems, "\n".join(problems)


def _measure_steps() -> dict[Any, tuple[int, int]]:
    """Return the rise in ``step()`` of a model and of one three times as deep."""
    configs: list[dict[str, Any]] = [{"stage": stage} for stage in range(4)]
    configs += [{"stage": 2, "max_grad_norm": 1.0}, {"stage": 3, "max_grad_norm": 1.0, "skip_nonfinite": True}]
    with Allocations() as allocations:
        names = {
            (str(config), dtype): [_watched_step(allocations, config, dtype, num_layers) for num_layers in (12, 36)]
            for config, dtype in itertools.product(configs, _DTYPES)
        }
    return {key: (allocations.rise_nbytes(a), allocations.rise_nbytes(b)) for key, (a, b) in names.items()}


def _watched_step(allocations: Allocations, config: dict[str, Any], dtype: torch.dtype, num_layers: int) -> str:
    model = _net(num_layers, dtype)
    config = {"bucket_mib": _BUCKET_MIB, **config}
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config=config)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, _WIDTH, dtype=dtype)).sum().backward()
        name = allocations.watch(optimizer.step)
    return name


def _most_in_step(world_size: int, dtype: torch.dtype) -> float:
    """Return a bound that knows nothing of the model: two buckets, which stage 1 exchanges.

    A world of one has no buckets of gradients. It copies each into one in fp32 for the update; a norm is taken in fp64.
    """
    bucket_nbytes = _BUCKET_MIB * 2**20
    if world_size == 1:
        return 3 * bucket_nbytes * 4 / dtype.itemsize + _SMALL_NBYTES
    return 2 * bucket_nbytes + _SMALL_NBYTES


@pytest.mark.parametrize("world_size", [1, 2])
def test_step_allocates_nothing_that_grows_with_the_model(world_size: int) -> None:
    problems = []
    for found in ranks.run(world_size, _measure_steps):
        for (config, dtype), (small, large) in found.items():
            if large > small + _SMALL_NBYTES or small > _most_in_step(world_size, dtype):
                problems.append(
                    f"{config}, {dtype}: step() takes {small} bytes more, {large} with three times the layers"
                )
    assert not problems, "\n".join(problems)


def _plain_rises() -> list[int]:
    with Allocations() as allocations:
        names = []
        for num_layers in (12, 36):
            model = _net(num_layers, torch.float32)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            for _ in range(2):
                model(torch.ones(1, _WIDTH)).sum().backward()
                name = allocations.watch(optimizer.step)
            names.append(name)
    return [allocations.rise_nbytes(name) for name in names]


def test_plain_foreach_adamw_grows_with_the_model() -> None:
    """The control of the test above."""
    small, large = ranks.run(1, _plain_rises)[0]
    assert large > small + _SMALL_NBYTES


def _measure_options() -> list[tuple[str, int, int]]:
    """Return what is held after backward in other configurations, and what they promise."""
    configs: list[tuple[dict[str, Any], torch.dtype]] = [
        ({"stage": 2, "state_dtype": "bfloat16"}, torch.float32),
        ({"stage": 3, "state_dtype": "bfloat16"}, torch.bfloat16),
        ({"stage": 2, "master": "none"}, torch.bfloat16),
        ({"stage": 2, "reduce_dtype": "bfloat16"}, torch.float32),
        ({"stage": 3, "reshard_after_forward": False}, torch.float32),
        ({"stage": 2, "shard_size": 1}, torch.float32),
        *(({"stage": stage, "param_dtype": "bfloat16"}, torch.float32) for stage in (1, 2, 3)),
        ({"stage": 1}, torch.float16),
        ({"stage": 3}, torch.float16),
    ]
    found = []
    with Allocations() as allocations:
        for config, dtype in configs:
            measured = _measure(allocations, config, dtype)
            found.append((f"{config}, {dtype}", measured["backward"], measured["promised"]))
    return found


def test_options_hold_what_they_promise() -> None:
    for found in ranks.run(2, _measure_options):
        for what, held, promised in found:
            assert promised * 0.98 - _SMALL_NBYTES <= held <= promised * 1.02 + _SMALL_NBYTES, (
                f"{what}: {held}, promised {promised}"
            )


def _evaluate_and_count() -> tuple[int, int, int]:
    """Return what stage 3 holds before and after an evaluation, and its peak above that."""
    live = Live()
    model = _net(16, torch.float32)
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": 3})
    x = torch.ones(1, _WIDTH)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), Allocations() as allocations:
        model(x)
        before = live.nbytes()
        name = allocations.watch(lambda: model(x))
        after = live.nbytes()
    return before, after, allocations.rise_nbytes(name)


def test_evaluation_at_stage_3_holds_two_units_at_most() -> None:
    for before, after, rise in ranks.run(2, _evaluate_and_count):
        assert abs(after - before) < 1024
        assert rise <= 2 * _LAYER_NUMEL * 4 + _SMALL_NBYTES


def _measure_no_sync() -> None:
    for stage in range(4):
        _train_under_no_sync(stage)


def _train_under_no_sync(stage: int) -> None:
    live = Live()
    model = _net(8, torch.float32)
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage})
    for moment in ("local", "reduced", "dropped"):
        if moment == "local":
            with optimizer.no_sync():
                model(torch.ones(1, _WIDTH)).sum().backward()
        elif moment == "reduced":
            model(torch.ones(1, _WIDTH)).sum().backward()
            optimizer.step()
        else:
            optimizer.zero_grad()
        measured, held = live.nbytes(), optimizer.usage().held_nbytes
        assert abs(measured - held) <= _SMALL_NBYTES, f"stage {stage}, {moment}: {measured} live, {held} counted"


def test_local_gradients_of_no_sync_are_counted_and_go_away() -> None:
    ranks.run(2, _measure_no_sync)
