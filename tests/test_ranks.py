"""The harness itself: what the other tests rely on when a rank raises, hangs or dies."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import ranks
import torch
import torch.distributed as dist


def _sum_of_ranks(start: int) -> tuple[int, float]:
    value = torch.tensor(float(dist.get_rank() + start))
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError(f"made on rank {rank}")
    dist.barrier()


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(9)
    dist.barrier()


def _warn() -> None:
    warnings.warn("an error here", stacklevel=1)


class _RaisesWhenFreed:
    def __del__(self) -> None:
        raise OSError("nobody would see this")


def _fail_in_destructor() -> None:
    _RaisesWhenFreed()


def _process_id() -> int:
    return os.getpid()


def _has_group() -> bool:
    return dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_run_returns_values_in_rank_order(world_size: int) -> None:
    total = float(sum(range(10, 10 + world_size)))
    assert ranks.run(world_size, _sum_of_ranks, 10) == [(rank, total) for rank in range(world_size)]


def test_processes_are_reused_and_fresh_ones_are_not() -> None:
    first = ranks.run(2, _process_id)
    assert ranks.run(2, _process_id) == first
    assert not set(ranks.run(2, _process_id, fresh=True)) & set(first)
    assert ranks.run(2, _process_id) == first


def test_has_group_false_leaves_torch_distributed_alone() -> None:
    assert ranks.run(1, _has_group, has_group=False) == [False]
    assert ranks.run(1, _has_group) == [True]


def test_exception_keeps_its_type_and_the_remote_traceback() -> None:
    with pytest.raises(KeyError, match="made on rank 1") as caught:
        ranks.run(2, _raise_on, 1)
    assert "in _raise_on" in str(caught.value.__cause__)
    assert isinstance(caught.value.errors[1], KeyError)  # type: ignore[attr-defined]
    assert caught.value.errors[0] is not None  # type: ignore[attr-defined]  # its peer was gone
    assert ranks.run(2, _sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


def test_hang_is_cut_off_and_shows_the_stack() -> None:
    with pytest.raises(ranks.TaskTimeout, match=r"(?s)_hang_on.*2 ranks.*rank 0 had answered.*_hang_on"):
        ranks.run(2, _hang_on, 1, limit_s=2.0)
    assert ranks.run(2, _sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


def test_death_of_a_rank_is_reported_and_the_rank_replaced() -> None:
    errors = ranks.run_expecting_errors(2, _die_on, 1)
    assert isinstance(errors[1], ranks.RankDied)
    assert "exit code 9" in str(errors[1])
    assert errors[0] is not None
    assert ranks.run(2, _sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


def test_expected_errors_are_returned_per_rank() -> None:
    assert ranks.run_expecting_errors(2, _sum_of_ranks, 0) == [None, None]


def test_warnings_are_errors_on_ranks() -> None:
    with pytest.raises(UserWarning, match="an error here"):
        ranks.run(1, _warn)


def test_error_in_a_destructor_fails_the_task() -> None:
    with pytest.raises(AssertionError, match="nobody would see this"):
        ranks.run(1, _fail_in_destructor)
