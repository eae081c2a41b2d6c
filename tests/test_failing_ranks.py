"""Promise 6, no silent hang: a rank that raises, stops or dies makes the others raise, with what they waited for."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_shard

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
_GROUP_TIMEOUT_S = 3.0


class _FailingLayer(nn.Linear):
    """Fails on rank 1 in the second step, in the way that ``fault`` names."""

    fault = ""
    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        is_failing = dist.get_rank() == 1 and self.num_calls == 2
        if is_failing and self.fault == "raise in forward":
            raise ArithmeticError("made in forward")
        if is_failing and self.fault == "die in forward":
            os._exit(11)
        y = super().forward(x)
        if is_failing and self.fault.endswith("in backward"):
            y.register_hook(self._fail)
        return y

    def _fail(self, _: Tensor) -> None:
        if self.fault == "die in backward":
            os._exit(11)
        raise ArithmeticError("made in backward")


def _fail_on_rank_1(stage: int, fault: str) -> tuple[str, float]:
    """Train two steps; return the error of this rank and the seconds since the second step began."""
    group = dist.new_group(timeout=timedelta(seconds=_GROUP_TIMEOUT_S))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), _FailingLayer(4, 4), nn.Linear(4, 2))
    model[1].fault = fault
    config = {"stage": stage, "bucket_mib": 1e-5}
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config=config, process_group=group)
    start = time.monotonic()
    try:
        for step in range(4):
            start = start if step > 1 else time.monotonic()
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            if dist.get_rank() == 1 and step == 1 and fault == "raise before step":
                raise ArithmeticError("made before step")
            if dist.get_rank() == 1 and step == 1 and fault == "stop before step":
                time.sleep(_GROUP_TIMEOUT_S + 2)
            optimizer.step()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if fault == "raise and stay":
            time.sleep(_GROUP_TIMEOUT_S + 1)
        return text, time.monotonic() - start
    return "", time.monotonic() - start


def _check_failure(rank: int, text: str, time_s: float) -> None:
    assert time_s < 20, f"rank {rank} took {time_s:.1f} s"
    assert "RuntimeError" in text and f"rank {rank} was waiting for the" in text, f"rank {rank}: {text!r}"
    what = text.split("was waiting for ")[1]
    assert any(word in what for word in ("bucket", "unit", "gradients", "parameters", "weight", "norm", "end of")), what


@every_stage
@pytest.mark.parametrize("fault", ["raise in forward", "raise in backward", "raise before step"])
def test_a_rank_that_raises_stops_the_others_with_what_they_waited_for(stage: int, fault: str) -> None:
    results = ranks.run(3, _fail_on_rank_1, stage, fault)
    assert "ArithmeticError: made" in results[1][0], results[1]
    for rank in (0, 2):
        _check_failure(rank, *results[rank])


@every_stage
def test_a_rank_that_stops_makes_the_others_raise_in_time(stage: int) -> None:
    results = ranks.run(3, _fail_on_rank_1, stage, "stop before step")
    for rank in (0, 2):
        _check_failure(rank, *results[rank])
    assert results[1][0], "the rank that comes back finds that the others have gone"


def _die_on_rank_1(stage: int, fault: str) -> None:
    text, time_s = _fail_on_rank_1(stage, fault)
    raise RuntimeError(f"{time_s:.1f} s: {text}")


@pytest.mark.parametrize(
    ("stage", "fault"), [(1, "die in forward"), (2, "die in backward"), (3, "die in forward"), (3, "die in backward")]
)
def test_a_rank_that_dies_makes_the_others_raise_in_time(stage: int, fault: str) -> None:
    start = time.monotonic()
    errors = ranks.run_expecting_errors(3, _die_on_rank_1, stage, fault)
    assert isinstance(errors[1], ranks.RankDied), repr(errors[1])
    for rank in (0, 2):
        seconds, _, text = str(errors[rank]).partition(" s: ")
        _check_failure(rank, text, float(seconds))
    assert time.monotonic() - start < 25


def _absent_at_construction() -> tuple[str, float]:
    group = dist.new_group(timeout=timedelta(seconds=_GROUP_TIMEOUT_S))
    start = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(_GROUP_TIMEOUT_S + 1)
        return "", 0.0
    try:
        zero_shard.AdamW(nn.Linear(4, 6).parameters(), process_group=group)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


def test_a_rank_that_does_not_build_makes_the_others_raise_in_time() -> None:
    results = ranks.run(3, _absent_at_construction)
    for rank in (0, 2):
        text, time_s = results[rank]
        assert "waiting for the building of zero_shard.AdamW" in text and time_s < 20, results[rank]
