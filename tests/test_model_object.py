"""The model as an object: converted, copied, saved, initialised, frozen, seen by torch.func, at every stage."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import assert_ranks_agree
from torch import Tensor, nn

import zero_shard

_F64 = torch.float64


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(6, 6, dtype=_F64) for _ in range(3)))


def _x(step: int) -> Tensor:
    return torch.randn(3, 6, dtype=_F64, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _build(stage: int) -> tuple[nn.Module, zero_shard.AdamW]:
    model = _net()
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.1, module=model, config={"stage": stage})
    _step(model, optimizer, 0)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(_x(step)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# --- refused in words ---


def _to_float(model: nn.Module, optimizer: zero_shard.AdamW) -> None:
    model.float()(_x(1).float()).sum().backward()
    optimizer.step()


def _initialise(model: nn.Module, optimizer: zero_shard.AdamW) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)

    model.apply(init)


_REFUSED_AT_3: dict[str, tuple[Callable[[nn.Module, zero_shard.AdamW], Any], str]] = {
    "float": (_to_float, "0.weight"),
    "apply": (_initialise, "0.weight"),
    "reset_parameters": (lambda model, _: model[0].reset_parameters(), "0.weight"),
    "state_dict": (lambda model, _: model.state_dict(), "full_state_dict"),
    "load_state_dict": (lambda model, _: model.load_state_dict(_net().state_dict()), "gathered"),
    "torch.save": (lambda model, _: torch.save(model, io.BytesIO()), "full_state_dict"),
    "pickle": (lambda model, _: pickle.dumps(model), "full_state_dict"),
    "deepcopy": (lambda model, _: copy.deepcopy(model), "full_state_dict"),
    "data": (lambda model, _: model[0].weight.data.mul_(2), "data needs the parameter 0.weight"),
}


def _refuse() -> None:
    for name, (use, words) in _REFUSED_AT_3.items():
        model, optimizer = _build(3)
        with pytest.raises(RuntimeError, match=words):
            use(model, optimizer)
        optimizer.zero_grad()
        _step(model, optimizer, 1)
        assert_ranks_agree(model, name)
    for stage in (1, 2):
        with pytest.raises(RuntimeError, match=r"bias .*float32.*expected.*float64.*convert it before"):
            _to_float(*_build(stage))


def test_what_needs_the_whole_model_is_refused_with_the_remedy() -> None:
    ranks.run(2, _refuse)


class _Leaks(nn.Module):
    """Sends its result out where nobody can find it."""

    def __init__(self, sink: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.gain, self.sink = nn.Parameter(torch.ones(6, dtype=_F64)), sink

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        self.sink((x * self.gain).sum())
        return x


def _use_released_weights() -> None:
    found: list[Tensor] = []
    model = nn.Sequential(_Leaks(found.append), _Leaks(found.append))
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": 3})
    model(_x(0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found[0].backward()
    optimizer.zero_grad()
    found.clear()
    _step(model, optimizer, 1)
    assert_ranks_agree(model)


def test_autograd_refuses_weights_that_have_been_released() -> None:
    """It read memory that had been given back."""
    ranks.run(2, _use_released_weights)


# --- allowed ---


def _convert_to_the_same(model: nn.Module, optimizer: zero_shard.AdamW) -> None:
    model.to("cpu").to(_F64).double().cpu()
    model.to(device="cpu", dtype=_F64, non_blocking=True)
    model.to("cpu:1").to(device=torch.device("cpu", 1))  # accelerate's name for the CPU of rank 1
    model.train().eval().train()


def _freeze_and_thaw(model: nn.Module, optimizer: zero_shard.AdamW) -> None:
    model.requires_grad_(False)
    assert not model(_x(5)).requires_grad
    model.requires_grad_(True)


def _same_after(change: Callable[[nn.Module, zero_shard.AdamW], None], stage: int) -> None:
    (model, optimizer), (twin, twin_optimizer) = _build(stage), _build(stage)
    change(model, optimizer)
    _step(model, optimizer, 1)
    _step(twin, twin_optimizer, 1)
    with zero_shard.gathered(model), zero_shard.gathered(twin):
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"{change}, stage {stage}"


def _independent_copies(stage: int) -> None:
    """A copy of a model whose optimizer has hooks is an ordinary model."""
    model, optimizer = _build(stage)
    model(_x(1)).square().sum().backward()  # with gradients in place
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    weights = [param.detach().clone() for param in model.parameters()]
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert not any(param._backward_hooks or param._post_accumulate_grad_hooks for param in twin.parameters())
        twin.zero_grad()
        plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
        _step(twin, plain, 2 + dist.get_rank())
        for param, weight in zip(model.parameters(), weights, strict=True):
            assert torch.equal(param, weight) and not torch.equal(next(twin.parameters()), weights[0])
    optimizer.step()
    assert_ranks_agree(model)


def _allow() -> None:
    for stage in range(4):
        for change in (_convert_to_the_same, _freeze_and_thaw):
            _same_after(change, stage)
        if stage < 3:
            _independent_copies(stage)


def test_what_changes_nothing_and_copies_are_allowed() -> None:
    ranks.run(2, _allow)


# --- torch.func ---


def _sum_of_squares(model: nn.Module, params: Any, x: Tensor) -> Tensor:
    return torch.func.functional_call(model, params, (x,)).square().sum()


def _flat(grads: dict[str, Tensor]) -> Tensor:
    return torch.cat([grad.flatten() for grad in grads.values()])


_FUNCTIONS: dict[str, Callable[[nn.Module], Tensor]] = {
    "vmap": lambda m: torch.vmap(m)(_x(1)),
    "grad of inputs": lambda m: torch.func.grad(lambda x: m(x).square().sum())(_x(1)),
    "grad of parameters": lambda m: _flat(
        torch.func.grad(lambda params: _sum_of_squares(m, params, _x(1)))(dict(m.named_parameters()))
    ),
    "gradients per sample": lambda m: _flat(
        torch.vmap(torch.func.grad(lambda params, x: _sum_of_squares(m, params, x)), in_dims=(None, 0))(
            dict(m.named_parameters()), _x(1)
        )
    ),
    "jacrev": lambda m: torch.func.jacrev(m)(_x(1)),
}


def _transform(stage: int, is_gathered: bool) -> None:
    model, plain = _net(), _net()
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage})
    for name, function in _FUNCTIONS.items():
        with zero_shard.gathered(model) if is_gathered else nullcontext():
            got = function(model)
        torch.testing.assert_close(got, function(plain), rtol=1e-12, atol=1e-12, msg=f"{name}, stage {stage}")
    _step(model, optimizer, 1)
    assert_ranks_agree(model)


def test_torch_func_sees_the_model_as_it_is() -> None:
    for stage, is_gathered in ((2, False), (3, False), (3, True)):
        ranks.run(2, _transform, stage, is_gathered)
