"""Dicts of NVIDIA apex's optimizers become an import: every weight and moment, whatever the file holds beside them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_shard
from zero_shard.interchange import read_apex

NAMES = ["0.weight", "2.weight", "0.bias", "1.weight", "1.bias", "2.bias"]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).to(torch.bfloat16)


def make_dict(model: nn.Module, has_masters: bool = True) -> dict[str, Any]:
    """What DistributedFusedAdam.state_dict() gives (or, without masters, FusedAdam): whole tensors, one step count."""
    generator = torch.Generator().manual_seed(1)
    params = dict(model.named_parameters())
    state: dict[Any, Any] = {}
    for number, name in enumerate(NAMES):
        shape = params[name].shape
        state[number] = {kind: torch.rand(shape, generator=generator) for kind in ("exp_avg", "exp_avg_sq")}
        if has_masters:
            state[number]["param"] = params[name].detach().float() + torch.randn(shape, generator=generator) * 1e-5
    options = {"lr": 2e-3, "bias_correction": True, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.1}
    groups = [
        {**options, "params": [0, 1]},
        {**options, "weight_decay": 0.0, "params": [2, 3, 4, 5], "kind": "others"},
    ]
    if has_masters:
        return {"state": {"step": 7, **state}, "param_groups": groups, "format": 2}
    return {"state": state, "param_groups": [{**group, "step": 7} for group in groups]}


@pytest.mark.parametrize("has_masters", [True, False], ids=["DistributedFusedAdam", "FusedAdam"])
def test_everything_arrives(has_masters: bool, tmp_path: Path) -> None:
    model = make_model()
    saved = make_dict(model, has_masters)
    torch.save({"model": model.state_dict(), "optimizer": saved, "epoch": 3}, tmp_path / "file.pt")
    got = read_apex(tmp_path / "file.pt", NAMES)
    expected: dict[str, Tensor] = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, name in enumerate(NAMES):
        entry = dict(saved["state"][number])
        expected[f"model.{name}"] = entry.pop("param", expected[f"model.{name}"])
        expected |= {f"optim.state.{name}.{kind}": value for kind, value in entry.items()}
        expected[f"optim.state.{name}.step"] = torch.tensor(7.0)
    assert set(got.tensors) == set(expected)
    for key, value in expected.items():
        lazy, read = got.tensors[key], got.tensors[key].read()
        assert (lazy.shape, lazy.dtype) == (value.shape, value.dtype) == (read.shape, read.dtype), key
        assert torch.equal(read, value), key
    assert got.steps == dict.fromkeys(NAMES, 7.0)
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=2e-3, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.1)
    assert got.param_groups == [
        {**plain.state_dict()["param_groups"][0], "params": NAMES[:2]},
        {**plain.state_dict()["param_groups"][0], "weight_decay": 0.0, "params": NAMES[2:], "kind": "others"},
    ]
    assert got.notes == ["dropped: epoch; pass what you need to zero_shard.save"]


def test_training_goes_on_as_from_the_dict_itself(tmp_path: Path) -> None:
    """The import gives what `AdamW.load_state_dict` makes of apex's dict, masters included."""
    model = make_model()
    saved = make_dict(model)
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "file.pt")
    got = read_apex(tmp_path / "file.pt", NAMES)
    models = [model, copy.deepcopy(model)]
    optimizers = []
    for each in models:
        params = dict(each.named_parameters())
        groups = [{"params": [params[name] for name in names]} for names in (NAMES[:2], NAMES[2:])]
        optimizers.append(zero_shard.AdamW(groups))
    optimizers[0].load_state_dict(saved)
    state = {
        number: {
            "param": got.tensors[f"model.{name}"].read(),
            "step": torch.tensor(got.steps[name]),
            **{kind: got.tensors[f"optim.state.{name}.{kind}"].read() for kind in ("exp_avg", "exp_avg_sq")},
        }
        for number, name in enumerate(NAMES)
    }
    groups = [{**group, "params": [NAMES.index(name) for name in group["params"]]} for group in got.param_groups]
    optimizers[1].load_state_dict({"state": state, "param_groups": groups})
    for each, optimizer in zip(models, optimizers, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            each(torch.ones(4, 3, dtype=torch.bfloat16) * torch.arange(4).unsqueeze(1)).sum().backward()
            optimizer.step()
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left, right)
    left, right = (optimizer.full_state_dict()["state"] for optimizer in optimizers)
    for number, entry in left.items():
        for kind, value in entry.items():
            assert torch.equal(value, right[number][kind]), (number, kind)


