"""Gradients that fill their bucket travel from where they lie, whatever they look like."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_shard

_SHAPE = (512, 512)  # 1 MiB of float32: a bucket of its own


def _flipped(gradient: Tensor) -> Tensor:
    """The same numbers, with a sign that is pending."""
    flipped = torch._neg_view(-gradient)
    assert flipped.is_neg() and flipped.is_contiguous()
    return flipped


_LOOKS = {
    "plain": lambda gradient: gradient,
    "transposed": lambda gradient: gradient.t().contiguous().t(),
    "part of a larger one": lambda gradient: torch.cat([gradient, gradient])[:512],
    "expanded": lambda gradient: gradient[:1].expand(_SHAPE),
    "sign pending": _flipped,
}


def _gradient(rank: int) -> Tensor:
    return torch.randn(_SHAPE, generator=torch.Generator().manual_seed(rank))


def _step(stage: int, look: str) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    params = [nn.Parameter(torch.ones(_SHAPE)), nn.Parameter(torch.ones(3))]
    optimizer = zero_shard.AdamW(params, config={"stage": stage})
    gradients = [_LOOKS[look](_gradient(each)) for each in range(world_size)]
    before = gradients[rank].clone()
    params[0].grad, params[1].grad = gradients[rank], torch.ones(3)
    optimizer.step()
    assert torch.equal(gradients[rank], before), "the gradient was written to"
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    mean = total / world_size
    state = optimizer.full_state_dict()
    if rank == 0:
        torch.testing.assert_close(state["state"][0]["exp_avg"], 0.1 * mean, rtol=1e-6, atol=0)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("look", _LOOKS)
def test_a_large_gradient_of_any_look(look: str, world_size: int) -> None:
    ranks.run(world_size, _steps, look)


def _steps(look: str) -> None:
    for stage in (0, 1, 2):
        _step(stage, look)


def _count_flattened() -> list[int]:
    params = [nn.Parameter(torch.ones(_SHAPE)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))]
    optimizer = zero_shard.AdamW(params, config={"stage": 2})
    exchanges = optimizer._reducer.exchanges
    flattened = []
    flatten_ = exchanges._kernels.flatten_

    def count(flat: Tensor, *rest: object) -> None:
        flattened.append(flat.numel())
        flatten_(flat, *rest)

    exchanges._kernels = exchanges._kernels._replace(flatten_=count)
    sum(param.sum() for param in params).backward()
    optimizer.step()
    return flattened


def test_only_small_gradients_are_flattened() -> None:
    assert ranks.run(2, _count_flattened) == [[32], [32]]
