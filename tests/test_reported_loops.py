"""Training loops in which other sharded optimizers went wrong: one launch for each number of ranks, all stages.

Every loop runs with plain AdamW on the mean gradient over the ranks, then with ours; weights, moments and step counts
must be the same.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import PlainWithMean, assert_ranks_agree, assert_trained_alike
from test_habits import _mlp, _x
from torch import Tensor, nn

import zero_shard

D = torch.float64
Loop = Callable[[nn.Module, Any, int], None]


def _is_ours(optimizer: Any) -> bool:
    return isinstance(optimizer, zero_shard.AdamW)


def _backward(model: nn.Module, optimizer: Any, step: int) -> None:
    model(_x(step)).square().sum().backward()
    if not _is_ours(optimizer):
        optimizer.average()


# --- gradients that outlive the step ---


def _backward_on_top(model: nn.Module, optimizer: Any, step: int) -> None:
    """Nobody calls zero_grad: the mean gradients of all backward passes so far are summed."""
    if _is_ours(optimizer):
        return _backward(model, optimizer, step)
    before = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
    optimizer.zero_grad()
    _backward(model, optimizer, step)
    for param, old in zip(model.parameters(), before, strict=True):
        param.grad = param.grad if old is None else param.grad + old
    return None


def _clip(model: nn.Module, optimizer: Any, limit: float) -> None:
    if _is_ours(optimizer):
        optimizer.clip_grad_norm_(limit)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), limit)


def _never_zeroed(model: nn.Module, optimizer: Any, step: int) -> None:
    _backward_on_top(model, optimizer, step)
    optimizer.step()


def _never_zeroed_and_clipped(model: nn.Module, optimizer: Any, step: int) -> None:
    """What a clip has scaled stays scaled when the next backward adds to it."""
    _backward_on_top(model, optimizer, step)
    _clip(model, optimizer, 0.5)
    optimizer.step()


def _stepped_twice_and_clipped(model: nn.Module, optimizer: Any, step: int) -> None:
    _backward(model, optimizer, step)
    _clip(model, optimizer, 0.1)
    for _ in range(3):
        optimizer.step()
    model.zero_grad()


def _set_by_hand_and_clipped(model: nn.Module, optimizer: Any, step: int) -> None:
    """A clip must not reach the gradients of the next step, which nobody has dropped for."""
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full(param.shape, (step + 1.0) * (number + 1 + dist.get_rank()), dtype=D)
    if not _is_ours(optimizer):
        optimizer.average()
    _clip(model, optimizer, 0.3)
    optimizer.step()


def _stepped_before_and_after(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.step()  # with nothing
    _backward(model, optimizer, step)
    optimizer.step()
    model.zero_grad()
    optimizer.step()
    _backward(model, optimizer, step + 7)
    optimizer.zero_grad()
    optimizer.step()


# --- optimizer.state, edited ---


def _edited_state(edit: Callable[[nn.Module, Any], None], when: int = 1) -> Loop:
    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        _backward(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        if step == when:
            edit(model, optimizer)

    return loop


def _replace_steps(model: nn.Module, optimizer: Any) -> None:
    for entry in optimizer.state.values():
        entry["step"] = torch.tensor(0.0)


def _replace_moments(model: nn.Module, optimizer: Any) -> None:
    """By tensors of the shape of what was there, and by ones of the parameter's."""
    for number, param in enumerate(model.parameters()):
        entry = optimizer.state[param]
        entry["exp_avg"] = torch.zeros_like(entry["exp_avg"])
        if number % 2:
            entry["exp_avg_sq"] = torch.linspace(1, 2, param.numel(), dtype=D).view(param.shape)


