"""Promise 1, one result: stages, buckets, prefetch and overlap don't change a bit, and it is the result of plain AdamW.

Every recipe is trained in the same rank task by every way of sharding, one after the other, so that a missing wait
isn't hidden by a twin that runs at the same time. The first way is stage 0: all others must equal it bit for bit, and
it must equal the oracle.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import (
    EXACT,
    TOLERANCE,
    MasterAdamW,
    Snapshot,
    assert_ranks_agree,
    assert_snapshots_close,
    mean_over_ranks,
    sharded_snapshot,
)
from torch import Tensor, nn

import zero_shard

# The ways of sharding. 0.001 MiB is 1 KiB: several buckets, and parameters that span a bucket of their own.
WAYS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 0, "bucket_mib": 0.001},
    {"stage": 1},
    {"stage": 1, "bucket_mib": 0.001},
    {"stage": 2},
    {"stage": 2, "bucket_mib": 0.001},
    {"stage": 3},
    {"stage": 3, "prefetch": 0},
    {"stage": 3, "prefetch": 3, "reshard_after_forward": False},
]


@dataclass(frozen=True)
class Recipe:
    """What is trained; the same for every way of sharding."""

    dtype: torch.dtype = torch.float64
    num_steps: int = 4
    num_micros: int = 1
    is_no_sync: bool = False  # all micro-batches but the last under no_sync
    has_groups: bool = False
    is_thawing: bool = False  # the frozen module joins in step 2
    is_zeroing: bool = False  # zero_grad(set_to_none=False)
    clip: str = ""  # "library" or "torch"
    has_bf16_block: bool = False  # a second dtype in one model
    hyper: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6, bias=False)
        self.down.weight = nn.Parameter(torch.randn(7, 6).t() / 3)  # stride (1, 6): dense, not row-major
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(nn.Module):
    """A small language model with one of each: tied, frozen, 0-dim, empty, unused and sometimes used parameters."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.gates = nn.ModuleList(_Gate() for _ in range(2))  # the second is never used
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0))
        self.to(recipe.dtype)
        if recipe.has_bf16_block:
            self.blocks[1].to(torch.bfloat16)

    def forward(self, tokens: Tensor, has_gate: bool) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x.to(block.gain.dtype)).to(x.dtype)
        x = self.frozen(x) + x
        if has_gate:
            x = self.gates[0](x)
        logits = self.head(x) * self.scale
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).to(torch.float64), tokens[:, 1:].flatten())


def groups_of(model: Net, recipe: Recipe) -> Any:
    """Return what the optimizer gets: all parameters, or two groups that interleave in the model's order."""
    params = list(model.parameters())
    if not recipe.has_groups:
        return params
    slow = {"params": params[1::2], "lr": 0.003, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.2}
    return [{"params": params[0::2]}, slow]


def loss_of(model: Net, step: int, rank: int, micro: int) -> Tensor:
    """Return the loss of one micro-batch; the gate takes part on even ranks in the first one, but not in step 1."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    tokens = torch.randint(0, 11, (2, 5), generator=generator)
    return model(tokens, has_gate=micro == 0 and step != 1 and rank % 2 == 0)


def _edit(optimizer: torch.optim.Optimizer, model: nn.Module, recipe: Recipe, step: int) -> None:
    if recipe.has_groups and step == 2:
        optimizer.param_groups[0]["lr"] = 0.02
        optimizer.param_groups[1]["weight_decay"] = 0.0
    if recipe.is_thawing and step == 2:
        model.frozen.requires_grad_(True)


def train(recipe: Recipe, way: dict[str, Any]) -> tuple[list[Snapshot], list[Tensor]]:
    """Train the recipe in one way; return rank 0's snapshot after every step, and the norms that clipping returned."""
    rank, snapshots, norms = dist.get_rank() if dist.is_initialized() else 0, [], []
    model = Net(recipe)
    hyper = {"lr": 0.01, "weight_decay": 0.1, **recipe.hyper}
    config = {**way, **recipe.config}
    optimizer = zero_shard.AdamW(groups_of(model, recipe), module=model, config=config, **hyper)
    for step in range(recipe.num_steps):
        _edit(optimizer, model, recipe, step)
        optimizer.zero_grad(set_to_none=not recipe.is_zeroing)
        for micro in range(recipe.num_micros):
            is_last = micro == recipe.num_micros - 1
            with optimizer.no_sync() if recipe.is_no_sync and not is_last else nullcontext():
                loss_of(model, step, rank, micro).backward()
        if recipe.clip == "library":
            norms.append(optimizer.clip_grad_norm_(0.05).clone())
        elif recipe.clip == "torch":
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).clone())
        optimizer.step()
        if dist.is_initialized():
            assert_ranks_agree(model, f"{way}, step {step}")
        snapshots.append(sharded_snapshot(model, optimizer))
    return snapshots, norms


