"""No stale master: loading, editing and checkpoints of parameters that param_dtype has cast; and what goes where."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import EXACT, Snapshot, assert_snapshots_close, sharded_snapshot
from test_mixed_precision import HYPER, build, groups_of, loss_of, make_net, rounded, train
from torch import Tensor, nn

import zero_shard
from zero_shard.masters import home_of

_KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_NAME = "blocks.1.up.weight"
Weights = dict[str, Tensor]


def full_weights(model: nn.Module) -> Weights:
    """Return the float32 weights on every rank."""
    shared = [zero_shard.full_state_dict(model)]
    if dist.is_initialized():
        dist.broadcast_object_list(shared)
    return shared[0]


def other_weights() -> Weights:
    """Return float32 weights of the model that differ from those it starts with."""
    torch.manual_seed(11)
    return {name: torch.randn_like(value) / 3 for name, value in make_net().state_dict().items()}


def assert_weights(model: nn.Module, want: Weights, where: str) -> None:
    got = full_weights(model)
    assert list(got) == list(want), where
    for name, value in want.items():
        assert got[name].dtype == torch.float32
        torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=lambda text, n=name: f"{where}: {n}: {text}")


# --- edits ---


def _load(model: nn.Module) -> Weights:
    with zero_shard.gathered(model, modify=True):
        model.load_state_dict(other_weights())
    want = other_weights()
    want["head.weight"] = want["embed.weight"] = want["head.weight"]  # the later one wins
    return want


def _load_submodule(model: nn.Module) -> Weights:
    want = full_weights(model)
    new = {name.removeprefix("blocks.1."): v for name, v in other_weights().items() if name.startswith("blocks.1.")}
    with zero_shard.gathered(model.blocks[1], modify=True):
        model.blocks[1].load_state_dict(new)
    return want | {f"blocks.1.{name}": value for name, value in new.items()}


def _load_16_bits(model: nn.Module) -> Weights:
    narrow = {name: value.to(model.gain.dtype) for name, value in other_weights().items()}
    with zero_shard.gathered(model, modify=True):
        model.load_state_dict(narrow)
    want = {name: value.float() for name, value in narrow.items()}
    want["head.weight"] = want["embed.weight"] = want["head.weight"]
    return want


def _edit_in_place(model: nn.Module) -> Weights:
    want, dtype = full_weights(model), model.gain.dtype
    with zero_shard.gathered(model, modify=True), torch.no_grad():
        param = model.get_parameter(_NAME)
        before = param.clone()
        param.mul_(0.5).add_(0.25)
    return want | {_NAME: (before * 0.5 + 0.25).to(dtype).float()}


def _initialise(model: nn.Module) -> Weights:
    want = full_weights(model)
    with zero_shard.gathered(model.blocks[1], modify=True):
        nn.init.ones_(model.get_parameter(_NAME))
    return want | {_NAME: torch.ones_like(want[_NAME])}


def _replace_data(model: nn.Module) -> Weights:
    want, dtype = full_weights(model), model.gain.dtype
    with zero_shard.gathered(model, modify=True):
        param = model.get_parameter(_NAME)
        param.data = torch.full_like(param, 0.3)
    return want | {_NAME: torch.full_like(want[_NAME], 0.3).to(dtype).float()}


_EDITS = [_load_16_bits, _load, _load_submodule, _edit_in_place, _initialise, _replace_data]


def _edit_at_stages(kinds_and_stages: list[tuple[str, int]]) -> None:
    for kind, stage in kinds_and_stages:
        model, optimizer = build({"stage": stage, "param_dtype": kind})
        for number, edit in enumerate(_EDITS):
            where = f"stage {stage}, {kind}, {edit.__name__}"
            _step(model, optimizer, number, lr=3e-3)
            want = edit(model)
            assert_weights(model, want, where)
            _step(model, optimizer, number, lr=0.0)  # the update starts from these weights
            assert_weights(model, want, f"{where}, after a step that moves nothing")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    train(model, optimizer, range(step, step + 1))


@pytest.mark.parametrize(
    ("world_size", "kinds_and_stages"),
    [
        (1, [("bfloat16", 0), ("float16", 3)]),
        (2, [*(("bfloat16", stage) for stage in range(4)), ("float16", 1), ("float16", 3)]),
    ],
)
def test_no_stale_master_after_loading_and_editing(world_size: int, kinds_and_stages: list[tuple[str, int]]) -> None:
    ranks.run(world_size, _edit_at_stages, kinds_and_stages)


def _changes_without_modify_are_lost() -> None:
    model, optimizer = build({"stage": 3, "param_dtype": "bfloat16"})
    train(model, optimizer, range(1))
    want = full_weights(model)
    with zero_shard.gathered(model):
        model.load_state_dict(other_weights() | {"places": want["places"]})
    assert_weights(model, want, "loaded without modify=True")


def test_loading_at_stage_3_without_modify_changes_nothing() -> None:
    ranks.run(2, _changes_without_modify_are_lost)


def _clamp_at_every_step() -> None:
    """Steps of a sixteenth of a bf16 unit add up, though some elements are clamped after every one of them."""
    for stage in (0, 2, 3) if dist.get_world_size() > 1 else (0,):
        model = nn.Linear(64, 64, bias=False)
        nn.init.ones_(model.weight)
        with torch.no_grad():
            model.weight[:32] = 3.0
        optimizer = zero_shard.AdamW(
            model.parameters(),
            lr=2**-12,
            weight_decay=0.25,
            module=model,
            config={"stage": stage, "param_dtype": "bf16"},
        )
        for _ in range(64):
            (model(torch.zeros(1, 64)).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            with zero_shard.gathered(model, modify=True), torch.no_grad():
                model.weight.clamp_(max=2.0)
        weight = full_weights(model)["weight"]
        # The first edit of a parameter costs the digits that one step has moved.
        assert (weight[:32] - 2 * (1 - 2**-14) ** 63).abs().max() < 2**-12
        assert (weight[32:] - (1 - 2**-14) ** 63).abs().max() < 2**-13
        assert optimizer.usage().held_nbytes <= 64 * 64 * 20


@pytest.mark.parametrize("world_size", [1, 2])
def test_edits_at_every_step_leave_the_masters_of_other_elements(world_size: int) -> None:
    ranks.run(world_size, _clamp_at_every_step)


# --- state dicts and checkpoints ---


def _resume_from_own_dicts() -> None:
    """What torch.save(model.state_dict()) and torch.save(optimizer.state_dict()) keep, in either order of loading."""
    for kind, stages in (("bfloat16", (0, 1, 2)), ("float16", (1,))):
        for stage in stages:
            model, optimizer = build({"stage": stage, "param_dtype": kind})
            train(model, optimizer, range(2))
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            train(model, optimizer, range(2, 4))
            want = sharded_snapshot(model, optimizer)
            for order in ((0, 1), (1, 0)):
                model, optimizer = build({"stage": stage, "param_dtype": kind})
                train(model, optimizer, range(1))
                for which in order:
                    (model, optimizer)[which].load_state_dict(saved[which])
                train(model, optimizer, range(2, 4))
                got = sharded_snapshot(model, optimizer)
                for snapshot in (want, got):  # frozen ones have no entry in an optimizer's dict
                    for name in ("fixed.weight", "fixed.bias"):
                        snapshot.pop(name, None)
                assert_snapshots_close(got, want, EXACT, f"{kind}, stage {stage}, order {order}")


def test_state_dicts_of_model_and_optimizer_resume_bit_for_bit() -> None:
    ranks.run(2, _resume_from_own_dicts)


def _save(path: str, kind: str, stage: int) -> tuple[Snapshot, Snapshot]:
    model, optimizer = build({"stage": stage, "param_dtype": kind})
    train(model, optimizer, range(2))
    zero_shard.save(path, model, optimizer)
    saved = sharded_snapshot(model, optimizer)
    train_alike(model, optimizer)
    return saved, sharded_snapshot(model, optimizer)


def train_alike(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every rank sees the same, so that the mean is the same in worlds of one, two and four."""
    for step in (2, 3):
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        optimizer.step()


