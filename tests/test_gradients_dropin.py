"""What people do with ``p.grad`` between ``backward()`` and ``step()``: one script, plain torch and every stage."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from models import Cells, OneModule, linear_use
from oracle import (
    Tolerance,
    assert_ranks_agree,
    assert_snapshots_close,
    full_grad,
    mean_over_ranks,
    plain_snapshot,
    sharded_snapshot,
)
from torch import Tensor, nn

import zero_shard

_F64 = torch.float64
_EXACT64 = Tolerance(1e-12, 1e-13)
_CONFIG = {"bucket_mib": 1e-4}
Params = list[nn.Parameter]
Body = Callable[[Params, torch.optim.Optimizer], Any]

every_stage = pytest.mark.parametrize("stage", range(4))


def _values(dtype: torch.dtype = _F64) -> list[Tensor]:
    """Sizes below and above the number of ranks, one parameter of one number, one that is not row-major."""
    torch.manual_seed(3)
    shapes = ((7, 5), (1,), (), (33,), (6, 4))
    values = [torch.randn(shape, dtype=_F64) for shape in shapes]
    values[-1] = torch.randn(4, 6, dtype=_F64).t()
    return [value.to(dtype) for value in values]


def _gradient(rank: int, step: int, number: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + number)
    return torch.randn(like.shape, dtype=_F64, generator=generator) * (rank + 1)


def _loss(model: nn.Module, rank: int, step: int, factor: float = 1.0) -> Tensor:
    uses = {}
    for number, weight in enumerate(model.weights):
        use = linear_use(factor * _gradient(rank, step, number, weight))
        uses[number] = use
    return model(uses)


def _plain_backward(model: nn.Module, step: int, world_size: int) -> None:
    mean_over_ranks(model.parameters(), [[lambda r=r: _loss(model, r, step)] for r in range(world_size)])


def _noise(number: int, like: Tensor) -> Tensor:
    return _gradient(7, 7, number, like).to(like.dtype)


# --- what is done with a gradient; each returns what it has read ---


def _clip_norm(order: float, foreach: bool | None) -> Body:
    def body(params: Params, optimizer: torch.optim.Optimizer) -> Any:
        norm = torch.nn.utils.clip_grad_norm_(params, 0.7, order, error_if_nonfinite=True, foreach=foreach)
        again = torch.nn.utils.clip_grad_norm_(iter(params), 1e9, order, foreach=foreach)
        assert type(norm) is Tensor and norm.shape == ()
        return norm, again

    return body


def _clip_with_norm(params: Params, optimizer: torch.optim.Optimizer) -> Any:
    total = torch.nn.utils.get_total_norm([p.grad for p in params], 2.0)
    torch.nn.utils.clip_grads_with_norm_(params, 0.3, total)
    return total, torch.nn.utils.get_total_norm([p.grad for p in params], 1.0, foreach=True)


def _clip_value(foreach: bool | None) -> Body:
    def body(params: Params, optimizer: torch.optim.Optimizer) -> Any:
        torch.nn.utils.clip_grad_value_(params, 0.4, foreach=foreach)
        return [p.grad.abs().max() for p in params]

    return body


_READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "norm(2).item": lambda g: g.norm(2).item(),
    "torch.norm": lambda g: torch.norm(g, 1),
    "vector_norm": lambda g: torch.linalg.vector_norm(g, math.inf),
    "norm of a value": lambda g: (g * 3).norm(),
    "sum": lambda g: g.sum(),
    "squares": lambda g: (g**2).sum(),
    "mean": lambda g: g.mean().item(),
    "min, max": lambda g: (g.min(), g.max(), g.amax(), torch.amin(g)),
    "abs max": lambda g: g.abs().max(),
    "abs mean": lambda g: g.data.abs().mean(),
    "std": lambda g: g.std(unbiased=False),
    "var": lambda g: g.var(correction=0),
    "rms": lambda g: g.detach().pow(2).mean().sqrt(),
    "isnan": lambda g: g.isnan().any().item(),
    "isfinite": lambda g: torch.isfinite(g).all(),
    "isinf": lambda g: torch.isinf(g).any(),
    "compare": lambda g: (g > 0).sum(),
    "count": lambda g: torch.count_nonzero(g.clamp(min=0)),
    "all": lambda g: (g == g).all(),
    "prod": lambda g: torch.tanh(g).prod(),
    "allclose": lambda g: (torch.allclose(g, g.clone()), torch.allclose(g, g + 1)),
    "equal": lambda g: (torch.equal(g, g.clone()), torch.equal(g, g * 2)),
    "dot": lambda g: (g * _noise(1, g)).sum(),
    "row": lambda g: (g - _noise(2, g)[:1]).sum() if g.dim() else g.sum(),
    "where": lambda g: torch.where(_noise(1, g) > 0, g, 0.0).sum(),
    "float": lambda g: g.float().sum().dtype == torch.float32,
    "like": lambda g: (torch.ones_like(g).sum(), torch.full_like(g, 2.0).sum(), g.new_zeros(3)),
    "deepcopy": lambda g: copy.deepcopy(g).sum(),
    "metadata": lambda g: (
        [*g.shape, g.numel(), g.dim(), *str((g.dtype, g.device, g.layout)).encode()],
        [g.is_sparse, g.requires_grad, g.is_leaf, g.grad_fn is None, g.is_floating_point()],
    ),
    "item": lambda g: g.item() if g.numel() == 1 else 0.0,
    "foreach": lambda g: (torch._foreach_norm([g], 1)[0], torch._foreach_max(torch._foreach_abs([g]))[0]),
    "foreach sum": lambda g: [x.sum() for x in torch._foreach_add(torch._foreach_pow([g], 2), [_noise(1, g)])],
}


def _read_all(params: Params, optimizer: torch.optim.Optimizer) -> Any:
    return {name: [read(p.grad) for p in params] for name, read in _READS.items()}


_CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda g, full: g.mul_(0.5),
    "mul_ by a 0-dim tensor": lambda g, full: g.mul_(torch.tensor(0.5)),
    "mul_ by a full tensor": lambda g, full: g.mul_(full),
    "div_": lambda g, full: g.div_(3.0),
    "add_": lambda g, full: g.add_(full),
    "add_ with alpha": lambda g, full: g.add_(full, alpha=0.3),
    "add_ of a row": lambda g, full: g.add_(full[0] if full.dim() else full),
    "sub_": lambda g, full: g.sub_(full),
    "neg_": lambda g, full: g.neg_(),
    "zero_": lambda g, full: g.zero_(),
    "fill_": lambda g, full: g.fill_(0.25),
    "copy_": lambda g, full: g.copy_(full),
    "clamp_": lambda g, full: g.clamp_(-0.1, 0.2),
    "sign_": lambda g, full: g.sign_(),
    "abs_": lambda g, full: g.abs_(),
    "nan_to_num_": lambda g, full: g.div_(torch.zeros(())).nan_to_num_(0.0, 1.0, -1.0),
    "addcmul_": lambda g, full: g.addcmul_(full, g, value=0.2),
    "lerp_": lambda g, full: g.lerp_(full, 0.1),
    "data": lambda g, full: g.data.mul_(0.5),
    "detach": lambda g, full: g.detach().add_(1.0),
    "masked_fill_": lambda g, full: g.masked_fill_(full > 0, 0.0),
    "a mask": lambda g, full: g.__setitem__(g > 0, 0.5),
    "rows": lambda g, full: g.__setitem__(slice(0, 1), 0.5) if g.dim() else None,
    "rows of a tensor": lambda g, full: g.__setitem__(slice(0, 2), full[:2]) if g.dim() else None,
    "itself": lambda g, full: g.add_(g * g, alpha=0.1),
    "seeded noise": lambda g, full: g.add_(torch.randn_like(g), alpha=0.1),
    "seeded noise in place": lambda g, full: g.normal_(),
    "dropout": lambda g, full: g.copy_(nn.functional.dropout(g, 0.5)),
    "foreach mul": lambda g, full: torch._foreach_mul_([g], 0.5),
    "foreach mul by a tensor": lambda g, full: torch._foreach_mul_([g], torch.tensor(0.5)),
    "foreach mul by numbers": lambda g, full: torch._foreach_mul_([g], [0.5]),
    "foreach add": lambda g, full: torch._foreach_add_([g], [full], alpha=0.5),
    "foreach lerp": lambda g, full: torch._foreach_lerp_([g], [full], 0.5),
    "foreach copy": lambda g, full: torch._foreach_copy_([g], [full]),
    "foreach zero": lambda g, full: torch._foreach_zero_([g]),
}


def _change(name: str) -> Body:
    def body(params: Params, optimizer: torch.optim.Optimizer) -> Any:
        torch.manual_seed(11)
        for number, param in enumerate(params):
            _CHANGES[name](param.grad, _noise(number, param.grad))
        return [p.grad.sum() for p in params]

    return body


def _put_back(params: Params, optimizer: torch.optim.Optimizer) -> Any:
    for param in params[:2]:
        param.grad = param.grad * 0.5
    params[2].grad = params[2].grad.clone()
    params[3].grad = params[3].grad.detach()
    params[4].grad = torch.zeros_like(params[4].grad)
    params[0].grad.mul_(3.0)
    params[4].grad.add_(1.0)
    return [p.grad.norm() for p in params]


def _put_back_full(params: Params, optimizer: torch.optim.Optimizer) -> Any:
    for param in params:
        full = param.grad.full() if isinstance(param.grad, zero_shard.ShardedGrad) else param.grad
        param.grad = full * 0.5


def _none_for_some(params: Params, optimizer: torch.optim.Optimizer) -> Any:
    params[0].grad = None
    params[2].grad = None
    return [None if p.grad is None else p.grad.norm() for p in params]


def _momentum(params: Params, optimizer: torch.optim.Optimizer) -> Any:
    """A second momentum kept beside the optimizer, from step to step."""
    kept = optimizer.__dict__.setdefault("kept", {})
    for number, param in enumerate(params):
        if number not in kept:
            kept[number] = torch.zeros_like(param.grad)
        kept[number].mul_(0.9).add_(param.grad)
        param.grad.copy_(kept[number])


def _zero_then_put_back(params: Params, optimizer: torch.optim.Optimizer) -> Any:
    """Gradients that are kept as copies outlive zero_grad."""
    copies = [param.grad.clone() for param in params]
    optimizer.zero_grad()
    for param, each in zip(params, copies, strict=True):
        param.grad = each
    return [p.grad.norm() for p in params]


_BODIES: dict[str, Body] = {
    **{
        f"clip_grad_norm_ {order} {foreach}": _clip_norm(order, foreach)
        for order in (0.5, 1.0, 2.0, 3.0, math.inf)
        for foreach in (None, True, False)
    },
    "clip_grads_with_norm_": _clip_with_norm,
    **{f"clip_grad_value_ {foreach}": _clip_value(foreach) for foreach in (None, True, False)},
    **{name: _change(name) for name in _CHANGES},
    "reading": _read_all,
    "values put back": _put_back,
    "full tensors put back": _put_back_full,
    "None for some": _none_for_some,
    "zero_grad, then put back": _zero_then_put_back,
}


def _everything(stage: int) -> None:
    """One run, in which each step is another body; gradients do not depend on the weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain_model = Cells(_values()), Cells(_values())
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.01, module=model, config={**_CONFIG, "stage": stage})
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.01)
    for step, (name, body) in enumerate([*_BODIES.items(), ("momentum", _momentum), ("momentum", _momentum)]):
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        _plain_backward(plain_model, step, world_size)
        got, want = body(model.weights, optimizer), body(plain_model.weights, plain)
        if name != "full tensors put back":  # those count as this rank's, and are averaged in step()
            got = [got, *map(full_grad, model.weights)]
            want = [want, *(weight.grad for weight in plain_model.weights)]
        optimizer.step()
        plain.step()
        _assert_same(got, want, f"{name}, stage {stage}")
    snapshot = sharded_snapshot(model, optimizer)
    if rank == 0:
        assert_snapshots_close(snapshot, plain_snapshot(plain_model, plain), Tolerance(1e-10, 1e-12), f"stage {stage}")
    assert_ranks_agree(model)


