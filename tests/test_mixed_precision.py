"""param_dtype: 16-bit parameters beside float32 masters train as a loop written by hand does, at every stage."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import (
    EXACT,
    Snapshot,
    Tolerance,
    assert_ranks_agree,
    assert_snapshots_close,
    mean_over_ranks,
    plain_snapshot,
    sharded_snapshot,
)
from torch import Tensor, nn

import zero_shard

HYPER: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_NUM_STEPS = 4
_WIDTH = 10


class Block(nn.Module):
    """What a transformer block is made of, without the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 23)
        self.down = nn.Linear(23, _WIDTH)

    def forward(self, x: Tensor, scale: dict[str, Tensor]) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * scale["by"]


class Net(nn.Module):
    """Tied weights, a frozen layer, a parameter of the root, one that is not row-major, a buffer, and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, _WIDTH)
        self.register_buffer("places", torch.arange(5 * _WIDTH).view(5, _WIDTH) / 77)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.fixed = nn.Linear(_WIDTH, _WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, 13)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.head.weight = self.embed.weight
        self.blocks[0].up.weight = nn.Parameter((torch.randn(_WIDTH, 23) / 4).t())

    def forward(self, ids: Tensor, *, scale: dict[str, Tensor]) -> Tensor:
        x = self.embed(ids) + self.places
        for block in self.blocks:
            x = block(x, scale)
        return self.head(self.norm(self.fixed(x)) * self.gain)


class HandCast(Net):
    """The same with every cast written out."""

    def forward(self, ids: Tensor, *, scale: dict[str, Tensor]) -> Tensor:
        dtype, by = self.head.weight.dtype, scale["by"].to(self.head.weight.dtype)
        x = self.embed(ids) + self.places  # float32, because of the buffer
        for block in self.blocks:
            x = x + block.down(torch.tanh(block.up(block.norm(x).to(dtype)))) * by
        return self.head(self.norm(self.fixed(x.to(dtype)).float()).to(dtype) * self.gain)


def make_net() -> Net:
    torch.manual_seed(5)
    return Net()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(13, (4, 5), generator=generator), torch.randn(5, 1, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    ids, by = batch(step, rank)
    return model(ids, scale={"by": by}).float().square().mean() * 8


def groups_of(model: Net) -> list[dict[str, Any]]:
    trained = [param for param in model.parameters() if param.requires_grad]
    return [{"params": trained[:4]}, {"params": trained[4:], "lr": 1e-2, "betas": (0.8, 0.95)}]


def build(config: dict[str, Any], model: Net | None = None) -> tuple[Net, zero_shard.AdamW]:
    model = make_net() if model is None else model
    return model, zero_shard.AdamW(groups_of(model), **HYPER, module=model, config=config)


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank_of()).backward()
        optimizer.step()


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a weight is in 16 bits; for bfloat16 halves go away from zero (see docs/kernels.md)."""
    if dtype == torch.float16:
        return master.to(dtype)
    bits = master.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def by_hand(dtype: torch.dtype, world_size: int, thaw_at: int | None = None, scale: float = 1.0) -> Snapshot:
    """Train float32 masters with plain AdamW on gradients that a 16-bit copy makes."""
    master, narrow = make_net(), HandCast()
    for name, param in narrow.named_parameters():
        param.requires_grad_(not name.startswith("fixed"))
        if "norm" not in name:
            param.data = param.data.to(dtype)
            param.grad_dtype = torch.float32 if dtype == torch.float16 else dtype
    optimizer = torch.optim.AdamW(groups_of(master), **HYPER)
    pairs = list(zip(narrow.parameters(), master.parameters(), strict=True))
    for step in range(_NUM_STEPS):
        if step == thaw_at:
            _thaw(master, optimizer)
            narrow.fixed.requires_grad_(True)
        with torch.no_grad():
            for (name, param), (_, wide) in zip(narrow.named_parameters(), pairs, strict=True):
                param.copy_(wide if "norm" in name else rounded(wide, dtype))
        for _, wide in pairs:
            wide.grad = None
        for rank in range(world_size):
            narrow.zero_grad()
            (loss_of(narrow, step, rank) * scale).backward()
            for param, wide in pairs:
                if param.grad is not None:
                    sent = param.grad if world_size == 1 else param.grad.to(param.dtype)
                    wide.grad = sent.float() + (0 if wide.grad is None else wide.grad)
        for _, wide in pairs:
            wide.grad = None if wide.grad is None else wide.grad / world_size / scale
        optimizer.step()
    snapshot: Snapshot = {}
    for name, param in master.named_parameters():
        entry = optimizer.state.get(param, {})
        snapshot[name] = {"param": param.detach().clone(), **{key: value.clone() for key, value in entry.items()}}
    return snapshot


