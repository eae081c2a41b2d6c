"""A plan is what happens: predicted memory and traffic against measured ones, at any world size; ``stage="auto"``."""

from __future__ import annotations

import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from allocations import Allocations
from live_tensors import Live
from torch import nn

import zero_shard
from zero_shard import planning, rehearsal
from zero_shard.fake_group import FakeGroup, Message
from zero_shard.planning import Link, Links, build_of_numbers, fit_links
from zero_shard.planning.links import _fit
from zero_shard.rehearsal import auto

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, GPTConfig, next_byte_loss

_TOLERANCE = 0.05
_CONFIGS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 2, "param_dtype": "bfloat16", "max_grad_norm": 1.0},
    {"stage": 3, "state_dtype": "int8", "reshard_after_forward": False, "prefetch": 2},
]
_IDS = [", ".join(f"{key}={value}" for key, value in config.items()) for config in _CONFIGS]


def _gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(context=32, width=128, num_layers=5, num_heads=4))


# --- predicted against measured ---


def _measure(config: dict[str, Any], allocations: Allocations) -> tuple[dict[str, int], str]:
    """Train the example GPT for a few steps; return what is alive between and before steps, and what is sent."""
    live = Live()
    model = _gpt()
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config=config)
    windows = torch.zeros(1, 5, dtype=torch.int64)

    def train() -> None:
        next_byte_loss(model, windows).backward()
        optimizer.step()

    for _ in range(2):
        train()
        optimizer.zero_grad()
    measured = {"held": live.nbytes()}
    name = allocations.watch(train)
    optimizer.zero_grad()
    next_byte_loss(model, windows).backward()
    measured["held_with_gradients"] = live.nbytes()
    optimizer.step()
    measured["sent"] = optimizer.usage().sent_nbytes
    return measured, name


def _measure_all() -> list[dict[str, int]]:
    with Allocations() as allocations:
        found = [_measure(config, allocations) for config in _CONFIGS]
    return [{**measured, "peak": measured["held"] + allocations.rise_nbytes(name)} for measured, name in found]


def test_memory_and_traffic_of_the_example_gpt_are_as_planned() -> None:
    """Within 5 %, on 2 ranks: what is alive between steps and before one, the peak of a step, the bytes sent."""
    measured = ranks.run(2, _measure_all)
    rows = zero_shard.plan(_gpt, _CONFIGS, world_size=2, backend="gloo").rows
    for number, (row, name) in enumerate(zip(rows, _IDS, strict=True)):
        planned = {
            "held": sum(row.rehearsal.held.values()),
            "held_with_gradients": sum(row.rehearsal.held_with_gradients.values()),
            "sent": sum(row.sent_nbytes.values()),
            "peak": row.peak_nbytes,
        }
        for rank in range(2):
            found = measured[rank][number]
            for key, value in planned.items():
                assert value == pytest.approx(found[key], rel=_TOLERANCE), f"{name}: {key} on rank {rank}"
        assert planned["sent"] == row.rehearsal.sent_nbytes, "messages and the communicator count alike"


# --- any world size ---


def _small() -> nn.Module:
    return build_of_numbers(20_000_000, 3)


def test_the_work_of_the_host_does_not_grow_with_the_world() -> None:
    """As many Python functions and collectives are called in a step of 4096 ranks as in one of 16."""
    options: list[dict[str, Any]] = [{"shard_size": 8}, {"max_grad_norm": 1.0}]
    configs = [{"stage": stage} for stage in range(4)] + [
        {"stage": stage, **each} for each in options for stage in (2, 3)
    ]
    few = zero_shard.plan(_small, configs, world_size=16).rows
    many = zero_shard.plan(_small, configs, world_size=4096).rows
    for small, large in zip(few, many, strict=True):
        assert small.num_calls > 100 and small.num_messages > 0, "something is counted"
        assert large.num_calls == small.num_calls, large.label
        assert large.num_messages == small.num_messages, large.label


def test_memory_shrinks_and_traffic_grows_with_the_world_as_zero_says() -> None:
    numel = sum(param.numel() for param in _small().parameters())
    for world_size in (8, 4096):
        rows = zero_shard.plan(_small, world_size=world_size).rows
        peer_share = (world_size - 1) / world_size
        for row, factor, bytes_of in zip(
            rows,
            (3, 2, 2, 3),  # bf16 gathers and exchanges; stage 0 sends sums in fp32 back
            (16, 4 + 10 / world_size, 2 + 14 / world_size, 16 / world_size),  # weights, gradients, masters, moments
            strict=True,
        ):
            held = sum(row.rehearsal.held_with_gradients.values())
            padding = 3 * 6 * 16 * world_size * 16  # each bucket is padded to whole shards
            assert bytes_of * numel <= held <= 1.01 * bytes_of * numel + padding, row.label
            floor = factor * 2 * numel * peer_share
            assert floor <= sum(row.sent_nbytes.values()) <= 1.02 * floor + padding, row.label