def _assert_same(got: Any, want: Any, where: str) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13, msg=lambda text: f"{where}: {text}")


@every_stage
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_read_and_changed_as_with_plain_torch(world_size: int, stage: int) -> None:
    ranks.run(world_size, _everything, stage)


# --- a gradient that is not finite ---


def _nonfinite(stage: int) -> None:
    rank = dist.get_rank()
    model = Cells(_values())
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.01, module=model, config={**_CONFIG, "stage": stage})
    _loss(model, rank, 0, math.inf if rank == 0 else 1.0).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    for weight in model.weights:
        assert not torch.isfinite(weight.grad).all()
        assert not weight.grad.norm().isfinite()
    grad = model.weights[0].grad
    grad[torch.isinf(grad)] = 0.0
    assert torch.isfinite(grad).all()
    optimizer.zero_grad()


@every_stage
def test_a_gradient_that_is_not_finite_is_seen_on_all_ranks(stage: int) -> None:
    ranks.run(2, _nonfinite, stage)


# --- GradScaler ---


def _scaled_run(stage: int, bad_rank: int, bad_element: int, is_clipped: bool) -> None:
    """O10 and on: overflows in steps 0 and 5 on one rank, in one element; the scale grows every two good steps."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def loss(model: nn.Module, r: int, step: int) -> Tensor:
        gradient = torch.full((2,), 1.0 + r)
        if r == bad_rank and step in (0, 5):
            gradient[bad_element] = math.inf
        return model({0: linear_use(gradient), 1: linear_use(torch.full((3, 3), 0.5 + step))})

    def make() -> tuple[nn.Module, torch.amp.GradScaler]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
        return Cells([torch.ones(2), torch.ones(3, 3)]), scaler

    def finish(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> list[float]:
        read = []
        if is_clipped:
            scaler.unscale_(optimizer)
            read.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scaler.step(optimizer)
        scaler.update()
        return [*read, scaler.get_scale()]

    (model, scaler), (plain_model, plain_scaler) = make(), make()
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.1, module=model, config={**_CONFIG, "stage": stage})
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.1)

    def plain_backward(step: int) -> None:
        losses = [[lambda r=r: plain_scaler.scale(loss(plain_model, r, step))] for r in range(world_size)]
        mean_over_ranks(plain_model.parameters(), losses)

    for step in range(10):
        optimizer.zero_grad()
        scaler.scale(loss(model, rank, step)).backward()
        got = finish(model, optimizer, scaler)
        plain_backward(step)
        want = finish(plain_model, plain, plain_scaler)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0, equal_nan=True)
        snapshot = sharded_snapshot(model, optimizer)
        if rank == 0:
            assert_snapshots_close(snapshot, plain_snapshot(plain_model, plain), None, f"step {step}", step + 1)
        if step == 0:
            assert scaler.get_scale() == 2.0**15 and not optimizer.state
            with zero_shard.gathered(model):
                assert all(torch.equal(weight, torch.ones_like(weight)) for weight in model.weights)
    assert_ranks_agree(model)


def _scaled_runs(stage: int) -> None:
    for bad_rank in range(dist.get_world_size()):
        for bad_element in range(2):
            _scaled_run(stage, bad_rank, bad_element, is_clipped=bad_element == 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no GPU: torch switches the scaler off
        scaler = torch.amp.GradScaler("cuda")
    if not scaler.is_enabled():
        model = Cells([torch.ones(2)])
        optimizer = zero_shard.AdamW(model.parameters(), lr=0.1, module=model, config={**_CONFIG, "stage": stage})
        scaler.scale(model({0: torch.sum})).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        with zero_shard.gathered(model):
            torch.testing.assert_close(model.weights[0].detach(), torch.full((2,), 0.899))


@every_stage
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_grad_scaler_skips_backs_off_and_grows_as_with_plain_torch(world_size: int, stage: int) -> None:
    ranks.run(world_size, _scaled_runs, stage)


# --- references, hooks, dtypes, replicas ---


def _references(stage: int) -> None:
    model = Cells(_values())
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.01, module=model, config={**_CONFIG, "stage": stage})
    ids = []
    for step in range(3):
        optimizer.zero_grad()
        _loss(model, 0, step).backward()
        optimizer.step()
        ids.append([id(weight.grad) for weight in model.weights])
    assert ids[0] == ids[1] == ids[2], "a gradient that nobody keeps is handed out again"
    kept = [weight.grad for weight in model.weights]
    copies, before = [grad.clone() for grad in kept], [grad.norm() for grad in kept]
    optimizer.zero_grad()
    for again in range(2):
        for number, grad in enumerate(kept):
            assert f"cells.{number}.weight" in repr(grad)
            for read in (lambda g: g.sum(), lambda g: g.norm(), lambda g: g.mul_(2.0), lambda g: g.part):
                with pytest.raises(RuntimeError, match=rf"cells\.{number}\.weight was taken before .*clone"):
                    read(grad)
            torch.testing.assert_close(copies[number].norm(), before[number])
        if not again:
            _loss(model, 0, 5).backward()
    assert all(weight.grad is not grad for weight, grad in zip(model.weights, kept, strict=True))
    model.weights[0].grad.add_(torch.ones(7, 5, dtype=_F64, requires_grad=True))  # torch gives it a graph
    optimizer.zero_grad()
    _loss(model, 0, 6).backward()
    assert not model.weights[0].grad.requires_grad
    model.weights[0].grad = None  # on all ranks
    optimizer.step()
    if stage == 1:
        pending = model.weights[1].grad
        optimizer.zero_grad()
        _loss(model, 0, 6).backward()
        pending = model.weights[1].grad
        model.weights[1].grad = None
        with pytest.raises(RuntimeError, match="clone"):
            pending.sum()
    model.weights[3].grad = torch.zeros_like(model.weights[3].grad)
    assert float(model.weights[3].grad.norm()) == 0.0
    optimizer.zero_grad(set_to_none=False)
    assert float(model.weights[3].grad.norm()) == 0.0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_reference_from_before_zero_grad_raises_and_a_copy_stays(stage: int) -> None:
    ranks.run(2, _references, stage)


def _wrong_owner(stage: int) -> None:
    model = OneModule([torch.ones(40, dtype=_F64), torch.ones(40, dtype=_F64)])
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={**_CONFIG, "stage": stage})
    model({0: torch.sum, 1: torch.sum}).backward()
    with pytest.raises(NotImplementedError, match=r"two parameters.*weights.0, weights.1"):
        model.weights[0].grad + model.weights[1].grad
    model.weights[0].grad = model.weights[1].grad * 1.0
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_gradient_of_another_parameter_is_refused(stage: int) -> None:
    for error in ranks.run_expecting_errors(2, _wrong_owner, stage):
        assert isinstance(error, NotImplementedError)
        assert "weights.0" in str(error) and "weights.1" in str(error) and "full()" in str(error)


def _hooks(stage: int) -> list[list[float]]:
    """Hooks after accumulation, registered before and after the optimizer was built; one changes the gradient."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seen: list[list[float]] = []

    def watch(model: nn.Module) -> None:
        for number, weight in enumerate(model.weights):

            def hook(param: nn.Parameter, number: int = number) -> None:
                assert type(param.grad) is Tensor
                seen.append([number, float(param.grad.norm())])

            weight.register_post_accumulate_grad_hook(hook)

    def halve(model: nn.Module) -> None:
        model.weights[0].register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0.5))
        model.weights[3].register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    model, plain_model = Cells(_values()), Cells(_values())
    watch(model)
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.01, module=model, config={**_CONFIG, "stage": stage})
    watch(model)
    halve(model)
    halve(plain_model)
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        optimizer.step()
        _plain_backward(plain_model, step, world_size)
        plain.step()
    snapshot = sharded_snapshot(model, optimizer)
    if rank == 0:
        assert_snapshots_close(snapshot, plain_snapshot(plain_model, plain), _EXACT64, f"stage {stage}")
    want = [
        [number, float(_gradient(rank, step, number, weight).norm())]
        for step in range(2)
        for number, weight in enumerate(model.weights)
        for _ in range(2)
    ]
    torch.testing.assert_close(sorted(seen), sorted(want), rtol=1e-12, atol=0)
    return seen