# --- one result, the one of a loop written by hand ---

_WAYS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "bucket_mib": 0.001},
    {"stage": 3},
    {"stage": 3, "units": ["Block"], "reshard_after_forward": False},
]


def _train_at_all_stages(num_ways: int) -> dict[str, list[Snapshot]]:
    found: dict[str, list[Snapshot]] = {name: [] for name in _DTYPES}
    for name, dtype in _DTYPES.items():
        for way in _WAYS[:num_ways]:
            model, optimizer = build({**way, "param_dtype": name})
            kinds = {each: param.dtype for each, param in model.named_parameters()}
            assert set(kinds.values()) == {dtype, torch.float32}
            assert all((kind == torch.float32) == ("norm" in each) for each, kind in kinds.items()), kinds
            assert model.places.dtype == torch.float32
            train(model, optimizer, range(_NUM_STEPS))
            if dist.is_initialized():
                assert_ranks_agree(model, f"{way}")
            found[name].append(sharded_snapshot(model, optimizer))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_stages_agree_and_equal_a_loop_by_hand(world_size: int) -> None:
    num_ways = {1: 2, 2: len(_WAYS), 3: 4}[world_size]
    found = ranks.run(world_size, _train_at_all_stages, num_ways)[0]
    for name, dtype in _DTYPES.items():
        want = by_hand(dtype, world_size)
        assert all(entry["param"].dtype == torch.float32 for entry in want.values())
        # One unit in the last place per step, and for moments the order of a sum.
        assert_snapshots_close(found[name][0], want, Tolerance(_NUM_STEPS * 2.0**-23, 1e-7), f"{world_size}, {name}")
        for way, snapshot in zip(_WAYS[:num_ways], found[name], strict=True):
            assert_snapshots_close(snapshot, found[name][0], EXACT, f"{world_size} ranks, {name}, {way}")


_SCALE = 64.0


def _train_scaled() -> list[Snapshot]:
    found = []
    for way in _WAYS[:4]:
        model, optimizer = build({**way, "param_dtype": "float16"})
        scaler = torch.amp.GradScaler("cpu", init_scale=_SCALE)
        for step in (0, 1, None, 2, 3):
            optimizer.zero_grad()
            factor = float("inf") if step is None and dist.get_rank() == 1 else 1.0  # one rank overflows
            scaler.scale(loss_of(model, step or 0, dist.get_rank()) * factor).backward()
            if step != 1:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
                assert torch.isfinite(norm) == (step is not None)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (_SCALE if step is not None else _SCALE / 2)
            scaler.update(_SCALE)
        found.append(sharded_snapshot(model, optimizer))
    return found


def test_float16_trains_with_a_grad_scaler() -> None:
    """Gradients of float16 parameters are float32, so that they can be unscaled."""
    want = by_hand(torch.float16, 2, scale=_SCALE)
    for way, snapshot in zip(_WAYS, ranks.run(2, _train_scaled)[0], strict=False):
        assert_snapshots_close(snapshot, want, Tolerance(_NUM_STEPS * 2.0**-23, 1e-7), f"{way}")


