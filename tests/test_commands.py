"""Every command of ``zero-shard``: what can't be used is one line with a remedy, exit status 2, and no new file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_shard
from zero_shard import cli, doctor

_MODELS = """
import signal, torch
from torch import nn

def build():
    return nn.Linear(8, 8)

def needs(width):
    return nn.Linear(width, width)

def nothing():
    return None

def lazy():
    return nn.LazyLinear(3)

def reads():
    return nn.Linear(int(torch.ones(3).sum()), 3)

def endless():
    return endless()

def interrupted():
    signal.raise_signal(signal.SIGINT)  # to this thread; os.kill may choose another one, and be late

def too_large():
    return nn.Linear(1 << 40, 1 << 40)
"""
_RUN = {"kind": "run", "schema": 1}
_READERS = ("report", "import-config", "ckpt inspect", "ckpt verify", "ckpt export", "ckpt import")
_FILES = (
    "none",
    "directory",
    "empty",
    "garbage",
    "latin",
    "list",
    "number",
    "cut",
    "table",
    "/dev/null",
    "a/b/c",
    "x" * 300,
)
_BAD = [
    *(f"{command} {file}" for command in _READERS for file in _FILES),
    *(f"ckpt import {file} new --format {form}" for file in _FILES for form in ("torch", "apex", "deepspeed")),
    *(f"plan {file} --nodes 1" for file in _FILES if file != "/dev/null"),
    *("", "nothing", "--nothing", "doctor more", "doctor --jsn", "report", "ckpt", "ckpt inspect", "ckpt nothing cut"),
    # Models.
    *(
        "plan",
        "plan mine:build",
        "plan mine: --nodes 1",
        "plan :build --nodes 1",
        "plan no.such:build --nodes 1",
    ),
    *(f"plan mine:{name} --nodes 1" for name in ("needs", "nothing", "lazy", "reads", "endless")),
    *(f"plan mine:{name} --nodes 1" for name in ("torch", "build.x", "too_large")),
    *(f"plan --params {number} --layers 1 --nodes 1" for number in ("nan", "inf", "0", "1e400", "b", "1e30", "many")),
    *(f"plan --params 1e9 --layers {number} --nodes 1" for number in ("0", "-1", "1.5", "9999999999")),
    *(
        "plan --params 1e9 --nodes 1",
        "plan --layers 3 --nodes 1",
        "plan mine:build --params 1 --layers 1 --nodes 1",
    ),
    # Numbers of the machine, and what contradicts itself.
    *(f"plan mine:build --nodes {number}" for number in ("0", "-1", "1.5", "one", "100000000")),
    *(f"plan mine:build --world-size {number}" for number in ("0", "-8", "12", "1" + "0" * 30)),
    *("plan mine:build --world-size 12 --nodes 5", "plan mine:build --world-size 8 --nodes 16"),
    *(
        f"plan mine:build --nodes 1 --{option} {number}"
        for option in ("memory", "within", "between")
        for number in ("0", "-1", "nan", "inf", "1e400", "much")
    ),
    *(f"plan mine:build --nodes 1 --activations {number}" for number in ("-1", "nan", "inf", "77")),
    *(f"plan mine:build --nodes 1 --tokens {number}" for number in ("0", "-1", "1e3")),
    *(f"plan mine:build --nodes 1 --stage {number}" for number in ("-1", "4", "auto", "")),
    *(
        f"plan mine:build --nodes 1 --option {option}"
        for option in (
            *(
                "=3",
                "a=b=c",
                ",",
                "prefetch",
                "prefetch=",
                "prefetch=-1",
                "prefetch=nan",
                "bucket_mib=0",
                "bucket_mib=nan",
            ),
            *(
                "bucket_mib=inf",
                "max_grad_norm=-1",
                "max_grad_norm=nan",
                "shard_size=3",
                "shard_size=16",
                "shard_size=0",
            ),
            *(
                "stage=1",
                "units=NoSuchClass",
                "reduce_dtype=int4",
                "state_dtype=int4",
                "reduce_dtyp=int8",
                "kernels=fast",
            ),
        )
    ),
    *(f"plan mine:build --nodes 1 --chart {path}" for path in ("a/b.png", "a.gif", "directory", ".png", "cut/a.png")),
    # Places to write to.
    *(f"report log --out {path}" for path in ("no/such/a.html", "directory", "/dev/null", "log", "cut/a.html")),
    *("report log log", "report log ./log", "report log cut"),
    *(f"import-config ds --out {path}" for path in ("no/such/a.toml", "old.toml", "a.json", "directory", "cut/a.toml")),
    *(
        "ckpt export ckpt directory",
        "ckpt export ckpt cut",
        "ckpt export ckpt cut/new",
        "ckpt import model.pt directory",
    ),
    *(
        "ckpt export ckpt new --dtype int8",
        "ckpt export ckpt new --max-shard-size 0",
        "ckpt export ckpt new --config none",
    ),
    *(f"ckpt import model.pt new --names {path}" for path in ("none", "directory", "garbage", "cut")),
    *("ckpt import ckpt new", "ckpt import model.pt new --format deepspeed", "ckpt import model.pt cut/new"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of files that are good, and of files that are good for nothing."""
    where = tmp_path_factory.mktemp("commands")
    (where / "directory").mkdir()
    for name, content in {
        "empty": b"",
        "garbage": bytes(range(256)) * 9,
        "latin": b'\xff\xfe{"a": 1}',
        "list": b"[1, 2]",
        "number": b"5",
        "cut": b'{"train_batch_size": 8, "zero_',
        "table": b'{"a": 1}',
        "mine.py": _MODELS.encode(),
        "log": "".join(json.dumps(line) + "\n" for line in (_RUN, {"kind": "step", "step": 1, "loss": 2.0})).encode(),
        "ds": b'{"train_batch_size": 8}',
        "old.toml": b"",
    }.items():
        (where / name).write_bytes(content)
    model = torch.nn.Linear(3, 3)
    optimizer = zero_shard.AdamW(model.parameters(), module=model)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    zero_shard.save(where / "ckpt", model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.full_state_dict()}, where / "model.pt")
    return where