@every_stage
@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_after_accumulation_see_the_gradient_of_their_rank(world_size: int, stage: int) -> None:
    ranks.run(world_size, _hooks, stage)


def _replicas_and_dtypes() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float32, 1e-5), (_F64, 1e-12)):
        for config in ({"stage": 0}, {"stage": 2, "shard_size": 2}, {"stage": 3, "shard_size": 1}, {"stage": 1}):
            model = Cells(_values(dtype))
            optimizer = zero_shard.AdamW(model.parameters(), lr=0.01, module=model, config={**_CONFIG, **config})
            _loss(model, rank, 0).backward()
            for number, weight in enumerate(model.weights):
                mean = torch.zeros(weight.shape, dtype=_F64)
                for r in range(world_size):
                    mean += _gradient(r, 0, number, weight).to(dtype) / world_size
                grad = weight.grad
                got = [grad.sum(), (grad * 2).norm(), grad.abs().mean(), (grad > 0).sum(), (grad + 1).square().sum()]
                want = [mean.sum(), (mean * 2).norm(), mean.abs().mean(), (mean > 0).sum(), (mean + 1).square().sum()]
                for each, expected in zip(got, want, strict=True):
                    where = f"{dtype} {config} {number}"
                    torch.testing.assert_close(
                        each.double(), expected.double(), rtol=tolerance, atol=tolerance, msg=lambda t, w=where: w + t
                    )
                    assert each.dtype == (torch.int64 if each.dtype == torch.int64 else dtype)
                weight.grad = (grad * 2.0).to(dtype)
                full = weight.grad.full() if isinstance(weight.grad, zero_shard.ShardedGrad) else weight.grad
                torch.testing.assert_close(full.double(), 2 * mean, rtol=tolerance, atol=tolerance)
            optimizer.step()
            assert_ranks_agree(model, f"{dtype} {config}")


def test_replicas_count_once_and_16_bit_gradients_keep_their_dtype() -> None:
    ranks.run(4, _replicas_and_dtypes)
