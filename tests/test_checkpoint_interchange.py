"""Checkpoints to and from torch itself: FSDP2, DDP, plain AdamW, by DCP directories and torch files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zero_shard

Snapshot = dict[str, Any]
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
_OPTIONS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


class _Net(nn.Module):
    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.head = nn.Linear(7, 3)
        self.register_buffer("scale", torch.full((3,), float(seed)))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) * self.scale


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [param for param in model.parameters() if param.dim() > 1]
    biases = [param for param in model.parameters() if param.dim() == 1]
    return [{"params": weights, "lr": 0.1}, {"params": biases, "weight_decay": 0.0, "betas": (0.8, 0.99)}]


def _ours(dtype: torch.dtype, stage: int, seed: int = 5) -> tuple[nn.Module, zero_shard.AdamW]:
    model = _Net(dtype, seed)
    return model, zero_shard.AdamW(_groups(model), lr=0.01, module=model, config={"stage": stage})


def _plain(dtype: torch.dtype, seed: int = 5) -> tuple[nn.Module, torch.optim.AdamW]:
    model = _Net(dtype, seed)
    return model, torch.optim.AdamW(_groups(model), lr=0.01)


def _fsdp(dtype: torch.dtype, seed: int = 5) -> tuple[nn.Module, torch.optim.AdamW]:
    model = _Net(dtype, seed)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(_groups(model), lr=0.01)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """The same on every rank, so that the world size doesn't matter."""
    dtype = next(model.parameters()).dtype
    for number in range(num_steps):
        x = torch.linspace(-1, 1 + number, 28).view(4, 7).to(dtype)
        model(x).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    """Weights by name; state by name; options of groups. On rank 0 of ours, else on all ranks."""
    names = {param: name.removeprefix("module.") for name, param in model.named_parameters()}
    in_order = [names[param] for group in optimizer.param_groups for param in group["params"]]
    if isinstance(optimizer, zero_shard.AdamW):
        weights, full = zero_shard.full_state_dict(model), optimizer.full_state_dict()
        state = {in_order[number]: entry for number, entry in full["state"].items()} if full else {}
    else:
        weights = {name.removeprefix("module."): _whole(value) for name, value in model.state_dict().items()}
        state = {names[p]: {key: _whole(value) for key, value in e.items()} for p, e in optimizer.state.items()}
    options = [{key: group[key] for key in _OPTIONS} for group in optimizer.param_groups]
    return {"weights": weights, "state": state, "options": options}


def _assert_equal(got: Snapshot, want: Snapshot, where: Any, tolerance: float | None = None) -> None:
    """Compare every element: in the dtype of what was got, bit for bit, or within a tolerance."""
    assert got["options"] == want["options"], where
    assert got["weights"].keys() == want["weights"].keys(), where
    assert got["state"].keys() == want["state"].keys(), where
    for name, tensor in got["weights"].items():
        _assert_same(tensor, want["weights"][name], (where, name), tolerance)
    for name, entry in got["state"].items():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            _assert_same(entry[key], want["state"][name][key], (where, name, key), tolerance)


def _assert_same(got: Tensor, want: Tensor, where: Any, tolerance: float | None) -> None:
    assert got.shape == want.shape, where
    if tolerance is None:
        assert torch.equal(got, want.to(got.dtype)), where
    else:
        assert torch.allclose(got, want.to(got.dtype), rtol=tolerance, atol=tolerance), where


def _keys(is_flat: bool) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=is_flat)


# ---- FSDP2 reads ours ------------------------------------------------------------------------------------------------

_OURS = [("fp64", 0), ("fp64", 1), ("fp64", 2), ("fp64", 3), ("fp32", 3), ("bf16", 2)]


def _save_ours(root: Path) -> dict[Any, tuple[Snapshot, Snapshot]]:
    found = {}
    for name, stage in _OURS:
        model, optimizer = _ours(_DTYPES[name], stage)
        _train(model, optimizer, 3)
        zero_shard.save(root / f"{name}-{stage}", model, optimizer)
        saved = _snapshot(model, optimizer)
        _train(model, optimizer, 2)
        found[name, stage] = (saved, _snapshot(model, optimizer))
    return found


