"""Stage 3: when parameters are whole, and that any use gives plain AdamW's numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import (
    TOLERANCE,
    Tolerance,
    assert_ranks_agree,
    assert_snapshots_close,
    mean_over_ranks,
    plain_snapshot,
    sharded_snapshot,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_shard

_F64 = torch.float64
_NUM_STEPS = 4
_CONFIGS: list[dict[str, Any]] = [
    {},
    {"prefetch": 0},
    {"prefetch": 3},
    {"reshard_after_forward": False},
]


def is_released(param: nn.Parameter) -> bool:
    """Return whether reading the parameter raises the error that says so."""
    try:
        param.sum()
    except RuntimeError as error:
        assert "not gathered" in str(error), error
        return True
    return False


def _released(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if is_released(param)]


def _all_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


# --- kinds of models, against plain AdamW ---


@dataclass
class _Output:
    hidden: Tensor
    logits: Tensor
    note: str = "kept"


class _Body(nn.Module):
    """Three layers in a stack; subclasses use them in their ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.to(_F64)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x * self.scale


class _Layer(nn.Module):
    """A linear layer whose forward returns what ``kind`` says and takes a keyword."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(5, 5), kind

    def forward(self, *, x: Any) -> Any:
        x = (
            x["x"]
            if isinstance(x, dict)
            else x.hidden
            if isinstance(x, _Output)
            else x[0]
            if isinstance(x, tuple)
            else x
        )
        y = torch.tanh(self.linear(x))
        match self.kind:
            case "dict":
                return {"x": y, "n": 3}
            case "dataclass":
                return _Output(y, y * 2)
            case "tuple":
                return y, None, [y * 2]
        return y


class _Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(_Layer(kind) for kind in ("dict", "dataclass", "tuple", "plain"))
        self.to(_F64)

    def forward(self, x: Tensor) -> Tensor:
        value: Any = x
        for layer in self.layers:
            value = layer(x=value)
            if isinstance(value, _Output):
                assert value.note == "kept"
        return value


class _Slicer(nn.Module):
    """Returns pieces of its weight: a view, the weight itself in a tuple, and one in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 15).reshape(3, 5))

    def forward(self, row: int) -> Any:
        return self.table[row], (self.table.t(), {"rows": self.table[:2]})


class _Slices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([_Slicer(), _Slicer()])
        self.to(_F64)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=_F64)
        for number, part in enumerate(self.parts):
            row, (whole, rest) = part(number)
            total = total + (x * row).sum() + whole.square().sum() + (rest["rows"] * x[0]).sum()
        return total


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5, bias=False)])
        self.parts[2].weight = self.parts[0].weight
        self.again = self.parts[1]  # a shared module
        self.to(_F64)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part(x)) + x
        return self.again(x)


class _Adapter(nn.Module):
    """A frozen linear layer with a trainable low-rank change."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x))) + x


class _Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(*(_Adapter() for _ in range(3)))
        self.head = nn.Linear(5, 1).requires_grad_(False)
        self.to(_F64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class _FrozenBetween(_Body):
    """The root's own unit has a trainable last layer and, between it and the blocks, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = (nn.Linear(5, 5, dtype=_F64) for _ in range(2))
        for param in (self.scale, *self.norm.parameters()):
            param.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(super().forward(x))))


class _Checkpointed(_Body):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def _part(self, number: int, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[number](x)) + x

    def forward(self, x: Tensor) -> Tensor:
        for number in range(3):
            x = checkpoint(self._part, number, x, use_reentrant=self.use_reentrant)
        return x * self.scale


def _reentrant() -> nn.Module:
    return _Checkpointed(True)


def _non_reentrant() -> nn.Module:
    return _Checkpointed(False)


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 5, dtype=_F64, generator=torch.Generator().manual_seed(50 * rank + step))