def _replace_entries(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        entry = optimizer.state[param]
        copied = {name: value.clone() for name, value in entry.items()}
        optimizer.state[param] = {**copied, "exp_avg": copied["exp_avg"] * 3, "step": copied["step"] + 5}


def _empty_some(model: nn.Module, optimizer: Any) -> None:
    first, second, third, *_ = model.parameters()
    optimizer.state[first] = {}
    optimizer.state[second].clear()
    optimizer.state.pop(third)


def _replace_all(model: nn.Module, optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def _warm_start(model: nn.Module, optimizer: Any, step: int) -> None:
    """State is given before there is any."""
    if step == 0:
        for param in model.parameters():
            optimizer.state[param].update(
                step=torch.tensor(3.0),
                exp_avg=torch.zeros(param.shape, dtype=D),
                exp_avg_sq=torch.ones(param.shape, dtype=D),
            )
    _backward(model, optimizer, step)
    optimizer.step()
    optimizer.zero_grad()


def _gradients_by_function(model: nn.Module, optimizer: Any, step: int) -> None:
    """torch.autograd.grad leaves param.grad alone: None is None, whatever the stage."""
    gradients = torch.autograd.grad(model(_x(step)).square().sum(), list(model.parameters()))
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        param.grad = gradient if param.grad is None else param.grad + gradient
    if not _is_ours(optimizer):
        optimizer.average()
    optimizer.step()
    optimizer.zero_grad()


LOOPS: dict[str, Loop] = {
    "autograd.grad of parameters": _gradients_by_function,
    "never zeroed": _never_zeroed,
    "never zeroed, clipped": _never_zeroed_and_clipped,
    "clipped, stepped three times": _stepped_twice_and_clipped,
    "set by hand, clipped": _set_by_hand_and_clipped,
    "steps without gradients": _stepped_before_and_after,
    "step counts replaced": _edited_state(_replace_steps),
    "moments replaced": _edited_state(_replace_moments),
    "entries replaced": _edited_state(_replace_entries),
    "entries emptied": _edited_state(_empty_some),
    "the whole state replaced": _edited_state(_replace_all),
    "state given before the first step": _warm_start,
}


def _compare(stage: int, loop: Loop, build: Callable[[int], nn.Module] = lambda _: _mlp()) -> None:
    plain_model, model = build(0), build(dist.get_rank())
    plain = PlainWithMean(plain_model.parameters(), lr=0.05, weight_decay=0.1)
    config = {"stage": stage, "bucket_mib": 1e-4}
    ours = zero_shard.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, module=model, config=config)
    for step in range(3):
        loop(plain_model, plain, step)
        loop(model, ours, step)
    assert_trained_alike(model, ours, plain_model, plain)
    assert_ranks_agree(model)


def _compare_all() -> list[str]:
    failures = []
    for name, loop in LOOPS.items():
        for stage in range(4):
            try:
                _compare(stage, loop)
            except Exception:
                failures.append(f"{name}, stage {stage}:\n{traceback.format_exc()}")
    return failures


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loops_give_what_plain_adamw_gives(world_size: int) -> None:
    for failures in ranks.run(world_size, _compare_all):
        assert not failures, "\n".join(failures)


# --- frozen parameters that nobody trains ---


class _Quantised(nn.Module):
    """Frozen parameters of every other dtype, in units and outside, beside trained ones; ranks start differently."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(4, 4, dtype=D) for _ in range(2))
        frozen = {
            "codes": torch.tensor([[1, 2, 3, 4]], dtype=torch.int8),
            "wide": torch.tensor([5, 6], dtype=torch.int16),
            "order": torch.tensor([3, 1, 2, 0]),
            "phase": torch.tensor(1 + 2j),
        }
        for number, (name, value) in enumerate(frozen.items()):
            owner = self.blocks[number] if number < 2 else self
            owner.register_parameter(name, nn.Parameter(value + 4 * offset, requires_grad=False))
        self.register_buffer("mask", torch.tensor([True, False, offset == 0]))

    def forward(self, x: Tensor) -> Tensor:
        """Return something that needs all of them."""
        x = self.blocks[0](x)[:, self.order % 4] * self.blocks[0].codes.to(D)
        return self.blocks[1](x) * self.phase.imag.to(D) * self.blocks[1].wide.sum()


def _through_a_checkpoint(path: str) -> None:
    for stage in range(4):
        _compare(stage, _edited_state(lambda *_: None), _Quantised)
        model, loaded = _Quantised(dist.get_rank()), _Quantised(9)
        optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage})
        model(_x(0)).sum().backward()
        optimizer.step()
        zero_shard.save(f"{path}/{stage}", model, optimizer)
        later = zero_shard.AdamW(loaded.parameters(), module=loaded, config={"stage": 3 - stage})
        zero_shard.load(f"{path}/{stage}", loaded, later)
        want, got = zero_shard.full_state_dict(model), zero_shard.full_state_dict(loaded)
        assert got.keys() == want.keys()
        assert all(got[name].dtype == value.dtype and torch.equal(got[name], value) for name, value in want.items())
        assert torch.equal(model.order, _Quantised(0).order) and torch.equal(model.mask, _Quantised(0).mask)


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_parameters_of_other_dtypes_are_carried_along(world_size: int, tmp_path: Path) -> None:
    """Indices and quantised weights were refused, at stage 3 even where nobody had given them to the optimizer."""
    ranks.run(world_size, _through_a_checkpoint, str(tmp_path))


# --- what is refused, on all ranks ---


def _refuse_uninitialised() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    _raises_on_all(lambda: zero_shard.AdamW(model.parameters(), module=model), ValueError, "0.weight has no shape yet")


def test_parameters_without_a_shape_are_refused_by_name() -> None:
    ranks.run(2, _refuse_uninitialised)


def _raises_on_all(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
    dist.barrier()


def _refuse_settings() -> None:
    """Settings that the update does not know are not ignored: Adam's weight decay, a differentiable step."""
    for stage in range(4):
        for name, value in (("decoupled_weight_decay", False), ("differentiable", True)):
            model = _mlp()
            optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage})
            optimizer.param_groups[0][name] = value
            model(_x(0)).sum().backward()
            before = optimizer.full_state_dict()
            _raises_on_all(optimizer.step, NotImplementedError, name)
            assert optimizer.full_state_dict().keys() == before.keys()
            groups = [{"params": list(_mlp().parameters()), name: value}]
            _raises_on_all(lambda groups=groups: zero_shard.AdamW(groups, config={}), NotImplementedError, name)