def test_a_dict_alone_with_the_names_of_its_groups(tmp_path: Path) -> None:
    saved = make_dict(make_model())
    for group in saved["param_groups"]:
        group["param_names"] = [NAMES[number] for number in group["params"]]
    torch.save(saved, tmp_path / "file.pt")
    got = read_apex(tmp_path / "file.pt")
    assert torch.equal(got.tensors["model.2.bias"].read(), saved["state"][5]["param"])
    assert [group["params"] for group in got.param_groups] == [NAMES[:2], NAMES[2:]]
    assert "frozen parameters and buffers are not in it" in got.notes[0]


def test_no_step_yet_means_no_state(tmp_path: Path) -> None:
    saved = make_dict(make_model())
    saved["state"]["step"] = 0
    torch.save(saved, tmp_path / "file.pt")
    got = read_apex(tmp_path / "file.pt", NAMES)
    assert got.steps == {} and set(got.tensors) == {f"model.{name}" for name in NAMES}


def _edited(change: str) -> tuple[Any, list[str] | None]:
    model = make_model()
    saved, names = make_dict(model), list(NAMES)
    both: Any = {"model": model.state_dict(), "optimizer": saved}
    match change:
        case "too few names":
            names = names[:-1]
        case "no names":
            return both, None
        case "one name twice":
            names[1] = names[0]
        case "another order":
            names[0], names[1] = names[1], names[0]
        case "no bias correction":
            saved["param_groups"][1]["bias_correction"] = False
        case "first format":
            return {"gathered_states": [torch.zeros(3, dtype=torch.uint8)], "format": 1}, names
        case "buckets":
            saved["state"]["buckets"] = []
        case "no second moment":
            del saved["state"][3]["exp_avg_sq"]
        case "no step":
            del saved["state"]["step"]
        case "no weight":
            del saved["state"][4]["param"], both["model"]["1.bias"]
        case "two optimizers":
            both["another"] = saved
    return both, names


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("too few names", "has 6 parameters, got 5 different names; pass names="),
        ("no names", "has 6 parameters, got 0 different names; pass names="),
        ("one name twice", "got 5 different names"),
        ("another order", r"model of 2.weight has shape \(2, 5\), expected \(5, 3\); check the order of names="),
        ("no bias correction", "group 1 was trained with bias_correction=False"),
        ("first format", "first format; write it with state_dict_format=2"),
        ("buckets", "first format; write it with state_dict_format=2"),
        ("no second moment", "no exp_avg_sq of 1.weight"),
        ("no step", "no step of 0.weight"),
        ("no weight", "no weight of 1.bias"),
        ("two optimizers", "2 state dicts of optimizers and 1 of models"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: str, text: str, tmp_path: Path) -> None:
    content, names = _edited(change)
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(ValueError, match=text) as caught:
        read_apex(tmp_path / "file.pt", names)
    assert str(tmp_path / "file.pt") in str(caught.value)


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("kind", ["foreign", "cut", "flipped", "missing"])
def test_files_that_cannot_be_trusted_are_refused(kind: str, tmp_path: Path) -> None:
    path, trace = tmp_path / "file.pt", tmp_path / "trace"
    torch.save({"optimizer": make_dict(make_model()), "other": Touch(trace) if kind == "foreign" else 0}, path)
    content = bytearray(path.read_bytes())
    match kind:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "flipped":
            content[content.index(make_dict(make_model())["state"][0]["param"].numpy().tobytes()) + 5] ^= 1
            path.write_bytes(content)
        case "missing":
            path.unlink()
    error = FileNotFoundError if kind == "missing" else ValueError
    with pytest.raises(error, match=r"file\.pt"):
        read_apex(path, NAMES)
    assert not trace.exists()
