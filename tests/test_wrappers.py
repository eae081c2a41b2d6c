"""Models inside of DistributedDataParallel, and ranks that run out of data (``Join``), against plain AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import (
    Tolerance,
    assert_ranks_agree,
    assert_snapshots_close,
    mean_over_ranks,
    plain_snapshot,
    sharded_snapshot,
)
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import zero_shard

_F64 = torch.float64


class _Net(nn.Module):
    """Two layers, and one that every other step leaves out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.often, self.last = (nn.Linear(6, 6, dtype=_F64) for _ in range(3))

    def forward(self, x: Tensor, is_often: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.often(x) if is_often else x)


def _loss(model: nn.Module, rank: int, step: int, uses_all: bool) -> Tensor:
    x = torch.randn(3, 6, dtype=_F64, generator=torch.Generator().manual_seed(50 * rank + step))
    return model(x, uses_all or (rank + step) % 2 == 0).square().sum()


_WRAPPERS: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
}


@contextmanager
def _warns_once(is_expected: bool) -> Iterator[None]:
    if is_expected:
        with pytest.warns(
            UserWarning, match=r"first.weight belongs .* DistributedDataParallel.*leave the wrapper away"
        ):
            yield
    else:
        yield


def _train_wrapped(stage: int, name: str, is_wrapped_first: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    uses_all = name != "find_unused_parameters"
    model, plain_model, wrapper = _Net(), _Net(), None
    if is_wrapped_first:
        wrapper = DistributedDataParallel(model, **_WRAPPERS[name])
    with _warns_once(is_wrapped_first):
        optimizer = zero_shard.AdamW(
            (wrapper or model).parameters(), lr=0.05, module=wrapper or model, config={"stage": stage}
        )
    if wrapper is None:
        wrapper = DistributedDataParallel(model, **_WRAPPERS[name])
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.05)
    can_accumulate = name != "static_graph"
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        with wrapper.no_sync() if can_accumulate else nullcontext():
            first = _loss(wrapper, rank, step + 10, uses_all) if can_accumulate else None
            if first is not None:
                with _warns_once(step == 0 and not is_wrapped_first):
                    first.backward()
        with _warns_once(step == 0 and not is_wrapped_first and not can_accumulate):
            _loss(wrapper, rank, step, uses_all).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.5)
        optimizer.step()
        steps = [step + 10, step] if can_accumulate else [step]
        losses = [[lambda r=r, s=s: _loss(plain_model, r, s, uses_all) for s in steps] for r in range(world_size)]
        mean_over_ranks(plain_model.parameters(), losses)
        torch.nn.utils.clip_grad_norm_(plain_model.parameters(), 1.5)
        plain.step()
        snapshot = sharded_snapshot(model, optimizer)
        if rank == 0:
            assert_snapshots_close(
                snapshot, plain_snapshot(plain_model, plain), where=f"{name}, stage {stage}", num_steps=9
            )
    assert_ranks_agree(model)


_CASES = [
    *((2, name, True) for name in _WRAPPERS),
    *((stage, "default", is_first) for stage in (0, 1) for is_first in (True, False)),
    (2, "gradient_as_bucket_view", False),
]


def _train_all_wrapped(cases: list[tuple[int, str, bool]]) -> None:
    for case in cases:
        _train_wrapped(*case)


def test_a_model_in_distributed_data_parallel_trains_as_plain_adamw_does() -> None:
    ranks.run(2, _train_all_wrapped, _CASES)
    ranks.run(3, _train_all_wrapped, [(2, "default", True)])


def _wrap_at_stage_3() -> None:
    model = _Net()
    wrapper = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"first.weight belongs .* DistributedDataParallel.* at stage 3 do not wrap"):
        zero_shard.AdamW(wrapper.parameters(), module=wrapper, config={"stage": 3})
    optimizer, model = None, _Net()
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": 3})
    with pytest.raises(RuntimeError, match=r"first.weight.* sharded and not gathered"):
        DistributedDataParallel(model)
    del optimizer


def test_distributed_data_parallel_is_refused_at_stage_3() -> None:
    ranks.run(2, _wrap_at_stage_3)


# --- Join ---


def _uneven_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return _loss(model, rank, step, step % 2 == 0)


def _num_steps(rank: int) -> int:
    return (2, 4, 3)[rank]


def _train_unevenly(stage: int, variant: str) -> None:
    """Ranks have data for different numbers of steps; a scheduler runs where there is data."""
    rank, world_size, where = dist.get_rank(), dist.get_world_size(), f"stage {stage}, {variant}"
    model, plain_model = _Net(), _Net()
    config = {"stage": stage, "bucket_mib": 1e-4, "max_grad_norm": 3.0 if variant == "max_grad_norm" else None}
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.05, module=model, config=config)
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.05)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, plain)]
    micros = (0, 10) if variant in ("two backwards", "in place") else (0,)
    with Join([optimizer]):
        for step in range(_num_steps(rank)):
            for micro in micros:
                _uneven_loss(model, rank, step + micro).backward()
            if variant == "clip":
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            schedulers[0].step()
            optimizer.zero_grad(set_to_none=variant != "in place")
    for step in range(max(map(_num_steps, range(world_size)))):
        losses = [
            [lambda r=r, s=step + micro: _uneven_loss(plain_model, r, s) for micro in micros]
            if step < _num_steps(r)
            else []
            for r in range(world_size)
        ]
        mean_over_ranks(plain_model.parameters(), losses)
        if variant in ("clip", "max_grad_norm"):
            torch.nn.utils.clip_grad_norm_(plain_model.parameters(), 1.0 if variant == "clip" else 3.0)
        if variant == "in place":  # a parameter that has had a gradient keeps one
            for param in plain_model.parameters():
                param.grad = torch.zeros_like(param) if param.grad is None and param in plain.state else param.grad
        plain.step()
        schedulers[1].step()
    snapshot = sharded_snapshot(model, optimizer)
    if rank == 0:
        assert_snapshots_close(snapshot, plain_snapshot(plain_model, plain), Tolerance(1e-9, 1e-11), where)
    assert_ranks_agree(model, where)
    _loss(model, rank, 0, True).backward()  # after the context all is as it was
    optimizer.step()
    assert_ranks_agree(model, where)


def _train_unevenly_in_all_ways() -> None:
    for variant in ("two backwards", "in place", "clip", "max_grad_norm"):
        _train_unevenly(2, variant)
    for stage in (0, 1):
        _train_unevenly(stage, "two backwards")


def test_ranks_that_run_out_of_data_count_as_zero_inside_join() -> None:
    ranks.run(3, _train_unevenly_in_all_ways)


def _join_in_vain() -> None:
    model = _Net()
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": 3})
    with pytest.raises(NotImplementedError, match=r"stage 3.*every forward needs.*stage 2"):
        Join([optimizer])
    model = _Net()
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": 2})
    with Join([optimizer]):
        _loss(model, dist.get_rank(), 0, True).backward()
        with pytest.raises(NotImplementedError, match=r"inside Join.*optimizer.clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    wrapper = nn.parallel.DistributedDataParallel(_Net())
    with pytest.raises(NotImplementedError, match=r"Join\(\[optimizer\]\) alone"):
        with Join([wrapper, optimizer]):
            _loss(model, dist.get_rank(), 0, True).backward()


def test_join_is_refused_where_it_can_not_be_right() -> None:
    ranks.run(2, _join_in_vain)