def test_settings_that_have_no_effect_are_refused() -> None:
    ranks.run(2, _refuse_settings)


def _refuse_state(stages: tuple[int, ...]) -> None:
    for stage in stages:
        model = _mlp()
        optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage})
        optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(4, 4, dtype=D)
        model(_x(0)).sum().backward()
        _raises_on_all(optimizer.step, ValueError, "0.weight has no 'step'")
        optimizer.state.clear()
        optimizer.step()
        optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(3, dtype=D)
        _raises_on_all(optimizer.state_dict, ValueError, r"exp_avg of parameter .*0.weight.* has shape \(3,\)")


def test_state_that_does_not_fit_is_refused_by_name() -> None:
    ranks.run(2, _refuse_state, (0, 2, 3))


def _different_numbers_of_backwards(stage: int, is_step_left_out: bool) -> None:
    model = _mlp()
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage})
    for step in range(3):
        for _ in range(1 if is_step_left_out else 1 + dist.get_rank()):
            model(_x(step)).square().sum().backward()
        if step != 1 or dist.get_rank() == 0 or not is_step_left_out:
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("is_step_left_out", [False, True], ids=["backward", "step"])
def test_ranks_in_different_steps_all_raise(stage: int, is_step_left_out: bool) -> None:
    """Gradients of one step were added to those of the next one, without a word."""
    errors = ranks.run_expecting_errors(2, _different_numbers_of_backwards, stage, is_step_left_out)
    for error in errors:
        assert "gradients of different steps have met" in str(error), errors


def _different_numbers_under_no_sync() -> None:
    """What the message recommends: the last backward alone is not under ``no_sync``."""
    for stage in range(3):
        plain_model, model = _mlp(), _mlp()
        plain = PlainWithMean(plain_model.parameters(), lr=0.05)
        ours = zero_shard.AdamW(model.parameters(), lr=0.05, module=model, config={"stage": stage})
        for step in range(3):
            num_micros = 1 + (dist.get_rank() + step) % 3
            for micro in range(num_micros):
                with ours.no_sync() if micro < num_micros - 1 else contextlib.nullcontext():
                    model(_x(10 * step + micro)).square().sum().backward()
                plain_model(_x(10 * step + micro)).square().sum().backward()
            plain.average()
            for optimizer in (plain, ours):
                optimizer.step()
                optimizer.zero_grad()
        assert_trained_alike(model, ours, plain_model, plain)


@pytest.mark.parametrize("world_size", [2, 4])
def test_micro_batches_under_no_sync_may_differ_in_number(world_size: int) -> None:
    ranks.run(world_size, _different_numbers_under_no_sync)
