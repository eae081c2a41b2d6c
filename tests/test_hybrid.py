"""Replicas and hosts: which hops a gradient takes, what each sends, and that the result is that of plain AdamW.

Ranks pretend to be on two hosts; ``test_hosts.py`` has real ones. All that needs four ranks is done in few launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import EXACT, assert_snapshots_close, plain_snapshot, sharded_snapshot
from test_equivalence import Recipe, train, train_plain
from torch import Tensor, nn

import zero_shard
from zero_shard import collectives
from zero_shard.topology import common_host_grid, host_grid

_WIDTH = 64
_F64 = torch.float64


@contextmanager
def _two_hosts() -> Iterator[None]:
    """Have the first half of the ranks of a new group live on one host, the others on another."""
    host = f"host {2 * dist.get_rank() // dist.get_world_size()}"
    with mock.patch.object(collectives.communicator, "name_of_host", lambda: host):
        yield


# --- two hops ---


@pytest.mark.parametrize(
    ("hosts", "grid"),
    [
        ("aabb", [[0, 1], [2, 3]]),
        ("abab", [[0, 2], [1, 3]]),
        ("aaabbbccc", [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        ("aaaa", None),  # one host
        ("abcd", None),  # nothing to add up inside
        ("aabbb", None),  # unequal hosts: slices go straight
        ("", None),
    ],
)
def test_two_hops_are_taken_between_equal_hosts_of_several_ranks(hosts: str, grid: list[list[int]] | None) -> None:
    assert host_grid(hosts) == grid


def test_all_copies_of_the_shards_take_the_same_hops() -> None:
    assert common_host_grid(["aabb", "ccdd"]) == [[0, 1], [2, 3]]
    assert common_host_grid(["aabb", "cdcd"]) is None
    assert common_host_grid(["aabb", "cccc"]) is None


_WAYS: list[dict[str, Any]] = [
    {"stage": 0},
    *({"stage": stage, "bucket_mib": 0.001} for stage in range(4)),
    *({"stage": stage, "bucket_mib": 0.001, "shard_size": 2} for stage in (1, 3)),
]


def _train_on_two_hosts(recipe: Recipe, ways: list[dict[str, Any]]) -> list[Any]:
    with _two_hosts():
        return [train(recipe, way) for way in ways]


def test_two_hops_give_every_stage_and_shard_size_the_same_bits() -> None:
    recipe = Recipe(num_steps=2, clip="library")
    results = ranks.run(4, _train_on_two_hosts, recipe, _WAYS)[0]
    plain, _ = train_plain(recipe, 4)
    for step, (got, want) in enumerate(zip(results[0][0], plain, strict=True)):
        assert_snapshots_close(got, want, None, f"against plain AdamW, step {step}", step + 1)
    for way, (snapshots, norms) in zip(_WAYS, results, strict=True):
        for step, (got, want) in enumerate(zip(snapshots, results[0][0], strict=True)):
            assert_snapshots_close(got, want, EXACT, f"{way}, step {step}")
        assert norms == results[0][1], way


# --- what is sent ---

# Config, backwards per step, under no_sync but the last; multiples of P bytes that a rank sends, and of them to the
# other host, in the second step. Each of the two exchanges of one P over 4 ranks costs 3/4, on two hops 1/2 + 1/4.
_TRAFFIC: list[tuple[dict[str, Any], int, bool, float, float]] = [
    ({"stage": 0}, 1, False, 1.5, 0.5),
    ({"stage": 1}, 1, False, 1.5, 0.5),
    ({"stage": 2}, 1, False, 1.5, 0.5),
    ({"stage": 2}, 3, False, 3.0, 1.0),  # the reduction three times
    ({"stage": 3}, 1, False, 2.25, 0.75),
    ({"stage": 1, "shard_size": 2}, 3, False, 1.5, 0.5),
    ({"stage": 2, "shard_size": 2}, 1, False, 1.5, 0.5),
    ({"stage": 2, "shard_size": 2}, 3, False, 2.5, 0.5),  # inside the host three times, across once
    ({"stage": 2, "shard_size": 2}, 3, True, 1.5, 0.5),
    ({"stage": 3, "shard_size": 2}, 1, False, 2.0, 0.5),
    ({"stage": 3, "shard_size": 2, "reshard_after_forward": False}, 2, False, 2.5, 0.5),
    ({"stage": 2, "shard_size": 2, "reduce_dtype": "bfloat16"}, 1, False, 1.25, 0.5),
    ({"stage": 2, "shard_size": 1}, 1, False, 1.5, 0.5),
]


def _net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, dtype=dtype) for _ in range(4)))


def _traffic() -> list[tuple[int, int, int]]:
    found = []
    with _two_hosts():
        for config, num_micros, is_no_sync, _, _ in _TRAFFIC:
            model = _net()
            optimizer = zero_shard.AdamW(model.parameters(), module=model, config=config)
            for _ in range(3):
                for micro in range(num_micros):
                    is_local = is_no_sync and micro < num_micros - 1
                    with optimizer.no_sync() if is_local else nullcontext():
                        model(torch.ones(1, _WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            usage = optimizer.usage()
            found.append((usage.sent_nbytes, usage.sent_across_nbytes, usage.floor_sent_nbytes))
    return found


def test_bytes_by_hop_are_those_of_the_floor_and_cross_hosts_once() -> None:
    params_nbytes = 4 * (_WIDTH + 1) * _WIDTH * 4
    for found in ranks.run(4, _traffic):
        for (config, num_micros, is_no_sync, sent, across), measured in zip(_TRAFFIC, found, strict=True):
            where = f"{config}, {num_micros} backwards{', no_sync' * is_no_sync}: {measured}"
            assert measured[0] / params_nbytes == pytest.approx(sent, rel=0.02), where
            assert measured[1] / params_nbytes == pytest.approx(across, rel=0.02), where
            if num_micros == 1:
                assert measured[2] / params_nbytes == pytest.approx(sent, rel=0.001), where


# --- several backwards ---


def _loss(model: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    x = torch.randn(2, _WIDTH, generator=generator, dtype=_F64)
    if (step + micro) % 3 == 2:
        return model[2:](x).square().mean()  # the first layers have no gradient
    return model(x).square().mean()


_NUM_MICROS = [2, 2, 1, 3, 3, 2]  # of each step: as many as expected, fewer and more


def _read(optimizer: zero_shard.AdamW, model: nn.Sequential, step: int, micro: int) -> None:
    """Do between backwards what scripts do."""
    if step == 1 and micro == 0:
        model[3].bias.grad = None
    if step == 3 and micro == 1:
        model[0].weight.grad.norm()  # must reduce
    if step == 4 and micro == 0:
        model[3].weight.grad = model[3].weight.grad * 2


def _play(config: dict[str, Any], num_steps: int, group: Any = None) -> tuple[dict[str, Any], zero_shard.AdamW]:
    model = _net(_F64)
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.01, module=model, config=config, process_group=group)
    rank = dist.get_rank()
    for step in range(num_steps):
        for micro in range(_NUM_MICROS[step]):
            if step == 2 and rank == 1 and config["stage"] == 2:
                continue  # this rank has no data, nor does it run a forward
            _loss(model, rank, step, micro).backward()
            _read(optimizer, model, step, micro)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 3)
    return sharded_snapshot(model, optimizer), optimizer


def _play_all(configs: list[dict[str, Any]], num_steps: int) -> list[dict[str, Any]]:
    with _two_hosts():
        return [_play(config, num_steps)[0] for config in configs]


def _play_plain(num_steps: int, has_all_data: bool) -> dict[str, Any]:
    """The same on one process: gradients are means over ranks of what each has accumulated."""
    model = _net(_F64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(num_steps):
        for micro in range(_NUM_MICROS[step]):
            for rank in range(4):
                if has_all_data or not (step == 2 and rank == 1):
                    (_loss(model, rank, step, micro) / 4).backward()
            if step == 1 and micro == 0:
                model[3].bias.grad = None
            if step == 4 and micro == 0:
                model[3].weight.grad = model[3].weight.grad * 2
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 3)
    return plain_snapshot(model, optimizer)


def test_any_number_of_backwards_accumulates_to_what_plain_adamw_gets() -> None:
    """More and fewer than expected, a rank without any, gradients read, replaced and dropped in between."""
    configs = [{"stage": stage, "shard_size": 2, "bucket_mib": 0.05} for stage in (2, 3)]
    num_steps = len(_NUM_MICROS)
    for config, got in zip(configs, ranks.run(4, _play_all, configs, num_steps)[0], strict=True):
        want = _play_plain(num_steps, has_all_data=config["stage"] == 3)
        assert_snapshots_close(got, want, None, str(config), 10 * num_steps)


# --- device meshes ---


class _ToColumns(torch.autograd.Function):
    """Hands the same input to all ranks of a tensor-parallel group; their gradients add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _FromColumns(torch.autograd.Function):
    """Joins the columns that the ranks of a tensor-parallel group have computed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.rank, ctx.numel = dist.get_rank(group), own.shape[1]
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[:, ctx.rank * ctx.numel : (ctx.rank + 1) * ctx.numel], None


class _ColumnParallel(nn.Linear):
    """Every rank of the group has an equal share of the output features of a linear layer."""

    def __init__(self, whole: nn.Linear, group: Any) -> None:
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        super().__init__(whole.in_features, whole.out_features // num_ranks, dtype=whole.weight.dtype)
        self.group = group
        with torch.no_grad():
            self.weight.copy_(whole.weight.chunk(num_ranks)[rank])
            self.bias.copy_(whole.bias.chunk(num_ranks)[rank])

    def forward(self, x: Tensor) -> Tensor:
        return _FromColumns.apply(super().forward(_ToColumns.apply(x, self.group)), self.group)


def _tensor_parallel(stage: int) -> None:
    """Train on a mesh of 2 x 2 ranks, of which the second dimension holds columns of one layer; compare with plain."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    model, plain = _net(_F64), _net(_F64)
    model[1] = _ColumnParallel(model[1], mesh["tp"].get_group())
    config = {"stage": stage, "bucket_mib": 0.01}
    optimizer = zero_shard.AdamW(model.parameters(), lr=0.1, module=model, config=config, process_group=mesh["dp"])
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        _loss(model, dp, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(2):
            (_loss(plain, rank, step, 0) / 2).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    with zero_shard.gathered(model):
        got = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in plain.named_parameters():
        want = param.chunk(2)[tp] if name.startswith("1.") else param
        torch.testing.assert_close(
            got[name], want, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    full = optimizer.full_state_dict()
    if full:
        moment = full["state"][2]["exp_avg"]  # of 1.weight
        want = plain_optimizer.state[plain[1].weight]["exp_avg"].chunk(2)[tp]
        torch.testing.assert_close(moment, want, rtol=1e-10, atol=1e-13)
    assert dist.get_world_size(optimizer.join_process_group) == 2


def _hybrid_mesh() -> None:
    """A mesh says what shard_size says, whatever ranks are in a row; a part of a larger mesh, too."""
    want, _ = _play({"stage": 2, "shard_size": 2}, 2)
    meshes = [
        dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        dist.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("tp", "dp_replicate", "dp_shard"))[
            "dp_replicate", "dp_shard"
        ],
        dist.DeviceMesh("cpu", [[0, 2], [1, 3]]),
        dist.DeviceMesh("cpu", [[3, 0], [1, 2]], mesh_dim_names=("replicate", "shard")),
        dist.DeviceMesh("cpu", [0, 1, 2, 3]),
    ]
    for number, mesh in enumerate(meshes):
        config = {"stage": 3 - 2 * (number % 2), "bucket_mib": 0.05}
        got, optimizer = _play(config, 2, mesh)
        assert optimizer.config.shard_size == (2 if mesh.ndim == 2 else None)
        assert optimizer._communicator.shards.num_ranks == (2 if mesh.ndim == 2 else 4)
        assert_snapshots_close(got, want, None, f"{mesh}, {config}", 10)


def _mesh_errors() -> list[str]:
    texts = []
    model = _net()
    sizes = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for mesh, config in (
        (dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), {}),
        (dist.init_device_mesh("cpu", (2, 2, 1)), {}),
        (sizes, {"shard_size": 4}),
        (dist.DeviceMesh("cpu", [0, 1]), {}),
    ):
        try:
            zero_shard.AdamW(model.parameters(), module=model, config=config, process_group=mesh)
        except ValueError as error:
            texts.append(str(error))
        else:
            texts.append("")
    zero_shard.AdamW(model.parameters(), module=model, config={"shard_size": 2}, process_group=sizes)
    return texts


