"""Coming from NVIDIA apex: its state dicts load; what its kernels cannot store is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracle import EXACT, assert_snapshots_close, sharded_snapshot
from stacks import HYPER, build, make_model, train
from torch import Tensor, nn

import zero_shard
from zero_shard import ops


@pytest.mark.parametrize("kind", ["FusedAdam", "DistributedFusedAdam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_dicts_of_apex_load(kind: str, dtype: torch.dtype) -> None:
    """FusedAdam counts steps by group, DistributedFusedAdam once; the latter has the fp32 master as ``param``."""
    source, source_optimizer = build(dtype, {})
    train(source, source_optimizer, dtype, range(3))
    plain = copy.deepcopy(source_optimizer.full_state_dict())
    (group,) = plain["param_groups"]
    kept = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "params")} | {"bias_correction": True}
    state: dict[Any, Any] = {n: {k: e[k] for k in ("exp_avg", "exp_avg_sq")} for n, e in plain["state"].items()}
    if kind == "FusedAdam":
        kept["step"] = 3
    else:
        state["step"] = 3
        for number, slot in enumerate(source_optimizer._reducer.slots):
            assert slot.index == number, "one bucket in the order of the groups"
        masters = _masters(source, source_optimizer)
        for number, master in enumerate(masters):
            state[number]["param"] = master
    target = copy.deepcopy({name: value.clone() for name, value in source.state_dict().items()})
    model = make_model(dtype)
    model.load_state_dict(target)
    optimizer = zero_shard.AdamW(model.parameters(), **HYPER)
    optimizer.load_state_dict({"state": state, "param_groups": [kept]})
    got, want = sharded_snapshot(model, optimizer), sharded_snapshot(source, source_optimizer)
    assert_snapshots_close(got, want, EXACT, kind)
    if kind == "DistributedFusedAdam" or dtype == torch.float32:  # else the low halves of the masters are not known
        train(model, optimizer, dtype, range(3, 5))
        train(source, source_optimizer, dtype, range(3, 5))
        assert_snapshots_close(sharded_snapshot(model, optimizer), sharded_snapshot(source, source_optimizer), EXACT)


def _masters(model: nn.Module, optimizer: zero_shard.AdamW) -> list[Tensor]:
    """Return the fp32 masters, whole, in the order of the groups, of a world of one."""
    state = optimizer.state_dict()["state"]
    masters = []
    for number, param in enumerate(model.parameters()):
        master = param.detach().float()
        low = state[number].get("low")
        if low is not None and low.dtype == torch.int16:
            high = param.detach().view(torch.int16).to(torch.int32) << 16
            master = (high + low.to(torch.int32)).view(torch.float32)
        elif low is not None:
            master = low.clone()
        masters.append(master)
    return masters


def test_a_dict_without_bias_correction_is_refused() -> None:
    model, optimizer = build(torch.float32, {})
    saved = torch.optim.AdamW(model.parameters()).state_dict()
    saved["param_groups"][0]["bias_correction"] = False
    with pytest.raises(ValueError, match="bias_correction=False"):
        optimizer.load_state_dict(saved)


def test_what_apex_keeps_in_its_groups_does_not_stay() -> None:
    model = make_model(torch.float32)
    optimizer = zero_shard.AdamW(model.parameters(), **HYPER, maximize=True)
    saved = copy.deepcopy(torch.optim.AdamW(model.parameters(), lr=0.5).state_dict())
    (group,) = saved["param_groups"]
    kept = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "params")}
    optimizer.load_state_dict({"state": {}, "param_groups": [{**kept, "step": 10, "bias_correction": 1}]})
    (loaded,) = optimizer.param_groups
    assert loaded["lr"] == 0.5
    assert loaded["maximize"] is True, "apex has no such setting"
    assert not {"step", "bias_correction"} & set(loaded)


@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (torch.bfloat16, {"master": "none"}),
        (torch.float16, {}),
        (torch.float64, {"master": "none"}),
        (torch.bfloat16, {"master": "stochastic"}),
        (torch.float32, {"state_dtype": "int8"}),
        (torch.float32, {"state_dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_apex_kernels_are_refused_where_they_cannot_store_the_state(
    dtype: torch.dtype, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = ops.select("torch")
    monkeypatch.setattr(ops, "select", lambda *_: kernels)
    with pytest.raises(ValueError, match=r"0\.weight.*kernels='apex'.*use kernels='auto'"):
        build(dtype, {**config, "kernels": "apex"})
    build(torch.float32, {"kernels": "apex"})