def _small_updates(path: str) -> list[tuple[float, float]]:
    """Case O08: updates far below a unit in the last place of bfloat16, and a break for saving."""
    found = []
    for stage in range(4):
        for num_before in (50, 100)[: 1 if stage != 2 else 2]:
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)

            def start(model: nn.Linear, config: dict[str, Any]) -> zero_shard.AdamW:
                return zero_shard.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, module=model, config=config)

            optimizer = start(model, {"stage": stage, "param_dtype": "bfloat16"})
            for step in range(100):
                if step == num_before:
                    zero_shard.save(path, model, optimizer)
                    model = nn.Linear(1, 1, bias=False)
                    optimizer = start(model, {"stage": (stage + 1) % 4, "param_dtype": "bfloat16"})
                    zero_shard.load(path, model, optimizer)
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
            with zero_shard.gathered(model):
                weight = float(model.weight.detach())
            full = zero_shard.full_state_dict(model)
            found.append((weight, float(full["weight"]) if full else 0.0))
    return found


def test_small_updates_add_up(tmp_path: Path) -> None:
    plain = nn.Parameter(torch.ones(1, 1))
    optimizer = torch.optim.AdamW([plain], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        plain.grad = torch.ones(1, 1)
        optimizer.step()
    for weight, master in ranks.run(2, _small_updates, str(tmp_path / "saved"))[0]:
        assert weight == 0.98828125
        assert master == pytest.approx(float(plain.detach()), rel=100 * 2.0**-23)


# --- parameters that come to training later, and models that come to life late ---


def _thaw(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.fixed.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.fixed.parameters()), "lr": 2e-2})


def _train_and_unfreeze() -> list[Snapshot]:
    found = []
    for stage in range(4):
        model, optimizer = build({"stage": stage, "param_dtype": "bfloat16"})
        assert model.fixed.weight.dtype == torch.bfloat16
        train(model, optimizer, range(2))
        _thaw(model, optimizer)
        train(model, optimizer, range(2, _NUM_STEPS))
        found.append(sharded_snapshot(model, optimizer))
    return found


def test_unfrozen_parameters_go_on_from_their_float32_values() -> None:
    want = by_hand(torch.bfloat16, 2, thaw_at=2)
    assert float(want["fixed.weight"]["step"]) == 2
    for stage, snapshot in enumerate(ranks.run(2, _train_and_unfreeze)[0]):
        assert_snapshots_close(snapshot, want, Tolerance(_NUM_STEPS * 2.0**-23, 1e-7), f"stage {stage}")


def _grow() -> None:
    for stage in range(4):
        model, optimizer = build({"stage": stage, "param_dtype": "bfloat16"})
        train(model, optimizer, range(1))
        torch.manual_seed(3)
        model.norm = nn.Sequential(model.norm, extra := nn.Linear(_WIDTH, _WIDTH))
        before = extra.weight.detach().clone()
        optimizer.add_param_group({"params": list(extra.parameters())})
        assert extra.weight.dtype == torch.bfloat16
        full = zero_shard.full_state_dict(model)
        assert not full or torch.equal(full["norm.1.weight"], before)
        train(model, optimizer, range(1, 3))
        assert_ranks_agree(model, f"stage {stage}")


def test_a_layer_added_later_is_cast_too() -> None:
    ranks.run(2, _grow)