def _all_meshes() -> list[str]:
    for stage in (2, 3):
        _tensor_parallel(stage)
    _hybrid_mesh()
    return _mesh_errors()


def test_device_meshes_stand_beside_tensor_parallelism_and_say_what_is_shared() -> None:
    results = ranks.run(4, _all_meshes)
    for rank, (named, deep, other_size, outside) in enumerate(results):
        for part in ("dp=2, tp=2", "expected one dimension", "(replicate, shard)", "mesh['dp']"):
            assert part in named, named
        assert "dimensions (2, 2, 1), expected one dimension" in deep, deep
        assert "shard_size is 4" in other_size and "has 2 ranks; leave shard_size out" in other_size, other_size
        assert ("does not contain this rank" in outside) == (rank > 1), outside


# --- native backends ---


def _record(groups: dict[str, set[Any]]) -> list[Any]:
    """Return patches that note which process groups the native calls use."""
    patches = []
    for kind in ("reduce_scatter", "all_gather"):
        name = next(n for n in (f"{kind}_single", f"{kind}_tensor", f"{kind}_into_tensor") if hasattr(dist, n))
        call = getattr(dist, name)

        def noting(*args: Any, kind: str = kind, call: Any = call, **kwargs: Any) -> Any:
            groups.setdefault(kind, set()).add(kwargs["group"])
            return call(*args, **kwargs)

        patches.append(mock.patch.object(dist, name, noting))
    return patches