def _simple(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(_batch(rank, step)).square().mean()


def _needing_input_grad(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(_batch(rank, step).requires_grad_()).square().mean()


def _double_forward(model: nn.Module, rank: int, step: int) -> Tensor:
    first, second = model(_batch(rank, step)), model(_batch(rank, step + 20))
    return (first * second).mean() + second.mean()


def _submodule(model: nn.Module, rank: int, step: int) -> Tensor:
    """Call parts of the model, not the model."""
    x = model.layers[1](_batch(rank, step))
    return model.layers[0](torch.tanh(x)).square().mean()


def _submodule_and_model(model: nn.Module, rank: int, step: int) -> Tensor:
    return (model(_batch(rank, step)) * model.layers[2](_batch(rank, step))).mean()


def _by_keyword(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(x=_batch(rank, step)).square().mean()


_CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int, int], Tensor]]] = {
    "stack": (_Body, _simple),
    "input needs a gradient": (_Body, _needing_input_grad),
    "keyword input": (_Body, _by_keyword),
    "outputs of many kinds": (_Kinds, _simple),
    "slices of weights": (_Slices, _simple),
    "tied": (_Tied, _simple),
    "adapter": (_Adapted, _simple),
    "adapter, input needs a gradient": (_Adapted, _needing_input_grad),
    "frozen between trainable ones": (_FrozenBetween, _simple),
    "double forward": (_Body, _double_forward),
    "double forward of tied": (_Tied, _double_forward),
    "submodule": (_Body, _submodule),
    "submodule and model": (_Body, _submodule_and_model),
    "reentrant checkpointing": (_reentrant, _needing_input_grad),
    "non-reentrant checkpointing": (_non_reentrant, _simple),
}

Loop = Callable[[nn.Module, torch.optim.Optimizer, int, int], None]


def _per_step(steps: int) -> Tolerance:
    return Tolerance(TOLERANCE[_F64].rtol * steps, TOLERANCE[_F64].atol * steps)


