"""``zero-shard plan``: every source of a model, and one clear line with exit status 2 for what can't be used."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_shard
from zero_shard import cli
from zero_shard.planning import sources

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
_NUM_PARAMS = 2 * 1000 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
_MODELS = """
import torch
from torch import nn

print("a model file that talks")

def build():
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 10))

def with_whole_numbers():
    model = build()
    model.table = nn.Parameter(torch.zeros(1 << 20, dtype=torch.int32), requires_grad=False)
    return model

def raises():
    raise KeyError("no such layer\\nand more lines")

def exits():
    raise SystemExit(3)

def returns_a_number():
    return 3
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in a directory with a model file; return its exit status, output and errors."""
    (tmp_path / "plan_models.py").write_text(_MODELS)
    (tmp_path / "broken_models.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            code = cli.main(["plan", *arguments])
        except SystemExit as exit_:  # argparse
            code = int(exit_.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


def _write_config(directory: Path, changes: dict[str, Any] | None = None) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**_CONFIG, **(changes or {})}))
    return str(directory)


def test_plain_numbers_give_a_table_with_reasons(run: Run) -> None:
    code, out, err = run("--params", "2b", "--layers", "4", "--nodes", "1", "--memory", "10", "--tokens", "4096")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("2b parameters in 4 layers: 2.00 billion parameters on 8 ranks, 8 per node")
    assert [line.split("  ")[0] for line in lines[3:7]] == [f"stage {stage}" for stage in range(4)]
    assert [line.split()[-1] for line in lines[3:7]] == ["no", "no", "yes", "yes"]
    assert lines[8].startswith("stage 2 fits: ") and "for activations" in lines[8]
    assert lines[9].startswith("stage 0 does not fit: ") and lines[10].startswith("stage 1 does not fit: ")


def test_a_function_gives_json_and_a_chart(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["plan_models:build", "--world-size", "4", "--nodes", "2", "--stage", "1", "3", "--json"]
    code, out, err = run(*arguments, "--option", "state_dtype=int8,max_grad_norm=1", "--chart", "plan.png")
    assert code == 0
    assert err.strip() == "a model file that talks", "what the model's file prints does not spoil the JSON"
    plan = json.loads(out)
    assert plan["num_params"] == 257 * 256 + 257 * 10
    assert plan["machine"]["ranks_per_node"] == 2
    labels = [row["label"] for row in plan["rows"]]
    assert labels == [
        "stage 1",
        "stage 3",
        "stage 1, state_dtype=int8, max_grad_norm=1",
        "stage 3, state_dtype=int8, max_grad_norm=1",
    ]
    assert plan["best"] == "stage 1"
    for row in plan["rows"]:
        assert row["peak_nbytes"] == sum(row["phases"][row["peak_phase"]]["peak"].values()) > 0
        assert sum(row["sent_nbytes"].values()) > 0 and row["times"]["step_s"] > 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir() if "plan" in path.name and path.is_file()) == [
        "plan.png",
        "plan_models.py",
    ]


def test_frozen_whole_numbers_stay_whole_at_every_stage(run: Run) -> None:
    plans = [
        json.loads(run(f"plan_models:{name}", "--nodes", "1", "--json")[1]) for name in ("build", "with_whole_numbers")
    ]
    for without, having in zip(*(plan["rows"] for plan in plans), strict=True):
        for phase, memory in having["phases"].items():
            more = {kind: nbytes - without["phases"][phase]["peak"][kind] for kind, nbytes in memory["peak"].items()}
            assert more["weights"] == 4 << 20, having["label"]
            assert sum(more.values()) - more["weights"] < 16, f"{having['label']}, {phase}: flags at most, {more}"


@pytest.mark.parametrize("has_transformers", [True, False])
def test_a_hugging_face_config(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_transformers: bool
) -> None:
    if has_transformers:
        pytest.importorskip("transformers")
    else:
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == "transformers" else find(name, *rest)
        )
    code, out, err = run(_write_config(tmp_path / "small-llama"), "--world-size", "2", "--stage", "2", "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert (plan["model"], plan["num_params"]) == ("small-llama", _NUM_PARAMS)
    assert plan["rows"][0]["held"]["weights"] == pytest.approx(2 * _NUM_PARAMS, rel=0.01), "in bfloat16"


def test_names_are_known_without_a_file() -> None:
    model = sources.find_source("llama-3-8b", None, None, "fp32").model
    assert sum(param.numel() for param in model.parameters()) == 8_030_261_248
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert all(param.is_meta for param in model.parameters())


_BAD = [
    (["no/such/dir", "--nodes", "1"], "'no/such/dir' is no directory with a config.json", "check the path"),
    ([".", "--nodes", "1"], "there is no config.json in '.'", "name the directory"),
    (["cut", "--nodes", "1"], "is not valid JSON", "download it again"),
    (["listed", "--nodes", "1"], "must hold a table of settings", ""),
    (["heads", "--nodes", "1"], "contradicts itself: hidden_size 64 does not divide by 7 heads", ""),
    (["kv", "--nodes", "1"], "contradicts itself: num_attention_heads 4 does not divide by num_key_value_heads 3", ""),
    (["layers", "--nodes", "1"], "num_hidden_layers", "must be a positive integer, got -2"),
    (["plan_models:raises", "--nodes", "1"], "plan_models:raises raised: KeyError", "call it alone"),
    (["plan_models:exits", "--nodes", "1"], "plan_models:exits raised: SystemExit: 3", "call it alone"),
    (["plan_models:returns_a_number", "--nodes", "1"], "must return an nn.Module, got int", ""),
    (["plan_models:nothing", "--nodes", "1"], "has no function 'nothing'", "give one that returns the model"),
    (["broken_models:build", "--nodes", "1"], "importing broken_models failed: ModuleNotFoundError", ""),
    (["plan_models:", "--nodes", "1"], "a function is given as module:function", ""),
    (["plan_models:build"], "say how many ranks there are", "--nodes"),
    (["plan_models:build", "--world-size", "12"], "--world-size 12 is not a multiple of 8", "--nodes"),
    (["plan_models:build", "--world-size", "12", "--nodes", "5"], "must be a multiple of --nodes 5, got 12", ""),
    (["plan_models:build", "--world-size", "0"], "--world-size must be at least 1, got 0", ""),
    (["plan_models:build", "--nodes", "1", "--option", "shard_size=3"], "shard_size must divide the 8 ranks", "got 3"),
    (["plan_models:build", "--nodes", "1", "--option", "shard_sise=4"], "unknown config key", "did you mean"),
    (["plan_models:build", "--nodes", "1", "--option", "prefetch"], "--option must be KEY=VALUE", ""),
    (["plan_models:build", "--nodes", "1", "--option", "stage=1"], "by --stage, not by --option", ""),
    (["plan_models:build", "--nodes", "1", "--stage", "5"], "stage must be an integer from 0 to 3, got 5", ""),
    (["plan_models:build", "--nodes", "1", "--memory", "-1"], "memory_gib must be positive and finite, got -1.0", ""),
    (
        ["plan_models:build", "--nodes", "1", "--activations", "99"],
        "activations_gib must leave room",
        "smaller batches",
    ),
    (["plan_models:build", "--nodes", "1", "--within", "0"], "--within must be positive", ""),
    (["plan_models:build", "--nodes", "1", "--dtype", "int4"], "--dtype must be one of", "got 'int4'"),
    (["plan_models:build", "--nodes", "1", "--chart", "no/plan.png"], "no/plan.png can't be written", "make it first"),
    (["plan_models:build", "--nodes", "1", "--chart", "plan.gif"], "must be a .png, .pdf, .svg file", "plan.gif"),
    (["--params", "70e9", "--nodes", "1"], "--params and --layers belong together", "--layers 80"),
    (["--params", "many", "--layers", "8", "--nodes", "1"], "--params must be a positive number", "got 'many'"),
    (["--params", "3", "--layers", "8", "--nodes", "1"], "layers must be at least 1 and at most", "got 8"),
    (["llama-3-8b", "--params", "3", "--layers", "8", "--nodes", "1"], "give either a model or --params", ""),
    (["plan_models:build", "--nodes", "one"], "--nodes", "invalid int value"),
]


@pytest.mark.parametrize(("arguments", "text", "remedy"), _BAD, ids=[" ".join(each[0]) for each in _BAD])
def test_bad_input_gives_one_line_and_status_2(
    run: Run, tmp_path: Path, arguments: list[str], text: str, remedy: str
) -> None:
    _write_config(tmp_path / "heads", {"num_attention_heads": 7})
    _write_config(tmp_path / "kv", {"num_key_value_heads": 3})
    _write_config(tmp_path / "layers", {"num_hidden_layers": -2})
    for name, content in (("cut", '{"vocab_size": 10'), ("listed", "[1]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    before = sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in str(path))
    code, out, err = run(*arguments)
    assert code == 2 and out == ""
    lines = [line for line in err.splitlines() if line.startswith("zero-shard plan: ")]
    assert len(lines) == 1 and err.splitlines()[-1] == lines[0], err
    assert text in lines[0] and remedy in lines[0] and "Traceback" not in err
    assert sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)) == before, "no file is left"


def test_a_chart_that_fails_half_way_leaves_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    (tmp_path / "plan.png").write_bytes(b"the last chart")

    def save(self: Any, path: Path, **_: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(figure, "savefig", save)
    code, out, err = run("plan_models:build", "--nodes", "1", "--stage", "2", "--chart", "plan.png")
    text = "plan.png can't be written: No space left on device; name another place with --chart"
    assert (code, out) == (2, "") and err.splitlines()[-1] == f"zero-shard plan: {text}"
    assert (tmp_path / "plan.png").read_bytes() == b"the last chart"
    assert [path.name for path in tmp_path.glob("*.png")] == ["plan.png"] and not list(tmp_path.glob(".plan*"))


def test_importing_the_package_imports_no_heavy_library() -> None:
    code = (
        "import sys, zero_shard, zero_shard.cli; print([n for n in ('matplotlib', 'transformers') if n in sys.modules])"
    )
    root = str(Path(zero_shard.__file__).parent.parent)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert found.stdout.strip() == "[]"
