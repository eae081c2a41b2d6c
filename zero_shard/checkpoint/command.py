"""``zero-shard ckpt``: look at checkpoints, verify them, and turn them into other programs' files and back."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zero_shard.checkpoint.directory import Directory, latest_checkpoint
from zero_shard.checkpoint.exporting import check_free, export_safetensors, export_torch
from zero_shard.checkpoint.importing import FORMATS, read_foreign, write_imported
from zero_shard.checkpoint.inspection import damage_of, describe, describe_all, lines_of
from zero_shard.checkpoint.stored import checkpoints_in, open_stored

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def register(commands: Any) -> None:
    """Add ``ckpt`` to the subcommands of ``zero-shard``."""
    parser = commands.add_parser(
        "ckpt",
        help="look at checkpoints, verify them, export and import them",
        description="Exits with 0 if all is well, 1 if a checkpoint is damaged (verify), 2 if it can't be done.",
    )
    actions = parser.add_subparsers(required=True, metavar="action")
    inspect = _add(actions, "inspect", _inspect, "what a checkpoint, or a directory of checkpoints, holds")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    _add(actions, "verify", _verify, "compare all bytes with the manifest; 1 if one is damaged")
    export = _add(actions, "export", _export, "write weights as safetensors, or weights and optimizer as torch files")
    export.add_argument("out", type=Path, help="directory that is made")
    export.add_argument("--format", choices=["safetensors", "torch"], default="safetensors")
    export.add_argument("--dtype", choices=sorted(_DTYPES), help="of the weights; default: as they are stored")
    export.add_argument(
        "--max-shard-size", type=_nbytes, default="5GB", metavar="SIZE", help="of a safetensors file (default 5GB)"
    )
    export.add_argument("--config", type=Path, metavar="DIR", help="copy config.json and the tokenizer from there")
    imported = _add(
        actions, "import", _import, "turn a checkpoint of DeepSpeed, apex or plain torch into one of zero_shard"
    )
    imported.add_argument("out", type=Path, help="checkpoint that is made")
    imported.add_argument("--format", choices=[*FORMATS, "auto"], default="auto")
    imported.add_argument(
        "--names", type=Path, metavar="FILE", help="names of the parameters, as the optimizer got them, one a line"
    )


def _add(actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    parser.add_argument("path", type=Path, help="of the checkpoint, or of a directory of checkpoints")
    parser.set_defaults(run=run)
    return parser


def _inspect(given: argparse.Namespace) -> int:
    if _is_checkpoint(given.path):
        with open_stored(given.path) as stored:
            found = describe(stored)
    else:
        found = describe_all(given.path)
    print(json.dumps(found, indent=2) if given.json else "\n".join(lines_of(found)), flush=True)
    return 0


def _verify(given: argparse.Namespace) -> int:
    paths = [given.path] if _is_checkpoint(given.path) else checkpoints_in(given.path)
    is_well = True
    for path in paths:
        damage = damage_of(path)
        is_well &= not damage
        print("\n".join(damage) if damage else f"{path}: {_checked(path)}", flush=True)
    return 0 if is_well else 1


def _checked(path: Path) -> str:
    with Directory(path) as directory:
        num_files = len(directory.manifest["files"])
    return f"all bytes of {num_files} files match" if num_files else "no checksums; all files are there and long enough"


def _export(given: argparse.Namespace) -> int:
    check_free(given.out)
    path = given.path if _is_checkpoint(given.path) else latest_checkpoint(given.path)
    if path is None:
        raise ValueError(f"{given.path} has no complete checkpoint; see zero-shard ckpt inspect {given.path}")
    damage = damage_of(path)
    if damage:
        raise ValueError("; ".join(damage))
    dtype = _DTYPES.get(given.dtype)
    with open_stored(path) as stored:
        if given.format == "torch":
            notes = export_torch(stored, given.out, dtype)
        else:
            notes = export_safetensors(stored, given.out, dtype, given.max_shard_size, given.config)
    _report(notes, f"{given.out}: the weights of {path}")
    return 0


def _import(given: argparse.Namespace) -> int:
    check_free(given.out)
    names = given.names.read_text(encoding="utf-8").split() if given.names is not None else None
    imported = read_foreign(given.path, given.format, names)
    write_imported(imported, given.out)
    _report(imported.notes, f"{given.out}: {len(imported.tensors)} tensors of {given.path}")
    return 0


def _report(notes: list[str], last: str) -> None:
    for note in notes:
        print(f"note: {note}")
    print(last, flush=True)


def _is_checkpoint(path: Path) -> bool:
    """Whether this is a checkpoint itself, not a directory of some.

    Raises:
        FileNotFoundError: It is neither.
    """
    try:
        Directory(path).close()
    except FileNotFoundError:
        if path.is_dir() and checkpoints_in(path):
            return False
        state = "holds no checkpoint" if path.is_dir() else "is no directory" if path.exists() else "does not exist"
        raise FileNotFoundError(
            f"{path} {state}; name a directory that zero_shard.save or torch.distributed.checkpoint wrote"
        ) from None
    except ValueError:  # it is damaged
        return True
    return True


def _nbytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected one like 5GB, 500MB or 2GiB")
    return max(1, round(float(match[1]) * _UNITS[match[2].upper()]))