def _native_groups() -> None:
    """Pretend that gloo is NCCL: ranks may start reductions and gathers in different orders."""
    with ExitStack() as stack:
        for module in (collectives.communicator, collectives.groups):
            native = mock.patch.object(module, "backends", lambda group: {} if group is None else {"cpu": "nccl"})
            stack.enter_context(native)
        for config in ({"stage": 3}, {"stage": 2, "shard_size": 2}, {"stage": 3, "shard_size": 2}):
            groups: dict[str, set[Any]] = {}
            reductions, gathers = _record(groups)
            with reductions, gathers:
                model = _net()
                optimizer = zero_shard.AdamW(model.parameters(), module=model, config=config)
                model(torch.ones(1, _WIDTH)).sum().backward()
                optimizer.step()
            assert groups["reduce_scatter"] and groups["all_gather"], groups
            assert not groups["reduce_scatter"] & groups["all_gather"], config
        ranks_, full = optimizer._communicator, torch.arange(8.0)
        gathered = torch.zeros(8)
        gathered[4 * ranks_.shards.rank : 4 * ranks_.shards.rank + 4] = ranks_.shards.rank + 1.0
        started = {
            "exchange": lambda: ranks_.exchange(ranks_.shards, full, 0, "sums"),
            "gather": lambda: (None, ranks_.all_gather_(ranks_.shards, gathered, 1, "slices")),
        }
        order = sorted(started, reverse=bool(dist.get_rank() % 2))
        found = {name: started[name]() for name in order}
        for name in order:
            found[name][1].wait()
        assert found["exchange"][0].slices.view(-1).tolist() == (2 * full).chunk(2)[ranks_.shards.rank].tolist()
        assert gathered.tolist() == [1.0] * 4 + [2.0] * 4
    plain = zero_shard.AdamW(_net().parameters(), config={"stage": 2})
    assert plain._communicator.shards.gathers is plain._communicator.shards.group, "gloo needs no second group"


def test_native_reductions_and_gathers_have_groups_of_their_own() -> None:
    ranks.run(4, _native_groups)
