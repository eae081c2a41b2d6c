"""What a checkpoint holds, in words and as JSON; whether its bytes are what was written."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_shard.checkpoint.contents import FORMAT_KEY
from zero_shard.checkpoint.directory import Directory, latest_checkpoint
from zero_shard.checkpoint.stored import Stored, checkpoints_in, natural, open_stored
from zero_shard.commands import text_of

_SHOWN = 60  # characters of a value


def describe(stored: Stored) -> dict[str, Any]:
    """Return what a checkpoint holds, as JSON has it. Reads the index and small values."""
    index, manifest = stored.index, stored.directory.manifest
    repeated = {index.weights[name] for name in stored.aliases}
    tensors = {key: each for key, each in stored.tensors.items() if key not in repeated}
    sizes = {key: each.size.numel() * each.properties.dtype.itemsize for key, each in tensors.items()}
    nbytes_by_kind: dict[str, int] = {}
    for key, nbytes in sizes.items():
        kind = _kind_of(stored, key)
        nbytes_by_kind[kind] = nbytes_by_kind.get(kind, 0) + nbytes
    values = sum(length for _, _, length in set(stored.values.values()))
    paths = [stored.directory.path / name for name in (*manifest["files"], "manifest.json")]
    if not manifest["files"]:
        paths = [each for each in stored.directory.path.iterdir() if each.is_file()]
    return {
        "path": str(stored.directory.path),
        "kind": "checkpoint",
        "written_by": "zero_shard" if index.is_ours else "another program, with torch.distributed.checkpoint",
        "version": index.value(FORMAT_KEY) if index.is_ours else None,
        "num_ranks": manifest.get("num_ranks"),
        "torch": manifest.get("torch"),
        "saved_at": _time_of(manifest),
        "num_files": len(paths),
        "nbytes": sum(each.stat().st_size for each in paths),
        "tensor_nbytes": sum(sizes.values()),
        "nbytes_by_kind": {**dict(sorted(nbytes_by_kind.items())), "values": values},
        "tensors": {
            key: {
                "shape": list(each.size),
                "dtype": _short(each.properties.dtype),
                "nbytes": sizes[key],
            }
            for key, each in sorted(tensors.items(), key=lambda item: natural(item[0]))
        },
        "tied": dict(stored.aliases),
        "groups": [{key: _plain(value) for key, value in group.items()} for group in index.stored_groups()],
        "steps": {name: index.steps_of(name) for name in sorted(index.state, key=natural)},
        "extras": {name: _plain(index.value(key)) for name, key in sorted(index.extras.items())},
        "random_states_of_ranks": sorted(int(key.partition(".")[2]) for key in stored.values if _is_random(key)),
    }


def describe_all(path: Path) -> dict[str, Any]:
    """Return what checkpoints there are in a directory, as JSON has it; their bytes are not read.

    Raises:
        FileNotFoundError: There is none.
    """
    latest = latest_checkpoint(path)
    rows = [{**_describe_briefly(each), "is_latest": each == latest} for each in checkpoints_in(path)]
    return {"path": str(path), "kind": "directory of checkpoints", "checkpoints": rows}


def _describe_briefly(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"name": path.name, "status": "complete", "nbytes": _nbytes_in(path), "saved_at": None}
    try:
        with open_stored(path) as stored:
            row["saved_at"] = _time_of(stored.directory.manifest)
            stored.check_lengths()
            if not stored.directory.is_complete():
                row["status"] = "incomplete: a file is missing or too short"
    except (OSError, ValueError) as error:
        row["status"] = f"incomplete: {text_of(error)}"
    return row


def damage_of(path: Path) -> list[str]:
    """Compare all bytes of a checkpoint with its manifest, and read its index.

    One of another program has no manifest: its files are there and long enough.

    Returns:
        One line for each damaged file, none if all is well.
    """
    found: list[str] = []
    try:
        with Directory(path) as directory:
            num_files = len(directory.manifest["files"])
            for number in range(num_files):
                try:
                    directory.verify(number, num_files)
                except (OSError, ValueError) as error:
                    found.append(text_of(error))
        if not found:
            with open_stored(path) as stored:
                stored.check_lengths()
    except (OSError, ValueError) as error:
        found.append(text_of(error))
    return found


def lines_of(found: dict[str, Any]) -> list[str]:
    """Return the description of a checkpoint as text."""
    if "checkpoints" in found:
        return [
            found["path"],
            f"  {'name':28} {'size':>10}  {'saved at':20} status",
            *(
                f"  {row['name']:28} {_size(row['nbytes']):>10}  {row['saved_at'] or '-':20} {row['status']}"
                + (" (latest)" if row["is_latest"] else "")
                for row in found["checkpoints"]
            ),
        ]
    ranks, version = found["num_ranks"], found["version"]
    ratio = found["nbytes"] / found["tensor_nbytes"] if found["tensor_nbytes"] else float("nan")
    lines = [
        found["path"],
        f"  written by     {found['written_by']}" + (f", version {version} of the format" if version else ""),
        *([f"  ranks          {ranks}, torch {found['torch']}, {found['saved_at']}"] if ranks else []),
        f"  size           {_size(found['nbytes'])} in {found['num_files']} files, {ratio:.4g} times its tensors",
        "bytes by kind",
        *(f"  {kind:14} {_size(nbytes):>10}" for kind, nbytes in found["nbytes_by_kind"].items()),
    ]
    for number, group in enumerate(found["groups"]):
        options = ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
        lines += [f"group {number}: {len(group['params'])} parameters", f"  {options}"]
    if found["extras"]:
        lines += ["extras", *(f"  {name:14} {str(value)[:_SHOWN]}" for name, value in found["extras"].items())]
    if found["random_states_of_ranks"]:
        lines.append(f"random states of ranks {', '.join(map(str, found['random_states_of_ranks']))}")
    return [*lines, *_tensor_lines(found)]


def _tensor_lines(found: dict[str, Any]) -> list[str]:
    """One line for each weight with the state that it has, then one for each other tensor."""
    tensors = dict(found["tensors"])
    states: dict[str, list[str]] = {}
    for key in list(tensors):
        name, _, kind = key.partition(".state.")[2].rpartition(".")
        if name in found["steps"]:
            states.setdefault(name, []).append(f"{kind} {tensors.pop(key)['dtype']}" if kind != "step" else "")
            tensors.pop(key, None)
    width = max([len(key) for key in tensors] + [len("tensor")])
    lines = [f"{'tensor':{width}}  {'dtype':9} {'size':>10}  {'shape':16} {'steps':>6}  state"]
    for key, each in tensors.items():
        name = key.removeprefix("model.")
        steps = f"{found['steps'][name]:g}" if name in states else ""
        state = ", ".join(filter(None, states.get(name, ())))
        form = f"{each['dtype']:9} {_size(each['nbytes']):>10}  {tuple(each['shape'])!s:16}"
        lines.append(f"{key:{width}}  {form} {steps:>6}  {state}".rstrip())
    return [*lines, *(f"{name} is tied to {first}" for name, first in found["tied"].items())]


def _kind_of(stored: Stored, key: str) -> str:
    head, _, rest = key.partition(".")
    if head in ("optim", "optimizer") and rest.startswith("state."):
        return rest.rpartition(".")[2]
    if head in ("averages", "extra", "random"):
        return head
    return "weights" if key in stored.index.weights.values() else "other"


def _is_random(key: str) -> bool:
    return key.startswith("random.") and key.partition(".")[2].isdecimal()


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, shortened where it is long."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else f"tensor of {_short(value.dtype)} {tuple(value.shape)}"
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _time_of(manifest: dict[str, Any]) -> str | None:
    saved_at_ns = manifest.get("saved_at_ns")
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(saved_at_ns / 1e9)) if saved_at_ns else None


def _nbytes_in(path: Path) -> int:
    total = 0
    for each in path.iterdir():
        with suppress(OSError):
            total += each.stat().st_size
    return total


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
