"""Weights of safetensors files go to where each rank keeps its part, at every stage, or are refused by name."""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zero_shard

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))  # as when a benchmark is run

from checkpoint_bench.memory import peak_above_nbytes

_WIDTH, _NUM_LAYERS = 1024, 12
_LAYER_NBYTES = _WIDTH * _WIDTH * 4
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class _Net(nn.Module):
    """Tied weights, a parameter that is not row-major, buffers of two dtypes, a 0-dim and an empty parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.rand(()))
        self.nothing = nn.Parameter(torch.rand(0, 3))
        self.turned = nn.Parameter(torch.rand(5, 4).t())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm.running_mean = torch.rand(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.norm(h)) * self.scale + self.turned.sum()  # type: ignore[no-any-return]


def _weights(seed: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What is in the files: no second copy of what is tied."""
    state = {name: tensor.contiguous().clone() for name, tensor in _Net(seed).state_dict().items()}
    del state["head.weight"]
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def _write(where: Path, weights: dict[str, Tensor], num_files: int) -> Path:
    """Write files as ``save_pretrained`` does; returns the path to load."""
    where.mkdir(parents=True)
    if num_files == 1:
        save_file(weights, where / "model.safetensors", {"format": "pt"})
        return where
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = dict(list(weights.items())[number::num_files])
        save_file(part, where / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (where / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return where


def _load(path: Path, config: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    model = _Net(2).to(dtype)
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config=config)
    assert zero_shard.load(path, model) == {}
    full = zero_shard.full_state_dict(model)
    model(torch.arange(8)).sum().backward()  # and it trains from there
    optimizer.step()
    return full


_CASES: dict[str, tuple[int, torch.dtype, torch.dtype, dict[str, Any]]] = {
    **{f"stage {stage}": (3, torch.float32, torch.float32, {"stage": stage}) for stage in range(4)},
    "one file": (1, torch.float32, torch.float32, {"stage": 3}),
    "bf16 file, fp32 model": (2, torch.bfloat16, torch.float32, {"stage": 3}),
    "fp32 file, bf16 model": (2, torch.float32, torch.bfloat16, {"stage": 2}),
    "fp32 file, cast to bf16": (2, torch.float32, torch.float32, {"stage": 3, "param_dtype": "bfloat16"}),
}


def _load_cases(root: Path) -> dict[str, dict[str, Tensor]]:
    return {name: _load(root / name, config, dtype) for name, (_, _, dtype, config) in _CASES.items()}


def test_every_element_arrives(tmp_path: Path) -> None:
    for name, (num_files, file_dtype, _, _) in _CASES.items():
        _write(tmp_path / name, _weights(dtype=file_dtype), num_files)
    found, other = ranks.run(2, _load_cases, tmp_path)
    assert not any(other.values())
    for name, (_, file_dtype, dtype, _) in _CASES.items():
        want = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in
                _weights(dtype=file_dtype).items()}  # fmt: skip
        want["head.weight"] = want["embed.weight"]
        assert found[name].keys() == want.keys(), name
        for key, tensor in want.items():
            assert found[name][key].dtype == tensor.dtype, f"{name}: {key}"
            assert torch.equal(found[name][key], tensor), f"{name}: {key}"


def test_without_ranks_and_by_the_name_of_a_file(tmp_path: Path) -> None:
    path = _write(tmp_path / "model", _weights(), 1) / "model.safetensors"
    save_file({"other": torch.ones(2)}, path.with_name("adapter.safetensors"))
    (tmp_path / "link.safetensors").symlink_to(path)
    for each in (path, tmp_path / "link.safetensors"):
        model = _Net(2)
        zero_shard.load(each, model)
        assert torch.equal(model.turned, load_file(path)["turned"])
    with pytest.raises(ValueError, match=r"adapter.safetensors, model.safetensors, expected one file or one index"):
        zero_shard.load(path.parent, model)


def test_checkpoints_in_a_directory_come_first(tmp_path: Path) -> None:
    model = _Net(2)
    zero_shard.save(tmp_path / "step-1", model, zero_shard.AdamW(model.parameters(), module=model))
    save_file(_weights(), tmp_path / "model.safetensors")
    saved = model.embed.weight.detach().clone()
    zero_shard.load(tmp_path, model)
    assert torch.equal(model.embed.weight, saved)


def _rename(old: str, new: str) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _transpose(path: Path) -> None:
    save_file(load_file(path) | {"turned": torch.ones(5, 4)}, path)


def _add(path: Path) -> None:
    save_file(load_file(path) | {"bonus": torch.ones(2)}, path)


def _claim(path: Path, key: str = "shape", value: Any = (7,)) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header["scale"][key] = value
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + content[8 + length :])


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