def _restore(path: str, kind: str, stage: int) -> tuple[Snapshot, Snapshot]:
    model, optimizer = build({"stage": stage, "param_dtype": kind})
    zero_shard.load(path, model, optimizer)
    loaded = sharded_snapshot(model, optimizer)
    train_alike(model, optimizer)
    return loaded, sharded_snapshot(model, optimizer)


@pytest.mark.parametrize("kind", _KINDS)
def test_checkpoints_hold_the_masters_and_load_at_another_stage_and_world_size(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    saved, later = ranks.run(2, _save, path, kind, 3)[0]
    for world_size, stage in ((1, 0), (4, 2)):
        loaded, trained = ranks.run(world_size, _restore, path, kind, stage)[0]
        assert_snapshots_close(loaded, saved, EXACT, f"{world_size} ranks, stage {stage}")
        if world_size > 1 or kind == "bfloat16":  # one rank sends no gradients, so none is rounded to float16
            assert_snapshots_close(trained, later, EXACT, f"{world_size} ranks, stage {stage}, later")
    # A run without param_dtype reads the masters as its weights, and its checkpoint becomes masters again.
    model = make_net()
    optimizer = zero_shard.AdamW(groups_of(model), **HYPER, module=model)
    zero_shard.load(path, model, optimizer)
    assert_snapshots_close(sharded_snapshot(model, optimizer), saved, EXACT, "without param_dtype")
    zero_shard.save(str(tmp_path / "plain"), model, optimizer)
    loaded, _ = ranks.run(2, _restore, str(tmp_path / "plain"), kind, 1)[0]
    assert_snapshots_close(loaded, saved, EXACT, "of a run without param_dtype")


def test_a_checkpoint_of_16_bit_weights_brings_their_masters(tmp_path: Path) -> None:
    """A model that was 16 bits wide itself keeps the rest of its masters beside the weights."""
    model = nn.Linear(40, 30).bfloat16()
    optimizer = zero_shard.AdamW(model.parameters(), module=model)
    for _ in range(2):
        model(torch.ones(1, 40).bfloat16()).sum().backward()
        optimizer.step()
    zero_shard.save(tmp_path / "saved", model, optimizer)
    low = optimizer.state_dict()["state"][0]["low"]
    assert low.count_nonzero() > 1000
    other = nn.Linear(40, 30)
    wide = zero_shard.AdamW(other.parameters(), module=other, config={"param_dtype": "bfloat16"})
    zero_shard.load(tmp_path / "saved", other, wide)
    assert torch.equal(other.weight, model.weight)
    home = home_of(other.weight)
    assert home is not None and home[0].low is not None
    assert torch.equal(wide.state_dict()["state"][0]["low"], low)


def test_the_first_weights_are_kept_without_loss() -> None:
    for kind, dtype in _KINDS.items():
        want = make_net()
        model, _ = build({"param_dtype": kind})
        assert_weights(model, want.state_dict(), kind)
        weight = want.get_parameter(_NAME).detach()
        assert torch.equal(model.get_parameter(_NAME).detach(), rounded(weight, dtype))


def _take_those_of_rank_0() -> str:
    torch.manual_seed(dist.get_rank())
    for stage in (1, 3):
        model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 3))
        want = [copy.deepcopy(model.state_dict())]
        dist.broadcast_object_list(want)
        optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage, "param_dtype": "bf16"})
        assert_weights(model, want[0], f"stage {stage}")
        del optimizer
    model = nn.Linear(20, 30)
    nn.init.constant_(model.weight, 1.0 + dist.get_rank() * 2.0**-23)
    nn.init.zeros_(model.bias)
    config = {"param_dtype": "bf16", "sync_module_states": False}
    with pytest.raises(ValueError, match="different values of weight") as caught:
        zero_shard.AdamW(model.parameters(), module=model, config=config)
    return str(caught.value)


def test_all_ranks_start_with_the_float32_weights_of_rank_0() -> None:
    assert len(set(ranks.run(2, _take_those_of_rank_0))) == 1


def test_the_state_of_another_optimizer_leaves_the_masters() -> None:
    plain = make_net()
    plain_optimizer = torch.optim.AdamW(groups_of(plain), **HYPER)
    train(plain, plain_optimizer, range(2))
    model, optimizer = build({"param_dtype": "bfloat16"})
    train(model, optimizer, range(1))
    want = full_weights(model)
    optimizer.load_state_dict(plain_optimizer.state_dict())
    assert_weights(model, want, "loaded the state of plain AdamW")
    optimizer.state.clear()
    _step(model, optimizer, 1, lr=0.0)
    assert_weights(model, want, "cleared the state")
    assert float(optimizer.state[model.gain]["step"]) == 1
