"""``zero-shard ckpt``: what other programs read of our checkpoints, what damage is found, what bad input is told."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tarfile
import weakref
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import zero_shard
from zero_shard import cli
from zero_shard.checkpoint.stored import Stored, open_stored
from zero_shard.interchange import read_deepspeed

ROOT = Path(zero_shard.__file__).parent.parent


class Saved(NamedTuple):
    """A checkpoint of a tiny Llama in bfloat16 with tied weights and two groups, as two ranks at stage 3 wrote it."""

    path: Path
    config: Path  # directory of config.json
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).bfloat16()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() < 2]
    return [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.2}]


def save_llama(path: str) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    model = llama()
    optimizer = zero_shard.AdamW(groups_of(model), lr=0.1, module=model, config={"stage": 3})
    for _ in range(2):
        tokens = torch.randint(0, 50, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    zero_shard.save(path, model, optimizer, epoch=3, order=torch.arange(4))
    return zero_shard.full_state_dict(model), optimizer.full_state_dict(), model.config.to_json_string()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp("ckpt")
    weights, optimizer, config = ranks.run(2, save_llama, str(directory / "checkpoint-2"))[0]
    (directory / "hf").mkdir()
    (directory / "hf" / "config.json").write_text(config)
    (directory / "hf" / "tokenizer.json").write_text("{}")
    (directory / "hf" / "pytorch_model.bin").write_text("weights")
    return Saved(directory / "checkpoint-2", directory / "hf", weights, optimizer)


def run(*arguments: Any) -> int:
    return cli.main(["ckpt", *map(str, arguments)])


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def masters_of(saved: Saved, path: Path) -> dict[str, Tensor]:
    """The float32 masters, put together by hand from what torch's own converter reads."""
    dcp_to_torch_save(saved.path, path)
    whole = torch.load(path, weights_only=False)
    masters = {}
    for name, weight in saved.weights.items():
        low = whole["optim"]["state"].get(name, whole["optim"]["state"]["model.embed_tokens.weight"])["low"]
        masters[name] = ((weight.view(torch.int16).int() << 16) + low.int()).view(torch.float32)
    return masters


# --- export -----------------------------------------------------------------------------------------------


def test_export_safetensors_loads_with_from_pretrained(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    assert run("export", saved.path, tmp_path / "out", "--config", saved.config) == 0
    assert "note: lm_head.weight is model.embed_tokens.weight, which is written once" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", "tokenizer.json"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same(loaded.state_dict(), saved.weights)

    # In several files, as the float32 masters.
    arguments = ["--config", saved.config, "--dtype", "float32", "--max-shard-size", "4kB"]
    assert run("export", saved.path.parent, tmp_path / "sharded", *arguments) == 0
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    masters = masters_of(saved, tmp_path / "whole.pt")
    assert any(not torch.equal(masters[name], weight.float()) for name, weight in saved.weights.items())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "sharded")
    assert_same(loaded.state_dict(), masters)
    by_file = {each: load_file(tmp_path / "sharded" / each) for each in files}
    for name, file in index["weight_map"].items():
        assert torch.equal(by_file[file][name], masters[name])
    sizes = [sum(each.nbytes for each in tensors.values()) for tensors in by_file.values()]
    assert max(sizes) <= 4000 and sum(sizes) == index["metadata"]["total_size"]


def test_export_torch_is_what_torch_takes(saved: Saved, tmp_path: Path) -> None:
    assert run("export", saved.path, tmp_path / "out", "--format", "torch") == 0
    weights = torch.load(tmp_path / "out" / "model.pt", weights_only=True, mmap=True)
    assert_same(weights, saved.weights)
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    assert all(each.data_ptr() % 64 == 0 for each in weights.values())
    with open(tmp_path / "out" / "model.pt", "rb") as file:
        assert_same(torch.load(file, weights_only=True), saved.weights)
    state = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    assert state["param_groups"] == saved.optimizer["param_groups"]
    assert state["state"].keys() == saved.optimizer["state"].keys()
    for number, entry in saved.optimizer["state"].items():
        assert_same(state["state"][number], entry)
    model = llama().float()
    optimizer = torch.optim.AdamW(groups_of(model))
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[1]["lr"] == 0.2
    assert torch.equal(optimizer.state[model.model.embed_tokens.weight]["exp_avg"], state["state"][0]["exp_avg"])
    for path in ("model.pt", "optimizer.pt"):  # checksums are right, too
        with zipfile.ZipFile(tmp_path / "out" / path) as archive:
            assert archive.testzip() is None