def _from_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(12, 33), nn.LayerNorm(33), nn.Tanh(), nn.Linear(33, 5))
    optimizer = zero_shard.AdamW(
        model.parameters(), module=model, config={"stage": 3, "param_dtype": "bfloat16", "units": ["Linear"]}
    )
    full = zero_shard.full_state_dict(model)
    for name, value in full.items():
        assert value.dtype == torch.float32
        has_rest = not torch.equal(value, value.bfloat16().float())
        assert has_rest == (not name.startswith("1.")), name
    for _ in range(2):
        model(torch.ones(2, 12)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_ranks_agree(model)
    assert model[0].weight.dtype == torch.bfloat16 and model[1].weight.dtype == torch.float32


def test_models_on_the_meta_device_get_float32_values() -> None:
    ranks.run(2, _from_meta)


# --- memory ---


def _usages() -> list[tuple[zero_shard.Usage, zero_shard.Usage]]:
    found = []
    for stage in range(4):
        pair = []
        for config, dtype in (({"param_dtype": "bfloat16"}, torch.float32), ({}, torch.bfloat16)):
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6))).to(dtype)
            model[0].requires_grad_(False)
            optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage, **config})
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 64, dtype=dtype)).sum().backward()
                optimizer.step()
            pair.append(optimizer.usage())
        found.append((pair[0], pair[1]))
    return found


def test_memory_and_traffic_are_those_of_a_model_of_16_bits() -> None:
    """But for the frozen parameters, which are sharded too, and keep what lets them train again."""
    for stage, (cast, narrow) in enumerate(ranks.run(2, _usages)[0]):
        numel = 64 * 64
        frozen = 2 * numel if stage == 0 else numel
        assert cast.promised_nbytes - narrow.promised_nbytes == frozen, stage
        assert abs(cast.held_nbytes - narrow.held_nbytes - frozen) < 16, stage  # a step count more
        assert cast.sent_nbytes == pytest.approx(narrow.sent_nbytes, rel=0.01)
        assert cast.floor_sent_nbytes == narrow.floor_sent_nbytes


# --- the line at the start ---


def _lines() -> list[str]:
    lines: list[str] = []
    log = logging.getLogger("zero_shard")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        build({"param_dtype": "bfloat16"})
        build({"param_dtype": "float16", "reduce_dtype": "float32", "stage": 3})
        build({"stage": 1, "state_dtype": "bfloat16"})
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return lines


def test_one_line_says_what_is_stored_in_what() -> None:
    alone = ranks.run(1, _lines)[0]
    lines, others = ranks.run(2, _lines)
    assert others == []
    assert "stage 2 on 1 rank; parameters bfloat16 + 16-bit remainder (lossless float32 master)" in alone[0]
    remainder, master, plain = lines
    assert "stage 2 on 2 ranks; parameters bfloat16 + 16-bit remainder (lossless float32 master) (" in remainder
    assert "float32 (" in remainder and "gradients float32, bfloat16 and float32 on the wire" in remainder
    assert "moments float32; " in remainder and "bytes per parameter and rank" in remainder
    assert "stage 3 on 2 ranks; parameters float16 + float32 master" in master and "float32 on the wire" in master
    assert "parameters float32; gradients" in plain and "moments bfloat16; " in plain


# --- torch.autocast over float32 parameters ---


def _autocast() -> list[Snapshot]:
    found = []
    for way in _WAYS:
        model, optimizer = build(way)
        for step in range(_NUM_STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, step, dist.get_rank())
            loss.backward()
            optimizer.step()
        found.append(sharded_snapshot(model, optimizer))
    return found


def test_autocast_over_float32_parameters() -> None:
    model = make_net()
    optimizer = torch.optim.AdamW(groups_of(model), **HYPER)

    def loss(step: int, rank: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, step, rank)

    for step in range(_NUM_STEPS):
        mean_over_ranks(model.parameters(), [[partial(loss, step, rank)] for rank in range(2)])
        optimizer.step()
    want = plain_snapshot(model, optimizer)
    first, *others = ranks.run(2, _autocast)[0]
    assert_snapshots_close(first, want, Tolerance(_NUM_STEPS * 1e-6, _NUM_STEPS * 1e-6), "stage 0")
    for way, snapshot in zip(_WAYS[1:], others, strict=True):
        assert_snapshots_close(snapshot, first, EXACT, f"{way}")
