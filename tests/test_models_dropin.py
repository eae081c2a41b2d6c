"""What people do with modules and autograd, unchanged at every stage, against plain AdamW on the mean gradient."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import Tolerance, assert_ranks_agree, assert_snapshots_close, plain_snapshot, sharded_snapshot
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import zero_shard

_F64 = torch.float64
_HYPER: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
_CONFIGS: list[dict[str, Any]] = [
    {"stage": 2, "bucket_mib": 1e-4},
    {"stage": 3},
    {"stage": 3, "prefetch": 0, "reshard_after_forward": False},
]
# Three steps of float64; a few roundings of 1.1e-16 each, enlarged where gradients cancel.
_CLOSE = Tolerance(1e-9, 1e-11)

Loss = Callable[[nn.Module, int, int], Tensor]


def _linear() -> nn.Linear:
    return nn.Linear(6, 6, dtype=_F64)


def _x(step: int, rank: int) -> Tensor:
    return torch.randn(3, 6, dtype=_F64, generator=torch.Generator().manual_seed(100 * step + rank))


def average_gradients(model: nn.Module) -> None:
    """Leave the mean over ranks in every ``p.grad``, None where no rank has a gradient."""
    params = list(model.parameters())
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    is_present = torch.tensor([param.grad is not None for param in params], dtype=_F64)
    flat = torch.cat([*(grad.flatten() for grad in grads), is_present])
    dist.all_reduce(flat)
    *means, counts = flat.split([*(param.numel() for param in params), len(params)])
    for param, mean, count in zip(params, means, counts.tolist(), strict=True):
        param.grad = mean.view_as(param) / dist.get_world_size() if count else None


# --- parameters used outside of the module that owns them, methods other than forward ---


class _Reader(nn.Module):
    """Reads the weights of its children, which are units of their own at stage 3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.ModuleList([nn.Embedding(7, 6, dtype=_F64), _linear(), _linear()])
        self.scale = nn.Parameter(torch.ones(6, dtype=_F64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.parts[0](torch.arange(x.shape[0])) + self.parts[1](x) * self.scale
        return F.linear(torch.tanh(h), self.parts[0].weight) + h @ self.parts[2].weight.sum(1, keepdim=True)

    def encode(self, x: Tensor) -> Tensor:
        return F.linear(self.parts[1](x) * self.scale, self.parts[2].weight)

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.encode(x)
        return x


def _simple(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(_x(step, rank)).square().sum()


def _encode(model: nn.Module, step: int, rank: int) -> Tensor:
    return model.encode(_x(step, rank)).square().sum() + model.encode(_x(step + 9, rank)).sum()


def _generate(model: nn.Module, step: int, rank: int) -> Tensor:
    return model.encode(model.generate(_x(step, rank))).square().sum()


class _Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = _linear) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.parts, self.head = nn.ModuleList([make(), make()]), _linear()

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        return self.head(x)


def _parts_alone(model: nn.Module, step: int, rank: int) -> Tensor:
    x = _x(step, rank)
    for part in model.parts:
        x = torch.tanh(part(x))
    return x.square().sum()


# --- outputs of many kinds ---


class _Leaves(nn.Module):
    """Leaves tensors on itself and in a list that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.aux_loss = _linear(), _linear(), None
        self.gain = nn.Parameter(torch.ones(6, dtype=_F64))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        self.aux_loss = self.a(x).square().mean()
        y = torch.tanh(self.b(x))
        self.kept = [self.b(y).mean()]
        losses.append((y * self.gain).sum())
        return y


class _Leaving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.parts, self.last = nn.ModuleList([_Leaves(), _Leaves()]), None

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        for part in self.parts:
            x = part(x, losses)
        self.last = x.sum()
        return x


def _left(model: nn.Module, step: int, rank: int, kinds: str) -> Tensor:
    losses: list[Tensor] = []
    total = model(_x(step, rank), losses).square().sum() if "output" in kinds else None
    if total is None:
        total = 0.0 * _x(0, 0).sum()
        model(_x(step, rank), losses)
    if "attribute" in kinds:
        total = total + sum(part.aux_loss + part.kept[0] for part in model.parts) + model.last
    return total + sum(losses) if "list" in kinds else total


class _Plain:
    """An output class that torch's pytrees do not know."""

    def __init__(self, value: Tensor, more: Tensor) -> None:
        self.value, self.more = value, {"more": [more]}


@dataclass(slots=True)
class _Slotted:
    value: Tensor
    more: list[Tensor]


class _Named(NamedTuple):
    value: Tensor
    more: tuple[Tensor, None]


class _Part(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.kind, self.result = _linear(), kind, None

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.a(x))
        match self.kind:
            case "object":
                return _Plain(y, self.a(y))
            case "slots":
                return _Slotted(y, [self.a(y)])
            case "named":
                return _Named(y, (self.a(y), None))
            case "generator":
                return (self.a(y * factor) for factor in range(1, 3))
            case "views":
                return y, self.a.weight[0], self.a.weight.T
        self.result = y
        return None


class _Kinds(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.parts = nn.ModuleList([_Part(kind), _Part(kind), _linear()])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts[:2]:
            match part(x):
                case _Plain() as output:
                    x = output.value + output.more["more"][0]
                case _Slotted() | _Named() as output:
                    x = output.value + output.more[0]
                case y, row, matrix:
                    x = y * row + y @ matrix
                case None:
                    x = part.result
                case generator:
                    x = sum(generator)
        return self.parts[2](x)


class _Streaming(_Stack):
    def forward(self, x: Tensor) -> Iterator[Tensor]:  # type: ignore[override]
        for part in self.parts:
            x = torch.tanh(part(x))
            yield self.head(x)


def _stream(model: nn.Module, step: int, rank: int) -> Tensor:
    return sum(y.square().sum() for y in model(_x(step, rank)))


# --- parametrizations, pruning, hooks ---


def _changed(change: Callable[[nn.Module], Any]) -> nn.Module:
    model = _Stack()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old weight_norm
        for module in (*model.parts, model.head):
            change(module)
    return model


def _hooked() -> nn.Module:
    model = _Stack()
    model.parts[0].register_forward_pre_hook(lambda module, args: (args[0] + module.weight[0],))
    model.parts[1].register_forward_hook(lambda module, args, output: output * module.bias + args[0])
    model.register_forward_hook(lambda module, args, output: output * 2)
    model.parts[1].register_full_backward_hook(lambda module, grads, _: (grads[0] * module.bias.detach(),))
    return model


# --- uses of autograd ---


def _penalty(model: nn.Module, step: int, rank: int) -> Tensor:
    x = _x(step, rank).requires_grad_()
    y = model(x).square()
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.sum() + slope.square().sum()


def _backward_of_some(model: nn.Module, step: int, rank: int) -> Tensor:
    model(_x(step, rank)).sum().backward(inputs=[model.head.weight])
    return _simple(model, step + 1, rank)


def _gradients_of_parameters(model: nn.Module, step: int, rank: int) -> Tensor:
    loss = _simple(model, step, rank)
    grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return loss * sum(grad.sum() for grad in grads).detach().sigmoid()


def _curvature(model: nn.Module, step: int, rank: int) -> Tensor:
    """The gradient of this is a Hessian-vector product."""
    grads = torch.autograd.grad(_simple(model, step, rank), list(model.parameters()), create_graph=True)
    return sum(grad.sum() for grad in grads)


def _functional_call(model: nn.Module, step: int, rank: int) -> Tensor:
    params = dict(model.named_parameters())
    return torch.func.functional_call(model, params, (_x(step, rank),)).square().sum()


def _retained(model: nn.Module, step: int, rank: int) -> Tensor:
    loss = _simple(model, step, rank)
    loss.backward(retain_graph=True)
    return loss


# --- exceptions on all ranks, after which training goes on ---


class _Fragile(nn.Linear):
    """Fails in the n-th forward from now on: in a loop that goes on, or in the recomputation of a checkpoint."""

    def __init__(self) -> None:
        super().__init__(6, 6, dtype=_F64)
        self.fails_in = 0

    def forward(self, x: Tensor) -> Tensor:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise ArithmeticError("as if out of memory")
        return super().forward(x)


class _Recomputing(_Stack):
    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(checkpoint(part, x, use_reentrant=False))
        return self.head(x)


def _failing(model: nn.Module, step: int, rank: int, forward: int) -> Tensor:
    model.parts[0].fails_in = forward
    with pytest.raises(ArithmeticError):
        _simple(model, step, rank).backward()
    model.zero_grad()
    return _simple(model, step, rank)


def _raise(_: Tensor) -> None:
    raise ArithmeticError("in a tensor hook")


def _failing_hook(model: nn.Module, step: int, rank: int) -> Tensor:
    handle = model.parts[1].register_forward_hook(lambda module, args, output: output.register_hook(_raise) and None)
    with pytest.raises(ArithmeticError):
        _simple(model, step, rank).backward()
    handle.remove()
    model.zero_grad()
    return _simple(model, step, rank)


def _selective(model: nn.Module, step: int, rank: int) -> Tensor:
    """Selective activation checkpointing: keep matrix products, compute the rest again."""
    context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return checkpoint(model, _x(step, rank), use_reentrant=False, context_fn=context).square().sum()


# --- paths that depend on the data ---


class _Experts(nn.Module):
    """Each rank uses experts of its own, and leaves out a layer at random; a tied bias is used on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.experts = _linear(), nn.ModuleList([_linear() for _ in range(3)])
        self.skipped, self.extra = nn.ModuleList([_linear(), _linear()]), nn.Parameter(torch.zeros(6, dtype=_F64))
        self.chosen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in self.chosen:
            x = x + torch.tanh(self.experts[number](x))
        for number, layer in enumerate(self.skipped):
            if number in self.chosen:
                x = x + torch.tanh(layer(x))
        return x + self.extra if self.chosen == [2] else x


def _mixed(model: nn.Module, step: int, rank: int) -> Tensor:
    """Every mix of experts on two ranks occurs in nine steps; afterwards some ranks use two, or none."""
    choice = step // 3**rank % 3
    model.chosen = [choice] if step < 9 else [[], [choice, 0], [2, 1]][(step + rank) % 3]
    return _simple(model, step, rank)


_CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "weights of children in the parent's forward": (_Reader, _simple),
    "a method other than forward": (_Reader, _encode),
    "generate without gradients": (_Reader, _generate),
    "children alone": (_Stack, _parts_alone),
    "tensors left on attributes": (_Leaving, partial(_left, kinds="attribute")),
    "tensors left in a list": (_Leaving, partial(_left, kinds="list")),
    "tensors left, and the output": (_Leaving, partial(_left, kinds="output attribute list")),
    **{
        f"output: {kind}": (partial(_Kinds, kind), _simple)
        for kind in ("object", "slots", "named", "generator", "views", "none")
    },
    "a generator as forward": (_Streaming, _stream),
    "weight_norm": (partial(_changed, parametrizations.weight_norm), _simple),
    "spectral_norm": (partial(_changed, parametrizations.spectral_norm), _simple),
    "orthogonal": (partial(_changed, parametrizations.orthogonal), _simple),
    "old weight_norm": (partial(_changed, torch.nn.utils.weight_norm), _simple),
    "old spectral_norm": (partial(_changed, torch.nn.utils.spectral_norm), _simple),
    "prune": (partial(_changed, lambda module: prune.l1_unstructured(module, "weight", 0.3)), _simple),
    "hooks of the user": (_hooked, _simple),
    "gradient penalty": (_Stack, _penalty),
    "backward(inputs=...)": (_Stack, _backward_of_some),
    "autograd.grad of parameters": (_Stack, _gradients_of_parameters),
    "Hessian-vector product": (_Stack, _curvature),
    "functional_call": (_Stack, _functional_call),
    "retain_graph": (_Stack, _retained),
    "selective checkpointing": (_Stack, _selective),
    "an exception in forward": (partial(_Stack, _Fragile), partial(_failing, forward=1)),
    "an exception in recomputation": (partial(_Recomputing, _Fragile), partial(_failing, forward=2)),
    "an exception in a tensor hook": (_Stack, _failing_hook),
}


def _train(name: str, config: dict[str, Any], num_steps: int = 3) -> None:
    build, loss_of = (_Experts, _mixed) if name == "experts" else _CASES[name]
    rank, where = dist.get_rank(), f"{name}, {config}"
    model, plain_model = build(), build()
    optimizer = zero_shard.AdamW(model.parameters(), **_HYPER, module=model, config=config)
    plain = torch.optim.AdamW(plain_model.parameters(), **_HYPER)
    for step in range(num_steps):
        for each in (model, plain_model):
            loss_of(each, step, rank).backward()
        average_gradients(plain_model)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    snapshot = sharded_snapshot(model, optimizer)
    if rank == 0:
        assert_snapshots_close(snapshot, plain_snapshot(plain_model, plain), _CLOSE, where)
    assert_ranks_agree(model, where)


def _train_all(names: list[str], configs: list[dict[str, Any]]) -> list[str]:
    failed = []
    for name in names:
        for config in configs:
            try:
                _train(name, config)
            except Exception as error:
                failed.append(f"{name}, {config}: {type(error).__name__}: {error}")
    return failed


@pytest.mark.parametrize("config", _CONFIGS, ids=str)
def test_models_and_losses_of_all_kinds_train_as_plain_adamw_does(config: dict[str, Any]) -> None:
    for failed in ranks.run(2, _train_all, list(_CASES), [config]):
        assert not failed, "\n".join(failed)


def test_losses_of_all_kinds_leave_pending_gradients_that_are_right() -> None:
    """Stage 1 differs from stage 2 in when gradients are reduced, so that only the use of autograd matters."""
    names = [name for name, (build, _) in _CASES.items() if build is _Stack or "exception" in name]
    for failed in ranks.run(2, _train_all, names, [{"stage": 1}]):
        assert not failed, "\n".join(failed)


def test_paths_through_gathers_on_use_agree_on_three_ranks() -> None:
    names = ["weights of children in the parent's forward", "a method other than forward", "a generator as forward"]
    for failed in ranks.run(3, _train_all, names, _CONFIGS[1:]):
        assert not failed, "\n".join(failed)


def _train_experts(configs: list[dict[str, Any]]) -> None:
    for config in configs:
        _train("experts", config, num_steps=12)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_mix_of_paths_over_the_ranks_trains_as_plain_adamw_does(world_size: int) -> None:
    ranks.run(world_size, _train_experts, _CONFIGS)


def _wait_in_vain() -> None:
    """Rank 1 does not come; then both are interrupted, as by Ctrl-C in a terminal."""
    model = _Stack()
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": 3})
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    if dist.get_rank() == 1:
        time.sleep(30)
    _simple(model, 0, 0).backward()
    optimizer.step()


def test_an_interrupt_ends_ranks_that_wait_for_each_other() -> None:
    """Within the group's timeout: only then may gloo notice that the peer of a message has gone."""
    started = time.monotonic()
    errors = ranks.run_expecting_errors(2, _wait_in_vain)
    # Whoever waits learns first of the peer that has gone, or of its own interrupt.
    assert isinstance(errors[1], KeyboardInterrupt) and isinstance(errors[0], (KeyboardInterrupt, RuntimeError)), errors
    assert time.monotonic() - started < ranks.GROUP_TIMEOUT_S + 15