_DAMAGES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "missing": (_rename('"scale"', '"skale"'), ValueError, "no model.scale"),
    "unexpected": (_add, ValueError, "has model.bonus, which the model does not have"),
    "shape": (_transpose, ValueError, r"turned has shape \(5, 4\) in the checkpoint, expected shape \(4, 5\)"),
    "cut": (_cut, ValueError, "model.safetensors is damaged.*: it has"),
    "empty": (lambda path: path.write_bytes(b""), ValueError, "model.safetensors is damaged, or no safetensors file"),
    "text": (lambda path: path.write_text("x" * 99), ValueError, "model.safetensors is damaged, or no safetensors"),
    "claim": (_claim, ValueError, "damaged.*: scale has 4 bytes, expected 28"),
    "overlap": (partial(_claim, key="data_offsets", value=(1, 5)), ValueError, "damaged.*: scale begins at byte"),
    "fraction": (partial(_claim, key="data_offsets", value=(0.5, 4.5)), ValueError, "damaged.*: 'float' object"),
    "appended": (_append, ValueError, "damaged.*: it has [0-9]+ bytes, expected [0-9]+"),
    "nested": (lambda path: path.write_bytes(struct.pack("<Q", 99_999) + b"[" * 99_999), ValueError, "is damaged"),
    "dtype": (_rename('"F32"', '"C64"'), NotImplementedError, "has dtype C64, which can't be loaded"),
}


def _refused(path: Path) -> None:
    model = _Net(2)
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": 3})
    before = zero_shard.full_state_dict(model)
    try:
        zero_shard.load(path, model)
    finally:
        after = zero_shard.full_state_dict(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        optimizer.zero_grad()


@pytest.mark.parametrize("damage", _DAMAGES)
def test_what_does_not_fit_is_refused_on_all_ranks_and_nothing_changes(tmp_path: Path, damage: str) -> None:
    change, kind, message = _DAMAGES[damage]
    path = _write(tmp_path / "model", _weights(), 1)
    change(path / "model.safetensors")
    errors = ranks.run_expecting_errors(2, _refused, path)
    assert all(isinstance(error, (kind, RuntimeError)) for error in errors), errors
    with pytest.raises(kind, match=message):
        raise errors[0]  # type: ignore[misc]


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "model", _weights(), 2)
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    (elsewhere,) = set(content["weight_map"].values()) - {content["weight_map"]["scale"]}
    content["weight_map"]["scale"] = elsewhere
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"the index says that scale is in {elsewhere}"):
        zero_shard.load(path, _Net(2))
    (path / elsewhere).unlink()
    with pytest.raises(FileNotFoundError, match=elsewhere):
        zero_shard.load(path, _Net(2))
    index.write_text("{")
    with pytest.raises(ValueError, match=r"index.json is no index of safetensors"):
        zero_shard.load(path, _Net(2))


def test_weights_alone_are_no_optimizer_state(tmp_path: Path) -> None:
    path, model = _write(tmp_path / "model", _weights(), 1), _Net(2)
    optimizer = zero_shard.AdamW(model.parameters(), module=model)
    with pytest.raises(ValueError, match="was it saved without optimizer"):
        zero_shard.load(path, model, optimizer)


def _peaks(path: Path) -> dict[str, int]:
    """Peak memory of building a model at stage 3 and loading into it, and of doing so in plain torch."""
    small = nn.Linear(3, 3)
    _optimizer = zero_shard.AdamW(small.parameters(), module=small, config={"stage": 3})
    zero_shard.load(path.with_name("small"), small)  # what is imported at the first use is not measured
    # Else the allocator keeps what is freed, as luck has it, for all pieces below 32 MiB; real layers are larger.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    kept: list[Any] = []

    def ours() -> None:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NUM_LAYERS)))
        kept.append(model)
        kept.append(zero_shard.AdamW(model.parameters(), module=model, config={"stage": 3}))
        zero_shard.load(path, model)

    def plain() -> None:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_NUM_LAYERS)))
        model.to_empty(device="cpu")
        for file in sorted(path.glob("*.safetensors")):
            model.load_state_dict(load_file(file), strict=False)
        kept.append(model)

    return {"ours": peak_above_nbytes(ours), "plain": peak_above_nbytes(plain)}


def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    weights = {f"{number}.weight": torch.full((_WIDTH, _WIDTH), float(number)) for number in range(_NUM_LAYERS)}
    _write(tmp_path / "large", weights, 4)
    _write(tmp_path / "small", nn.Linear(3, 3).state_dict(), 1)
    # A rank's half, and three units: one that comes to life, the one before, and what an exchange of it takes.
    limit_nbytes = (_NUM_LAYERS // 2 + 3) * _LAYER_NBYTES
    for found in ranks.run(2, _peaks, tmp_path / "large", fresh=True):
        assert found["plain"] > _NUM_LAYERS * _LAYER_NBYTES > limit_nbytes, "the limit says nothing"
        assert found["ours"] <= limit_nbytes, f"{found['ours'] / _LAYER_NBYTES:.2f} layers"