def train_all_ways(recipe: Recipe, ways: list[dict[str, Any]]) -> list[tuple[list[Snapshot], list[Tensor]]]:
    results = []
    for way in ways:
        try:
            results.append(train(recipe, way))
        except Exception as error:
            raise RuntimeError(f"{way}: {type(error).__name__}: {error}") from error
    return results


def train_plain(recipe: Recipe, world_size: int) -> tuple[list[Snapshot], list[Tensor]]:
    """Do what ``train`` does in plain torch, with a float32 master for every 16-bit parameter."""
    model = Net(recipe)
    optimizer = MasterAdamW(groups_of(model, recipe), **{"lr": 0.01, "weight_decay": 0.1, **recipe.hyper})
    snapshots, norms, had_grad = [], [], set[nn.Parameter]()
    for step in range(recipe.num_steps):
        _edit(optimizer.inner, model, recipe, step)
        losses = [
            [
                lambda step=step, rank=rank, micro=micro: loss_of(model, step, rank, micro)
                for micro in range(recipe.num_micros)
            ]
            for rank in range(world_size)
        ]
        grads = mean_over_ranks(model.parameters(), losses)
        had_grad |= set(grads)
        if recipe.is_zeroing:
            grads = {
                param: grads.get(param, torch.zeros_like(param)) for param in model.parameters() if param in had_grad
            }
        norms += optimizer.step(grads, 0.05 if recipe.clip else None)
        snapshots.append(optimizer.snapshot(model))
    return snapshots, norms


def _assert_similar(got: Snapshot, want: Snapshot, where: str) -> None:
    """Compare norms of tensors: a weight rounded to its other 16-bit neighbour changes all later gradients."""
    for name, expected in want.items():
        assert sorted(got[name]) == sorted(expected), f"{where}: {name}"
        for key, tensor in expected.items():
            difference = torch.linalg.vector_norm(got[name][key].double() - tensor.double())
            limit = 0.3 * torch.linalg.vector_norm(tensor.double()) + 1e-5
            assert difference <= limit, f"{where}: {key} of {name} differs by {difference}, limit {limit}"


def _check_against_oracle(recipe: Recipe, world_size: int, got: list[Snapshot], norms: list[Tensor]) -> None:
    plain, plain_norms = train_plain(recipe, world_size)
    is_16_bit = recipe.has_bf16_block or recipe.dtype.itemsize == 2
    for step, (ours, theirs) in enumerate(zip(got, plain, strict=True)):
        where = f"against plain AdamW, step {step}"
        if is_16_bit and step > 0:
            _assert_similar(ours, theirs, where)
        else:
            assert_snapshots_close(ours, theirs, None, where, step + 1)
    assert len(norms) == len(plain_norms)
    for ours, theirs in zip(norms, plain_norms, strict=True):
        rtol = 0.05 if is_16_bit else 10 * TOLERANCE[recipe.dtype].rtol
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=rtol, atol=0)


_ALL, _TWO, _THREE = (1, 2, 3, 4), (2,), (3,)
# Each with the world sizes it runs in.
RECIPES = {
    "float64": (_ALL, Recipe()),
    "float32 groups": (_ALL, Recipe(torch.float32, has_groups=True)),
    "accumulation under no_sync": (_ALL, Recipe(num_micros=3, is_no_sync=True)),
    "float32 and bfloat16": (_ALL, Recipe(torch.float32, has_bf16_block=True)),
    "clip": (_ALL, Recipe(clip="library")),
    "float32 under no_sync": (_THREE, Recipe(torch.float32, num_micros=2, is_no_sync=True)),
    "float32 and bfloat16 clip": (_THREE, Recipe(torch.float32, clip="library", has_bf16_block=True)),
    "bfloat16": (_TWO, Recipe(torch.bfloat16)),
    "bfloat16 under no_sync": (_TWO, Recipe(torch.bfloat16, num_micros=2, is_no_sync=True)),
    "float16": (_THREE, Recipe(torch.float16)),
    "amsgrad": (_TWO, Recipe(hyper={"amsgrad": True})),
    "maximize": (_TWO, Recipe(hyper={"maximize": True})),
    "lr as a tensor": (_THREE, Recipe(hyper={"lr": torch.tensor(0.02, dtype=torch.float64)})),
    "thawing": (_THREE, Recipe(is_thawing=True)),
    "zeroing": (_THREE, Recipe(is_zeroing=True)),
}
_RUNS = [(name, world_size) for name, (world_sizes, _) in RECIPES.items() for world_size in world_sizes]


def assert_all_equal_the_first(results: list[tuple[list[Snapshot], list[Tensor]]], ways: list[dict[str, Any]]) -> None:
    first, first_norms = results[0]
    for way, (snapshots, norms) in zip(ways, results, strict=True):
        for step, (got, want) in enumerate(zip(snapshots, first, strict=True)):
            assert_snapshots_close(got, want, EXACT, f"{way}, step {step}")
        assert [norm.item() for norm in norms] == [norm.item() for norm in first_norms], f"{way}: norms"