def save_odd(path: Path) -> tuple[nn.Module, zero_shard.AdamW]:
    """Every kind of tensor that a model has: batch norm's buffers, empty, 0-dim, float64, frozen, strided ones."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    model[0].weight = nn.Parameter(torch.randn(5, 7).t())
    model.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.register_buffer("mask", torch.tensor([True, False, True]))
    model[2].bias.requires_grad_(False)
    optimizer = zero_shard.AdamW(model.named_parameters(), amsgrad=True, module=model, config={"stage": 1})
    model(torch.randn(4, 5)).mul(model.scale).pow(2).sum().backward()
    optimizer.step()
    zero_shard.save(path, model, optimizer)
    return model, optimizer


def test_odd_tensors_go_out_and_come_back(tmp_path: Path) -> None:
    model, optimizer = save_odd(tmp_path / "checkpoint")
    assert run("export", tmp_path / "checkpoint", tmp_path / "st") == 0
    with safe_open(tmp_path / "st" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert_same({name: file.get_tensor(name) for name in file.keys()}, model.state_dict())
    assert run("export", tmp_path / "checkpoint", tmp_path / "pt", "--format", "torch") == 0
    assert_same(torch.load(tmp_path / "pt" / "model.pt"), model.state_dict())
    assert run("import", tmp_path / "pt", tmp_path / "back") == 0
    assert run("verify", tmp_path / "back") == 0
    other, _ = save_odd(tmp_path / "other")
    for param in other.parameters():
        param.data.zero_()
    again = zero_shard.AdamW(other.named_parameters(), module=other, config={"stage": 2}, amsgrad=True)
    zero_shard.load(tmp_path / "back", other, again)
    assert_same(other.state_dict(), model.state_dict())
    want, got = optimizer.full_state_dict(), again.full_state_dict()
    assert want["state"].keys() == got["state"].keys() and len(want["state"]) == 6
    for number, entry in want["state"].items():
        assert_same(got["state"][number], entry)


def test_export_holds_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_odd(tmp_path / "checkpoint")
    read, alive, most = Stored.read, [], 0

    def watched(self: Stored, key: str) -> Tensor:
        nonlocal most
        most = max(most, sum(each() is not None for each in alive))
        tensor = read(self, key)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Stored, "read", watched)
    assert run("export", tmp_path / "checkpoint", tmp_path / "st", "--dtype", "bfloat16") == 0
    assert run("export", tmp_path / "checkpoint", tmp_path / "pt", "--format", "torch") == 0
    assert len(alive) > 30 and most <= 1
    with safe_open(tmp_path / "st" / "model.safetensors", "pt") as file:
        assert file.get_tensor("0.weight").dtype == file.get_tensor("scale").dtype == torch.bfloat16
        assert file.get_tensor("1.num_batches_tracked").dtype == torch.int64


# --- inspect, verify --------------------------------------------------------------------------------------


def test_inspect_says_what_is_there(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", saved.path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    numel = sum(each.numel() for name, each in saved.weights.items() if name != "lm_head.weight")
    assert found["written_by"] == "zero_shard" and found["num_ranks"] == 2
    assert found["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    for kind, nbytes in {"weights": 2, "low": 2, "exp_avg": 4, "exp_avg_sq": 4}.items():
        assert found["nbytes_by_kind"][kind] == nbytes * numel
    assert found["nbytes"] == sum(each.stat().st_size for each in saved.path.iterdir())
    assert found["groups"][1]["lr"] == 0.2 and len(found["groups"][1]["params"]) == 5
    assert set(found["steps"].values()) == {2.0} and len(found["steps"]) == 20
    assert found["extras"] == {"epoch": 3, "order": "tensor of int64 (4,)"}
    assert found["random_states_of_ranks"] == [0, 1]
    entry = found["tensors"]["optim.state.model.norm.weight.exp_avg"]
    assert entry == {"shape": [16], "dtype": "float32", "nbytes": 64}
    assert run("inspect", saved.path) == 0
    text = capsys.readouterr().out
    for line in ("  written by     zero_shard, version 1 of the format", "group 1: 5 parameters", "  epoch          3"):
        assert line in text.splitlines()
    assert "(50, 16)              2  exp_avg float32, exp_avg_sq float32, low int16" in text


def test_a_directory_of_checkpoints(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 3, 10):
        shutil.copytree(saved.path, tmp_path / f"step-{number}")
    manifest = json.loads((tmp_path / "step-3" / "manifest.json").read_text())
    manifest["saved_at_ns"] += 10**9
    (tmp_path / "step-3" / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "step-10" / "manifest.json").unlink()
    with open(tmp_path / "step-1" / "__1_0.distcp", "r+b") as file:
        file.truncate(1000)
    (tmp_path / ".step-11.0123456789abcdef.incomplete").mkdir()
    (tmp_path / "logs").mkdir()
    assert run("inspect", tmp_path, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["name"] for row in rows] == ["step-1", "step-2", "step-3", "step-10"]
    assert [row["is_latest"] for row in rows] == [False, False, True, False]
    assert rows[1]["status"] == rows[2]["status"] == "complete"
    assert "__1_0.distcp" in rows[0]["status"] and "manifest.json is missing" in rows[3]["status"]
    assert run("inspect", tmp_path) == 0
    assert "complete (latest)" in capsys.readouterr().out
    assert run("verify", tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "step-1/__1_0.distcp is damaged: it has 1000 bytes" in lines[0]
    assert lines[1].endswith("step-2: all bytes of 3 files match") and "manifest.json is missing" in lines[3]


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_verify_names_the_damaged_file(
    saved: Saved, name: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(saved.path, tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / name
    content = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    else:
        place = content.index(b'"format"') if name == "manifest.json" else len(content) // 2
        content[place] ^= 1
        file.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    assert run("verify", tmp_path / "checkpoint") == 1
    assert name in capsys.readouterr().out
    assert run("export", tmp_path / "checkpoint", tmp_path / "out") == 2
    assert name in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_flat", [False, True])
def test_what_fsdp_writes(is_flat: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=is_flat))
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "fsdp", no_dist=True)
    capsys.readouterr()
    assert run("inspect", tmp_path / "fsdp", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["written_by"].startswith("another program")
    assert found["nbytes_by_kind"]["exp_avg"] == found["nbytes_by_kind"]["weights"] == 26 * 4
    assert [group["lr"] for group in found["groups"]] == [0.3] and set(found["steps"].values()) == {1.0}
    assert run("verify", tmp_path / "fsdp") == 0
    assert "no checksums" in capsys.readouterr().out
    assert run("export", tmp_path / "fsdp", tmp_path / "pt", "--format", "torch") == 0
    assert_same(torch.load(tmp_path / "pt" / "model.pt"), model.state_dict())
    loaded, want = torch.load(tmp_path / "pt" / "optimizer.pt"), optimizer.state_dict()
    assert loaded["param_groups"] == want["param_groups"]
    for number, entry in want["state"].items():
        assert_same(loaded["state"][number], entry)
    file = next((tmp_path / "fsdp").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    assert run("verify", tmp_path / "fsdp") == 1
    assert file.name in capsys.readouterr().out


# --- import -----------------------------------------------------------------------------------------------


def assert_holds(path: Path, weights: dict[str, Tensor], moments: dict[str, dict[str, Tensor]]) -> None:
    with open_stored(path) as stored:
        index = stored.index
        assert_same({name: stored.read(key) for name, key in index.weights.items()}, weights)
        assert index.state.keys() == moments.keys()
        for name, entry in moments.items():
            assert_same({kind: stored.read(key) for kind, key in index.state[name].items()}, entry)


@pytest.mark.parametrize("form", ["torch", "apex"])
def test_import_of_torch_and_apex_files(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    model(torch.randn(5, 3)).pow(2).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    if form == "apex":
        state["format"] = 2
        for entry, param in zip(state["state"].values(), model.parameters(), strict=True):
            entry["param"] = param.detach().clone()
        state["param_groups"][0] |= {"bias_correction": True, "step": 1}
    torch.save({"model": model.state_dict(), "optimizer": state, "epoch": 4}, tmp_path / "file.pt")
    names = [name for name, _ in model.named_parameters()]
    (tmp_path / "names").write_text("\n".join(names))
    arguments = ["--names", tmp_path / "names"] if form == "apex" else []
    assert run("import", tmp_path / "file.pt", tmp_path / "checkpoint", *arguments) == 0
    assert "note: dropped: epoch" in capsys.readouterr().out
    assert run("verify", tmp_path / "checkpoint") == 0
    moments = {
        name: {kind: state["state"][number][kind] for kind in ("step", "exp_avg", "exp_avg_sq")}
        for number, name in enumerate(names)
    }
    assert_holds(tmp_path / "checkpoint", model.state_dict(), moments)
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    sharded = zero_shard.AdamW(other.parameters(), module=other)
    zero_shard.load(tmp_path / "checkpoint", other, sharded)
    assert sharded.param_groups[0]["lr"] == 0.3
    for each, optim in ((model, optimizer), (other, sharded)):  # training goes on alike
        optim.zero_grad()
        each(torch.ones(5, 3).cumsum(0)).pow(2).sum().backward()
        optim.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=1e-5, atol=1e-7)


def test_import_of_bare_weights_and_of_tied_ones(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    weights = {"a.weight": weight, "b.weight": weight, "c": torch.ones(2, dtype=torch.float16)}
    torch.save(weights, tmp_path / "bare.pt")
    assert run("import", tmp_path / "bare.pt", tmp_path / "checkpoint", "--format", "torch") == 0
    assert_holds(tmp_path / "checkpoint", weights, {})
    with open_stored(tmp_path / "checkpoint") as stored:
        assert stored.aliases == {"b.weight": "a.weight"}


def test_import_of_deepspeed(tmp_path: Path) -> None:
    with tarfile.open(ROOT / "tests" / "data" / "deepspeed.tar.xz") as archive:
        archive.extractall(tmp_path / "ds", filter="data")
    source = next(each.parent for each in sorted((tmp_path / "ds").rglob("latest")))
    assert run("import", source, tmp_path / "checkpoint") == 0
    imported = read_deepspeed(source)
    with open_stored(tmp_path / "checkpoint") as stored:
        assert imported.tensors and imported.tensors.keys() <= stored.tensors.keys()
        for key, lazy in imported.tensors.items():
            assert torch.equal(stored.read(key), lazy.read()), key
        assert [group["params"] for group in stored.index.stored_groups()] == [
            group["params"] for group in imported.param_groups
        ]


# --- bad input --------------------------------------------------------------------------------------------


def test_bad_input_is_one_line_and_leaves_nothing(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("x")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 1.0}]
    optimizer = torch.optim.AdamW(groups).state_dict()
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "groups.pt")
    torch.save({"weight": torch.tensor([1e30])}, tmp_path / "large.pt")
    assert run("import", tmp_path / "large.pt", tmp_path / "large") == 0
    out, before = tmp_path / "out", sorted(os.listdir(tmp_path))
    capsys.readouterr()
    for arguments, words in [
        (("inspect", tmp_path / "nowhere"), "nowhere does not exist; name a directory that"),
        (("inspect", tmp_path / "empty"), "empty holds no checkpoint"),
        (("verify", tmp_path / "text"), "text is no directory"),
        (("export", tmp_path / "nowhere", out), "does not exist"),
        (("export", saved.path, tmp_path / "empty"), "empty: there is something of this name; remove it or"),
        (("export", saved.path, out, "--config", tmp_path / "empty"), "empty: no config.json to copy"),
        (("export", tmp_path / "large", out, "--dtype", "float16"), "model.weight has numbers beyond the range"),
        (("export", saved.path, tmp_path / "text" / "out"), "text"),
        (("import", tmp_path / "nowhere", out), "nowhere does not exist"),
        (("import", tmp_path / "large.pt", tmp_path / "text"), "text: there is something of this name"),
        (("import", tmp_path / "text", out), "text cannot be read"),
        (("import", tmp_path / "empty", out), "empty holds nothing that is known"),
        (("import", tmp_path / "empty", out, "--format", "deepspeed"), "latest is missing"),
        (("import", saved.path, out), "needs no import"),
        (
            ("import", tmp_path / "groups.pt", out),
            "has 4 parameters, got 0 different names; give the names in the order",
        ),
    ]:
        assert run(*arguments) == 2, arguments
        found = capsys.readouterr()
        assert found.err.startswith("zero-shard ckpt: ") and words in found.err and found.err.count("\n") == 1, (
            found.err
        )
        assert found.out == "" and sorted(os.listdir(tmp_path)) == before, arguments
    for arguments in (("export", "a", "b", "--format", "onnx"), ("export", "a", "b", "--max-shard-size", "5XB"), ()):
        with pytest.raises(SystemExit) as stopped:
            run(*arguments)
        assert stopped.value.code == 2


def test_a_write_that_fails_leaves_nothing(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("zero_shard.checkpoint.weight_files.os.fsync", full)
    for form in ("safetensors", "torch"):
        assert run("export", saved.path, tmp_path / "out", "--format", form) == 2
        assert "No space left on device" in capsys.readouterr().err
        assert os.listdir(tmp_path) == []


def test_the_command_line_and_a_reader_that_has_seen_enough(saved: Saved) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-m", "zero_shard", "ckpt", "inspect", str(saved.path)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(120) == 0
