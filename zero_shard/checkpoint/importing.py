"""Checkpoints of other libraries as ours: one process writes, one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_shard.checkpoint.contents import FORMAT_VERSION, Contents
from zero_shard.checkpoint.exporting import check_free
from zero_shard.checkpoint.parts import Source, Value
from zero_shard.checkpoint.saving import write
from zero_shard.checkpoint.writer import METADATA
from zero_shard.collectives import Agreements
from zero_shard.interchange import Imported, LazyTensor, read_apex, read_deepspeed
from zero_shard.interchange.torch_files import MODEL_FILE, load_torch, optimizer_of, read_torch
from zero_shard.layout import Segment

FORMATS = ("deepspeed", "apex", "torch")


def read_foreign(path: Path, form: str, names: Sequence[str] | None = None) -> Imported:
    """Read a checkpoint of another library. Local.

    Args:
        form: One of `FORMATS`, or "auto".
        names: Of the parameters in the order in which the optimizer got them, where an apex or torch file lacks them.
    Raises:
        FileNotFoundError, ValueError: It is not there, damaged, or of another form.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; name what {', '.join(FORMATS)} wrote")
    form = _form_of(path) if form == "auto" else form
    if form == "deepspeed":
        return read_deepspeed(path)
    return read_apex(path, names) if form == "apex" else read_torch(path, names)


def _form_of(path: Path) -> str:
    if (path / METADATA).exists():
        raise ValueError(f"{path} needs no import: zero_shard.load reads what torch.distributed.checkpoint wrote")
    if (path / MODEL_FILE).is_file():
        return "torch"
    if (path / "latest").is_file() or any(path.glob("*optim_states.pt")):
        return "deepspeed"
    if path.is_dir():
        raise ValueError(f"{path} holds nothing that is known; name what {', '.join(FORMATS)} wrote, and its --format")
    optimizer = optimizer_of(load_torch(path))
    if optimizer is None:
        return "torch"
    is_apex = "format" in optimizer or any("bias_correction" in group for group in optimizer["param_groups"])
    return "apex" if is_apex else "torch"


@torch.no_grad()
def write_imported(imported: Imported, path: str | os.PathLike[str]) -> None:
    """Write what was read as a checkpoint of ours. Local; blocks. Memory: two copies of the largest tensor.

    Raises:
        FileExistsError: There is something of this name.
        OSError, ValueError: Nothing is there then.
    """
    target = Path(os.path.realpath(path))
    check_free(target)
    write(_contents(imported), target, Agreements(None, None), None)


def _contents(imported: Imported) -> Contents:
    model: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    for key, each in imported.tensors.items():
        head, _, rest = key.partition(".")
        if head == "model":
            model[rest] = _source(each)
        else:
            name, _, kind = rest.removeprefix("state.").rpartition(".")
            state.setdefault(name, {})[kind] = _source(each)
    names = [list(group["params"]) for group in imported.param_groups]
    groups = [
        {**{key: Value(value) for key, value in group.items() if key != "params"}, "params": Value(own)}
        for group, own in zip(imported.param_groups, names, strict=True)
    ]
    tree = {"model": model, "optim": {"state": state, "param_groups": groups}}
    tree["optim"] = {key: each for key, each in tree["optim"].items() if each}
    whole = {key: each for key, each in tree.items() if each} | {"zero_shard": {"version": Value(FORMAT_VERSION)}}
    aliases = {f"model.{other}": f"model.{first}" for other, first in imported.aliases.items()}
    return Contents(whole, names, aliases)


def _source(lazy: LazyTensor) -> Source | Tensor:
    numel = lazy.shape.numel()
    if numel <= 1:
        return lazy.read()
    form = torch.empty(lazy.shape, device="meta")
    return Source(form, Segment(0, 0, 0, numel), partial(_flat, lazy), lazy.dtype)


def _flat(lazy: LazyTensor) -> Tensor:
    return lazy.read().reshape(-1)