@pytest.mark.parametrize(("name", "world_size"), _RUNS)
def test_all_ways_of_sharding_give_the_bits_of_stage_0(name: str, world_size: int) -> None:
    """Parameters, moments, step counts and norms are bitwise equal after each of 4 steps, and equal to plain AdamW."""
    recipe = RECIPES[name][1]
    results = ranks.run(world_size, train_all_ways, recipe, WAYS)[0]
    _check_against_oracle(recipe, world_size, *results[0])
    assert_all_equal_the_first(results, WAYS)


@pytest.mark.parametrize("world_size", [2, 3])
def test_clipping_with_torch_gives_the_same(world_size: int) -> None:
    """``torch.nn.utils.clip_grad_norm_`` sees plain gradients at stage 0, and rounds their norm in its own order.

    At stage 1 its list also holds the pending gradients that turn out to be nobody's, with norm 0. So each kind of list
    gives the same bits, and all agree up to rounding.
    """
    recipe = Recipe(clip="torch")
    results = ranks.run(world_size, train_all_ways, recipe, WAYS)[0]
    for result in results:
        _check_against_oracle(recipe, world_size, *result)
    for ways in (slice(0, 2), slice(2, 4), slice(4, None)):
        assert_all_equal_the_first(results[ways], WAYS[ways])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "config", [{"state_dtype": "bfloat16"}, {"master": "none"}, {"reduce_dtype": "bfloat16"}], ids=str
)
def test_all_ways_agree_in_lower_precision(world_size: int, config: dict[str, Any]) -> None:
    """Options that round differ from plain AdamW, but the ways of sharding don't differ from each other."""
    recipe = Recipe(torch.float32, has_bf16_block=True, config=config)
    assert_all_equal_the_first(ranks.run(world_size, train_all_ways, recipe, WAYS)[0], WAYS)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_several_backwards_without_no_sync(world_size: int, dtype: torch.dtype) -> None:
    """Stages 2 and 3 sum reduced shards, stages 0 and 1 local gradients: equal up to rounding."""
    recipe = Recipe(dtype, num_micros=3)
    results = ranks.run(world_size, train_all_ways, recipe, WAYS)[0]
    _check_against_oracle(recipe, world_size, *results[0])
    for way, (snapshots, _) in zip(WAYS, results, strict=True):
        for step, (got, want) in enumerate(zip(snapshots, results[0][0], strict=True)):
            assert_snapshots_close(got, want, None, f"{way}, step {step}", step + 1)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_process_group_is_a_world_of_one(way: dict[str, Any]) -> None:
    """Without ``torch.distributed`` the result is that of a group of one rank."""
    alone = ranks.run(1, train_all_ways, Recipe(), [way], has_group=False)[0]
    grouped = ranks.run(1, train_all_ways, Recipe(), [way])[0]
    assert_all_equal_the_first(alone + grouped, [way, way])


# --- one ulp ---


def _one_step_at_a_time(stage: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return what the library and plain AdamW make of the same weights and state, for 10 steps."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(4099, generator=generator, dtype=dtype)
    ours, plain = nn.Linear(1, 1), nn.Linear(1, 1)
    ours.weight, plain.weight = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours.bias = plain.bias = None
    library = zero_shard.AdamW(ours.parameters(), lr=0.01, module=ours, config={"stage": stage})
    torch_adamw = torch.optim.AdamW(plain.parameters(), lr=0.01)
    pairs = []
    for _ in range(10):
        with torch.no_grad(), zero_shard.gathered(ours, modify=True):
            ours.weight.copy_(plain.weight)
        if torch_adamw.state:
            library.load_state_dict(copy.deepcopy(torch_adamw.state_dict()))
        gradient = torch.randn(4099, generator=generator, dtype=dtype)
        ours.weight.grad, plain.weight.grad = gradient.clone(), gradient.clone()
        library.step()
        torch_adamw.step()
        library.zero_grad()
        with zero_shard.gathered(ours):
            pairs.append((ours.weight.detach().clone(), plain.weight.detach().clone()))
    return pairs


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_is_within_one_ulp_of_torch_per_step(stage: int) -> None:
    """float32 differs from ``torch.optim.AdamW`` by at most one unit in the last place, float64 by 1e-12."""
    for got, want in ranks.run(1, _one_step_at_a_time, stage, torch.float32)[0]:
        # A step of 0.01 moves a weight through smaller magnitudes: the ulp is that of the operands, not of the result.
        magnitude = want.abs().clamp(min=0.02)
        ulp = torch.nextafter(magnitude, torch.tensor(torch.inf)) - magnitude
        assert bool(((got - want).abs() <= ulp).all()), ((got - want).abs() / ulp).max()
    for got, want in ranks.run(1, _one_step_at_a_time, stage, torch.float64)[0]:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