def test_hops_of_hybrid_sharding_are_told_apart() -> None:
    row = zero_shard.plan(_small, {"stage": 2, "shard_size": 8}, world_size=64).rows[0]
    numel = 20_000_000
    assert row.sent_nbytes["shards"] == pytest.approx(2 * 2 * numel * 7 / 8, rel=0.01)
    assert row.sent_nbytes["replicas"] == pytest.approx(2 * 4 * numel / 8 * 7 / 8, rel=0.01)
    assert sum(row.sent_nbytes.values()) == row.rehearsal.sent_nbytes
    flat = zero_shard.plan(_small, {"stage": 2}, world_size=64).rows[0]
    assert "replicas" not in flat.sent_nbytes


def test_seventy_billion_parameters_on_eight_gpus_of_80_gib() -> None:
    """Stage 3 does not fit with fp32 moments; what fits is found, and the reasons are given."""
    small = {"stage": 3, "state_dtype": "int8", "master": "stochastic"}
    plan = zero_shard.plan("llama-3-70b", [{"stage": 3}, small], world_size=8)
    default, smallest = plan.rows
    assert plan.num_params == pytest.approx(70.55e9, rel=1e-3)
    assert default.peak["moments"] == pytest.approx(8 * 70.55e9 / 8, rel=0.01)
    assert not default.fits and smallest.fits and plan.best is smallest
    assert "stage 3 does not fit" in plan.why() and "would fit on about" in default.why()
    assert "for activations" in smallest.why()


# --- the parts ---


class _Odd(nn.Module):
    """Tied and frozen parameters, a buffer, a list without forward, a parameter that nobody names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.output = nn.Linear(16, 50, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(1000))

    def forward(self, *_: Any) -> None:
        raise AssertionError("the model's own forward must not run")


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_odd_models_are_planned_without_running_or_changing_them(backend: str) -> None:
    model = _Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    configs = [{"stage": stage, "max_grad_norm": 1.0, "skip_nonfinite": True} for stage in range(4)]
    rows = zero_shard.plan(model, configs, world_size=4, backend=backend).rows
    assert [row.peak["buffers"] for row in rows] == [4000] * 4
    assert rows[3].peak["weights"] < rows[2].peak["weights"]
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert type(model.embedding) is nn.Embedding and model.output.weight is model.embedding.weight


def test_a_plan_takes_no_memory_and_leaves_nothing_behind() -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    zero_shard.plan(_small, {"stage": 3}, world_size=8)
    before, resize = resident(), torch.UntypedStorage.resize_
    zero_shard.plan(lambda: build_of_numbers(50_000_000_000, 4), {"stage": 2}, world_size=8)  # 100 GB of weights
    assert resident() - before < 100 << 20
    assert torch.UntypedStorage.resize_ is resize
    assert not logging.getLogger("zero_shard").disabled


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"world_size": 0}, ValueError, "world_size must be an integer of at least 1, got 0"),
        ({"world_size": 12}, ValueError, "ranks_per_node must divide the 12 ranks, got 8"),
        ({"world_size": 8, "memory_gib": 0}, ValueError, "memory_gib must be positive"),
        ({"world_size": 8, "activations_gib": 90}, ValueError, "activations_gib"),
        ({"world_size": 8, "backend": "mpi"}, ValueError, "backend must be 'nccl' or 'gloo', got 'mpi'"),
        ({"world_size": 8, "configs": {"shard_size": 3}}, ValueError, "shard_size must divide the 8 ranks, got 3"),
        ({"world_size": 8, "configs": {"stage": "auto"}}, ValueError, "leave configs out"),
        ({"world_size": 8, "model": "llama-9"}, ValueError, "llama-3-8b"),
        ({"world_size": 8, "model": 3}, TypeError, "model must be an nn.Module, a function"),
        ({"world_size": 8, "model": nn.ReLU()}, ValueError, "no parameters"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        zero_shard.plan(**{"model": _small, **arguments})


def test_links_by_the_ring() -> None:
    links = Links(Link(1e-6, 100e9), Link(10e-6, 10e9), Link(1e-5, 1e9))
    within = Message("all_gather", range(8), 7 * 1000, 7, False)
    assert links.seconds(within, 8) == pytest.approx(7e-6 + 7000 / 100e9)
    across = Message("all_gather", range(16), 15 * 1000, 15, False)  # one border, and 8 adapters to cross it
    assert links.seconds(across, 8) == pytest.approx(14e-6 + 10e-6 + 15000 / 80e9)
    replicas = Message("reduce_scatter", range(0, 16, 8), 1000, 1, False)
    assert links.seconds(replicas, 8) == pytest.approx(10e-6 + 1000 / 10e9)
    assert links.seconds(Message("all_reduce", range(16), 30, 30, True), 8) == pytest.approx(3e-4 + 3e-8)


def test_a_fit_finds_alpha_and_beta_again() -> None:
    samples = [(3, 3 * nbytes, 3 * 20e-6 + 3 * nbytes / 5e9) for nbytes in (1 << 10, 1 << 16, 1 << 22)]
    link = _fit(samples)
    assert link.alpha_s == pytest.approx(20e-6, rel=1e-6) and link.bytes_per_s == pytest.approx(5e9, rel=1e-6)


# --- stage = "auto" ---


_ROOMS_MIB = [1000, 30, 23, 17]  # shared by both ranks


def _stack() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256)) for _ in range(16)))


def _auto_stages(rooms: list[int], with_module: bool) -> list[Any]:
    """Build with so many MiB free on a rank; return the stage and the log's line, or the warning."""
    found: list[Any] = []
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("zero_shard")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    rank = torch.distributed.get_rank()
    try:
        for room in rooms:
            model = _stack()
            auto.free_nbytes_of = lambda _, room=room: (room + 7 * (1 - rank)) << 20  # type: ignore[assignment]
            optimizer = zero_shard.AdamW(
                model.parameters(), module=model if with_module else None, config={"stage": "auto"}
            )
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
            found.append(optimizer.config.stage)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    return [*found, lines[-1] if lines else ""]