def _train_case(name: str, config: dict[str, Any]) -> None:
    build, loss_of = _CASES[name]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain_model = build(), build()
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.01, module=model, config={"stage": 3, **config})
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.01)
    for step in range(_NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        is_resharding = config.get("reshard_after_forward", True)
        if world_size > 1 and is_resharding:
            assert _released(model) == _all_names(model), f"{name}: whole between forward and backward, step {step}"
        loss.backward()
        if world_size > 1:
            assert _released(model) == _all_names(model), f"{name}: whole after backward, step {step}"
        optimizer.step()
        losses = [[lambda r=r, step=step: loss_of(plain_model, r, step)] for r in range(world_size)]
        mean_over_ranks(plain_model.parameters(), losses)
        plain.step()
        snapshot = sharded_snapshot(model, optimizer)
        if rank == 0:
            want = plain_snapshot(plain_model, plain)
            assert_snapshots_close(snapshot, want, _per_step(step + 1), f"{name}, {config}, step {step}")
    assert_ranks_agree(model, name)


def _train_case_in_all_configs(name: str) -> None:
    for config in _CONFIGS:
        _train_case(name, config)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", _CASES)
def test_models_of_all_kinds_train_as_plain_adamw_does(world_size: int, name: str) -> None:
    ranks.run(world_size, _train_case_in_all_configs, name)


# --- when parameters are whole ---


def _watch_units(config: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """Return which layers were whole whenever a layer started its forward, or passed a gradient to the one below."""
    model = _Body()
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": 3, **config})
    seen: list[tuple[str, list[int]]] = []

    def note(what: str) -> None:
        seen.append((what, [i for i, layer in enumerate(model.layers) if not is_released(layer.weight)]))

    for number, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda _, __, output, n=number: note(f"forward {n}"))
        layer.weight.register_hook(lambda grad, n=number: note(f"backward {n}"))
    for _ in range(3):
        seen.clear()
        optimizer.zero_grad()
        model(_batch(0, 0).requires_grad_()).sum().backward()
        optimizer.step()
    return seen


def test_a_layer_is_whole_in_its_own_forward_and_backward_only() -> None:
    expected = [(f"forward {n}", [n]) for n in range(3)] + [(f"backward {n}", [n]) for n in (2, 1, 0)]
    for seen in ranks.run(2, _watch_units, {"prefetch": 0}):
        # The hook of the library that releases a layer runs after that of this test, the one that gathers it before.
        assert [what for what, _ in seen] == [what for what, _ in expected]
        for (what, whole), (_, own) in zip(seen, expected, strict=True):
            assert set(whole) <= set(own) or whole == [], f"{what}: whole are {whole}"
            if what.startswith("backward"):
                assert whole == own, f"{what}: whole are {whole}"


def _release_of_frozen() -> None:
    """A frozen layer's own gradients never come; it is released when its inputs' gradients are computed."""
    model = _Adapted()
    optimizer = zero_shard.AdamW(
        [p for p in model.parameters() if p.requires_grad], module=model, config={"stage": 3, "prefetch": 0}
    )
    most = []
    for layer in model.layers:
        layer.up.weight.register_hook(
            lambda grad: most.append(sum(not is_released(each.base.weight) for each in model.layers))
        )
    for _ in range(3):
        optimizer.zero_grad()
        model(_batch(0, 0)).sum().backward()
        optimizer.step()
    assert len(most) == 9 and max(most) == 1, f"frozen layers whole at once: {most}"


def test_frozen_layers_are_released_in_backward() -> None:
    ranks.run(2, _release_of_frozen)


# --- gathered ---


def _edit_gathered() -> None:
    model = _Body()
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": 3})
    with zero_shard.gathered(model, modify=True), torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.fill_(float(number))
    with zero_shard.gathered(model), torch.no_grad():
        assert [param.mean().item() for param in model.parameters()] == list(map(float, range(7)))
        model.layers[0].weight.fill_(99.0)  # without modify changes are lost
    with zero_shard.gathered(model.layers[0].weight):
        assert not is_released(model.layers[0].weight) and is_released(model.layers[1].weight)
        assert not bool((model.layers[0].weight == 99.0).any())
        with zero_shard.gathered(model):  # nested
            assert not is_released(model.layers[1].weight)
        assert not is_released(model.layers[0].weight) and is_released(model.layers[1].weight)
    with zero_shard.gathered([model.scale, model.layers[2].bias]):
        assert not is_released(model.scale) and is_released(model.layers[1].weight)
    with pytest.raises(KeyError), zero_shard.gathered(model):
        raise KeyError("made inside")
    assert _released(model) == _all_names(model)
    with zero_shard.gathered(model):  # a step inside is seen inside
        before = model.layers[0].weight.detach().clone()
        model(_batch(dist.get_rank(), 0)).sum().backward()
        optimizer.step()
        assert not torch.equal(before, model.layers[0].weight)
        assert_ranks_agree(model)
    with zero_shard.gathered(nn.Linear(2, 2)):  # a module that nobody shards
        pass


def test_gathered_reads_edits_and_nests() -> None:
    ranks.run(2, _edit_gathered)
    ranks.run(3, _edit_gathered)


def _use_gathered_differently_often() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": 3})
    x = torch.ones(2, next(model.parameters()).shape[1])
    with torch.no_grad():
        want = model(x)
        with zero_shard.gathered(model):
            for _ in range(2 * dist.get_rank()):
                assert torch.equal(model(x), want)
            dist.barrier()
        assert torch.equal(model(x), want)
    model(x).sum().backward()
    optimizer.step()


def test_within_gathered_ranks_may_make_different_numbers_of_passes() -> None:
    """As when each generates a text of its own length."""
    ranks.run(2, _use_gathered_differently_often)


# --- loops of all kinds, against plain AdamW ---


def _evaluation_loop(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> Tensor:
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(_batch(rank, step + 70))
    loss = model(_batch(rank, step)).square().mean()
    with torch.no_grad():
        model(_batch(rank, step + 80))
    return loss


def _side_gradient_loop(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> Tensor:
    """Ask for the gradient of an input on the side, as a gradient penalty or saliency map does."""
    x = _batch(rank, step).requires_grad_()
    (side,) = torch.autograd.grad(model(x).sum(), x)
    return model(_batch(rank, step) + 0.1 * side).square().mean()


def _failing_loop(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> Tensor:
    """Every other step fails at first in forward, on all ranks, and is repeated."""
    if step % 2 == 0:
        handle = model.layers[1].register_forward_hook(_raise)
        with pytest.raises(ArithmeticError):
            model(_batch(rank, step))
        handle.remove()
    return model(_batch(rank, step)).square().mean()


def _raise(*_: Any) -> None:
    raise ArithmeticError("made in a hook")


def _retaining_loop(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> Tensor:
    loss = model(_batch(rank, step)).square().mean()
    loss.backward(retain_graph=True)
    return 0.5 * loss


_LOOPS: dict[str, Callable[[nn.Module, torch.optim.Optimizer, int, int], Tensor]] = {
    "evaluation before and inside of a step": _evaluation_loop,
    "autograd.grad on the side": _side_gradient_loop,
    "exception in forward": _failing_loop,
    "retain_graph": _retaining_loop,
}


def _train_loop(name: str, config: dict[str, Any]) -> None:
    loop, rank, world_size = _LOOPS[name], dist.get_rank(), dist.get_world_size()
    model, plain_model = _Body(), _Body()
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.01, module=model, config={"stage": 3, **config})
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.01)
    for step in range(_NUM_STEPS):
        optimizer.zero_grad()
        loop(model, optimizer, rank, step).backward()
        if world_size > 1:
            assert _released(model) == _all_names(model), f"{name}: whole after backward, step {step}"
        optimizer.step()
        losses = [[lambda r=r, step=step: loop(plain_model, plain, r, step)] for r in range(world_size)]
        mean_over_ranks(plain_model.parameters(), losses)
        plain.step()
        snapshot = sharded_snapshot(model, optimizer)
        if rank == 0:
            want = plain_snapshot(plain_model, plain)
            assert_snapshots_close(snapshot, want, _per_step(10 * (step + 1)), f"{name}, {config}, step {step}")
    assert_ranks_agree(model, name)


def _train_loop_in_all_configs(name: str) -> None:
    for config in _CONFIGS:
        _train_loop(name, config)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", _LOOPS)
def test_loops_of_all_kinds_train_as_plain_adamw_does(world_size: int, name: str) -> None:
    ranks.run(world_size, _train_loop_in_all_configs, name)


class _Game(nn.Module):
    """Two networks that are trained in turns, each through the other."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = _Body(), _Body()

    def forward(self, x: Tensor, is_generating: bool) -> Tensor:
        made = self.generator(x)
        return -self.critic(made).mean() if is_generating else self.critic(made.detach()).mean() - self.critic(x).mean()


def _play(config: dict[str, Any]) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain_model = _Game(), _Game()
    optimizers = [
        zero_shard.AdamW(part.parameters(), lr=0.01, module=part, config=config)
        for part in (model.generator, model.critic)
    ]
    plains = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in (plain_model.generator, plain_model.critic)]
    for step in range(6):
        turn = step % 2
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(_batch(rank, step), turn == 0).backward()
        optimizers[turn].step()
        losses = [
            [lambda r=r, step=step, turn=turn: plain_model(_batch(r, step), turn == 0)] for r in range(world_size)
        ]
        mean_over_ranks(plain_model.parameters(), losses)
        plains[turn].step()
        for part, optimizer, plain_part, plain in zip(
            (model.generator, model.critic),
            optimizers,
            (plain_model.generator, plain_model.critic),
            plains,
            strict=True,
        ):
            snapshot = sharded_snapshot(part, optimizer)
            if rank == 0:
                want = plain_snapshot(plain_part, plain)
                assert_snapshots_close(snapshot, want, _per_step(10 * (step + 1)), f"{config}, step {step}")


def _play_with_one_optimizer(config: dict[str, Any]) -> None:
    """Turns by the losses alone: one optimizer, whose unused half has no gradient."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, plain_model = _Game(), _Game()
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.01, module=model, config=config)
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        model(_batch(rank, step), step % 2 == 0).backward()
        optimizer.step()
        losses = [[lambda r=r, step=step: plain_model(_batch(r, step), step % 2 == 0)] for r in range(world_size)]
        mean_over_ranks(plain_model.parameters(), losses)
        plain.step()
        snapshot = sharded_snapshot(model, optimizer)
        if rank == 0:
            want = plain_snapshot(plain_model, plain)
            assert_snapshots_close(snapshot, want, _per_step(10 * (step + 1)), f"{config}, step {step}")


@pytest.mark.parametrize("play", [_play, _play_with_one_optimizer])
@pytest.mark.parametrize(
    "config",
    [{"stage": 2}, {"stage": 3}, {"stage": 3, "prefetch": 0}, {"stage": 3, "reshard_after_forward": False}],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_alternating_losses_over_two_models(world_size: int, config: dict[str, Any], play: Any) -> None:
    ranks.run(world_size, play, config)