@pytest.fixture(autouse=True)
def _in_files(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)


def _run(*arguments: str) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as exit_:  # argparse
        assert isinstance(exit_.code, int)
        return exit_.code


def _content(where: Path) -> dict[str, bytes | None]:
    paths = [path for path in where.rglob("*") if "__pycache__" not in path.parts]
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.mark.parametrize("line", _BAD)
def test_bad_input_is_one_line_and_writes_nothing(line: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = line.split(" ") if line else []
    if len(arguments) == 3 and arguments[:2] in (["ckpt", "export"], ["ckpt", "import"]):
        arguments.append("new")
    before = _content(files)
    assert _run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    told = [each for each in err.splitlines() if each.startswith("zero-shard")]
    assert len(told) == 1 and told[0] == err.splitlines()[-1], err
    assert err.count("\n") == 1 or err.startswith("usage: zero-shard"), err
    assert len(told[0].partition(": ")[2].split()) > 3, "it says what is wrong"
    assert _content(files) == before


_GOOD = (
    "plan mine:build --nodes 1 --stage 2",
    "report log",
    "import-config ds",
    "ckpt inspect ckpt",
    "doctor",
)


@pytest.mark.parametrize("line", _GOOD)
@pytest.mark.parametrize("kind", ["no reader", "no space"])
def test_output_that_can_not_be_written(
    line: str,
    kind: str,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Report({}, {}, "", {}, {}))
    if kind == "no reader":  # ... | head
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    out = {"report": ["--out", str(tmp_path / "a.html")], "import-config": ["--out", str(tmp_path / "a.toml")]}
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        code = _run(*line.split(), *out.get(line.split()[0], []))
        monkeypatch.undo()
    err = capsys.readouterr().err
    if kind == "no reader":
        assert (code, err) == (0, "")
    else:
        told = "the output can't be written: No space left on device; make room, or send it elsewhere"
        assert code == 2 and err == f"zero-shard {line.split()[0]}: {told}\n"


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("plan", "mine:interrupted", "--nodes", "1") == 130
    assert capsys.readouterr() == ("", "zero-shard plan: interrupted\n")


_NO_DISTRIBUTED = """
import importlib.abc, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch.distributed":  # what a build without it lacks
            import torch
            for each in ("_c10d_init", "_rpc_init", "_dist_autograd_init"):
                vars(torch._C).pop(each, None)

sys.meta_path.insert(0, Finder())
import torch
import zero_shard
from zero_shard import cli

assert not torch.distributed.is_available()
param = torch.nn.Parameter(torch.ones(3))
optimizer = zero_shard.AdamW([param], lr=0.1, weight_decay=0.0)
param.sum().backward()
optimizer.step()
torch.testing.assert_close(param.detach(), torch.full((3,), 0.9))
lines = "plan mine:build --nodes 1", "ckpt inspect ckpt", "ckpt export --dtype", "report none", "import-config none"
for line in lines:
    print(cli.main(line.split()))
"""


def test_a_torch_without_distributed_trains_alone_and_is_told_what_it_lacks(files: Path) -> None:
    root = Path(zero_shard.__file__).parent.parent
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", _NO_DISTRIBUTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2"] * 5
    lines = done.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "zero-shard plan",
        *["zero-shard ckpt"] * 2,
        "zero-shard report",
        "zero-shard import-config",
    ]
    assert all("torch.distributed" in line for line in lines[:3])