def _fsdp_loads(root: Path, saved: dict[Any, tuple[Snapshot, Snapshot]]) -> None:
    warnings.simplefilter("ignore")  # of torch's own making
    is_odd = dist.get_world_size() % 2
    for number, (name, stage) in enumerate(_OURS[1::2] if is_odd else _OURS):
        is_flat = (number + is_odd) % 2 == 0
        model, optimizer = _fsdp(_DTYPES[name], seed=6)
        weights, state = get_state_dict(model, optimizer, options=_keys(is_flat))
        dcp.load({"model": weights, "optim": state}, checkpoint_id=root / f"{name}-{stage}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=_keys(is_flat))
        where = f"{name}, stage {stage}, flat {is_flat}"
        loaded, gone_on = saved[name, stage]
        _assert_equal(_snapshot(model, optimizer), loaded, where)
        if name != "bf16":  # there FSDP2 keeps no master
            _train(model, optimizer, 2)
            _assert_equal(_snapshot(model, optimizer), gone_on, where, 1e-10 if name == "fp64" else 1e-4)


def test_fsdp2_reads_what_all_stages_write(tmp_path: Path) -> None:
    saved = ranks.run(2, _save_ours, tmp_path)[0]
    for world_size in (2, 3):
        ranks.run(world_size, _fsdp_loads, tmp_path, saved)


# ---- we read what torch writes ---------------------------------------------------------------------------------------

_FORMS = {  # how the tree is called, and how its keys look
    "model, optim": False,
    "model, optim, flat": True,
    "model, optimizer": False,
    "model, optimizer, flat": True,
    "app": False,
    "bare weights": False,
}


def _tree(form: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer, options=_keys(_FORMS[form]))
    if form == "bare weights":
        return weights
    tree = {"model": weights, "optimizer" if "optimizer" in form else "optim": state}
    return {"app": tree} if form == "app" else tree


def _save_theirs(root: Path) -> dict[str, Snapshot]:
    warnings.simplefilter("ignore")  # of torch's own making
    world_size, found = dist.get_world_size(), {}
    made = {"fsdp-fp64": _fsdp(torch.float64), "fsdp-bf16": _fsdp(torch.bfloat16)}
    if world_size == 2:
        made["ddp-fp64"] = _plain(torch.float64)
    for name, (model, optimizer) in made.items():
        wrapped = DistributedDataParallel(model) if "ddp" in name else model
        _train(wrapped, optimizer, 3)
        for form in _FORMS if (name, world_size) == ("fsdp-fp64", 2) else ("model, optim", "model, optim, flat"):
            dcp.save(_tree(form, wrapped, optimizer), checkpoint_id=root / f"{name}, {world_size}: {form}")
            found[f"{name}, {world_size}: {form}"] = _snapshot(wrapped, optimizer)
    model, optimizer = made["fsdp-fp64"]
    name = f"async, {world_size}: model, optim"
    found[name] = _snapshot(model, optimizer)
    tree, group = _tree("model, optim", model, optimizer), dist.new_group(backend="gloo")
    pending = dcp.async_save(tree, checkpoint_id=root / name, process_group=group)
    _train(model, optimizer, 1)
    pending.result()
    return found


def _load_theirs(root: Path, saved: dict[str, Snapshot], stages: list[int]) -> None:
    for number, (name, want) in enumerate(saved.items()):
        stage = stages[number % len(stages)]
        model, optimizer = _ours(_DTYPES["bf16" if "bf16" in name else "fp64"], stage, seed=6)
        if "bare" in name:
            zero_shard.load(root / name, model)
            got = {**want, "weights": zero_shard.full_state_dict(model)}
        else:
            zero_shard.load(root / name, model, optimizer)
            got = _snapshot(model, optimizer)
        if dist.get_rank() == 0:
            _assert_equal(got, want, f"{name}, to stage {stage}")  # moments of bfloat16 become float32 without loss


def test_we_read_what_fsdp2_and_ddp_write(tmp_path: Path) -> None:
    of_two, of_three = ranks.run(2, _save_theirs, tmp_path)[0], ranks.run(3, _save_theirs, tmp_path)[0]
    for world_size, stages, saved in (
        (1, [0, 3, 2], of_three),
        (2, [1, 2, 3, 0], of_two | of_three),
        (3, [3, 2, 1], of_two),
    ):
        ranks.run(world_size, _load_theirs, tmp_path, saved, stages)


# ---- one file of plain torch ----------------------------------------------------------------------------------------


def _save_for_plain(root: Path) -> dict[Any, tuple[Snapshot, Snapshot]]:
    found = {}
    for name, stage in (("fp64", 3), ("fp32", 1)):
        model, optimizer = _ours(_DTYPES[name], stage)
        _train(model, optimizer, 3)
        zero_shard.save(root / name, model, optimizer)
        saved = _snapshot(model, optimizer)
        _train(model, optimizer, 2)
        found[name] = (saved, _snapshot(model, optimizer))
    return found


def _load_from_plain(root: Path, saved: dict[str, tuple[Snapshot, Snapshot]]) -> None:
    for name, (loaded, gone_on) in saved.items():
        for stage in (0, 3):
            model, optimizer = _ours(_DTYPES[name], stage, seed=6)
            zero_shard.load(root / f"{name}-plain", model, optimizer)
            got = _snapshot(model, optimizer)
            _train(model, optimizer, 2)
            after = _snapshot(model, optimizer)
            if dist.get_rank() == 0:
                _assert_equal(got, loaded, f"{name}, to stage {stage}")
                _assert_equal(after, gone_on, f"{name}, to stage {stage}", 1e-10 if name == "fp64" else 1e-4)


def test_one_torch_file_into_plain_adamw_and_back(tmp_path: Path) -> None:
    saved = ranks.run(2, _save_for_plain, tmp_path)[0]
    plain = {}
    for name, (want, gone_on) in saved.items():
        dcp_to_torch_save(tmp_path / name, tmp_path / "file.pt")
        content = torch.load(tmp_path / "file.pt", weights_only=True)
        model, optimizer = _plain(_DTYPES[name], seed=6)
        model.load_state_dict(content["model"], strict=True)
        optimizer.load_state_dict(content["optim"])
        _assert_equal(_snapshot(model, optimizer), want, name)
        _train(model, optimizer, 2)
        _assert_equal(_snapshot(model, optimizer), gone_on, name, 1e-10 if name == "fp64" else 1e-4)
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "file.pt")
        torch_save_to_dcp(tmp_path / "file.pt", tmp_path / f"{name}-plain")
        want = _snapshot(model, optimizer)
        _train(model, optimizer, 2)
        plain[name] = (want, _snapshot(model, optimizer))
    ranks.run(2, _load_from_plain, tmp_path, plain)