def _auto_and_fit() -> tuple[list[Any], list[Any], str, Links]:
    refused = ""
    found = _auto_stages(_ROOMS_MIB, with_module=True)
    try:
        _auto_stages([2], with_module=False)
    except UserWarning as warning:
        refused = str(warning)
    plain = _auto_stages([23], with_module=False)
    return found, plain, refused, fit_links()


def test_auto_takes_the_lowest_stage_that_fits_on_every_rank() -> None:
    """The rank with the least memory decides; rank 0's line says what was chosen and why. Also measures links."""
    peaks = [row.peak_nbytes / 2**20 for row in zero_shard.plan(_stack, world_size=2, backend="gloo").rows]
    results = ranks.run(2, _auto_and_fit)
    own = 16 * 257 * 256 * 4 / 2**20
    wanted = [
        next((stage for stage in range(4) if peaks[stage] <= auto.PLANNED_SHARE * (room / 2 + own)), 3)
        for room in _ROOMS_MIB
    ]
    assert wanted == [0, 1, 2, 3], f"the rooms tell stages apart: {peaks}, {wanted}"
    for found, plain, refused, links in results:
        assert found[:4] == wanted
        assert plain[0] == 2
        assert "stage='auto' took stage 2" in refused and "pass module=model" in refused
        for link in (links.within, links.host):
            assert 0 < link.alpha_s < 0.1 and 1e6 < link.bytes_per_s < 1e12
        assert links == results[0][3], "ranks agree"
    assert "stage auto: its peak of" in results[0][0][4] and "fits into 80%" in results[0][0][4]


def test_free_memory_obeys_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    inner = groups / "outer/inner"
    (proc / "self").mkdir(parents=True)
    inner.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (proc / "self/cgroup").write_text("0::/outer/inner\n")
    monkeypatch.setattr(auto, "_PROC", proc)
    monkeypatch.setattr(auto, "_CGROUP", groups)
    assert auto.free_nbytes_of(torch.device("cpu")) == 8000 * 1024
    for place, limit in ((inner, "max"), (groups / "outer", "5000000")):
        (place / "memory.max").write_text(limit + "\n")
        (place / "memory.current").write_text("3000000\n")
        (place / "memory.stat").write_text("anon 1\ninactive_file 1000000\n")
    assert auto.free_nbytes_of(torch.device("cpu")) == 3000000
    (proc / "self/cgroup").write_text("4:memory:/job\n0::/\n")
    (groups / "memory").mkdir()
    (groups / "memory/memory.limit_in_bytes").write_text("2000000\n")
    (groups / "memory/memory.usage_in_bytes").write_text("500000\n")
    (groups / "memory/memory.stat").write_text("total_inactive_file 0\n")
    assert auto.free_nbytes_of(torch.device("cpu")) == 1500000


def test_a_fake_group_counts_what_each_collective_sends() -> None:
    group = FakeGroup(4, is_native=False)
    model = nn.Linear(64, 64, device="meta")
    zero_shard.AdamW(model.parameters(), config={"stage": 2}, process_group=group)
    assert {message.kind for message in group.messages} >= {"broadcast"}
    assert math.isclose(rehearsal.KINDS.index("weights"), 0) and planning.STAGES == (0, 1, 2, 3)
