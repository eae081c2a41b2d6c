"""Checkpoints as files of other programs: safetensors as ``transformers`` loads them, and plain files of torch."""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_shard.checkpoint.stored import Stored, natural
from zero_shard.checkpoint.weight_files import Streamed, write_safetensors, write_torch
from zero_shard.number_formats import join_masters

CONFIG = "config.json"
_BESIDE_WEIGHTS = (
    *(CONFIG, "generation_config.json", "*processor_config.json", "chat_template*", "special_tokens_map.json"),
    *("tokenizer*", "added_tokens.json", "vocab*", "merges.txt", "spiece.model", "sentencepiece*.model"),
)


def export_safetensors(
    stored: Stored, out: Path, dtype: torch.dtype | None, max_shard_nbytes: int, config: Path | None
) -> list[str]:
    """Write the weights as ``model.safetensors``, or several files and their index, in a new directory.

    Tied weights are written once, under their first name, as ``save_pretrained`` does. Memory: two copies of the
    largest tensor.

    Args:
        dtype: Of what is floating point; None: as it is stored. float32 gives masters where there are some.
        max_shard_nbytes: A file holds no more, but for a single tensor that is larger.
        config: Directory whose ``config.json`` and tokenizer are copied beside; None: none.
    Returns:
        What is worth knowing about what was left out.
    Raises:
        FileExistsError: There is something of this name.
        FileNotFoundError, ValueError, NotImplementedError: Nothing has been written then.
    """
    if config is not None and not (config / CONFIG).is_file():
        raise FileNotFoundError(errno.ENOENT, f"no {CONFIG} to copy; name the directory of the model", str(config))
    weights = _weights(stored, dtype)
    notes = [f"{name} is {first}, which is written once" for name, first in stored.aliases.items()]
    notes += [f"{name} is no tensor and is left out" for name in stored.index.weights if name not in weights]
    weights = {name: each for name, each in weights.items() if name not in stored.aliases}
    files = _split(weights, max_shard_nbytes)
    with _new_directory(out) as where:
        for name, names in files.items():
            write_safetensors(where / name, {each: weights[each] for each in names})
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(each.nbytes for each in weights.values())},
                "weight_map": {each: name for name, names in files.items() for each in names},
            }
            _write_text(where / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
        if config is not None:
            _copy_beside(config, where, dtype)
    return notes


def export_torch(stored: Stored, out: Path, dtype: torch.dtype | None) -> list[str]:
    """Write ``model.pt``, a state dict, and ``optimizer.pt``, which ``torch.optim.AdamW.load_state_dict`` takes.

    Tied weights have all their names and one storage. ``optimizer.pt`` has the names of the parameters of each group
    under "param_names"; it is not written if the checkpoint has no groups. Memory: two copies of the largest tensor.

    Args:
        dtype: Of weights that are floating point, as in `export_safetensors`; moments stay as they are.
    Returns:
        What is worth knowing about what was left out.
    Raises:
        FileExistsError: There is something of this name.
        ValueError, NotImplementedError: Nothing has been written then.
    """
    index, weights = stored.index, _weights(stored, dtype)
    others = {name: index.value(key) for name, key in index.weights.items() if name not in weights}
    tied = {name: weights[first] for name, first in stored.aliases.items()}
    groups = index.stored_groups()
    with _new_directory(out) as where:
        write_torch(where / "model.pt", {**weights, **tied, **others})
        if groups:
            write_torch(where / "optimizer.pt", _optimizer(stored, groups))
    if not groups:
        return ["the checkpoint has no groups of an optimizer, so there is no optimizer.pt"]
    has_low = any("low" in kinds for kinds in index.state.values())
    return ["remainders of 16-bit weights are left out; --dtype float32 adds them to the weights"] * (
        has_low and dtype != torch.float32
    )


def _optimizer(stored: Stored, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state dict, with parameters by number, as torch counts."""
    names = [list(group["params"]) for group in groups]
    numbers: dict[str, int] = {}
    for name in (name for of_group in names for name in of_group):
        numbers.setdefault(name, len(numbers))
    state: dict[int, dict[str, Any]] = {}
    for name, number in sorted(numbers.items(), key=lambda item: item[1]):
        kinds = stored.index.state.get(name, {})
        if "step" in kinds:
            step = torch.tensor(stored.index.steps_of(name), dtype=torch.float32)
            state[number] = {"step": step} | {
                kind: _streamed(stored, key, None) for kind, key in kinds.items() if kind not in ("step", "low")
            }
    packed = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [numbers[each] for each in own]}
        for group, own in zip(groups, names, strict=True)
    ]
    return {"state": state, "param_groups": packed, "param_names": names}


def _weights(stored: Stored, dtype: torch.dtype | None) -> dict[str, Streamed]:
    found = {}
    for name, key in sorted(stored.index.weights.items(), key=lambda item: natural(item[0])):
        if stored.index.shape_of(key) is None:
            continue
        own = stored.index.dtype_of(key)
        wanted = dtype if dtype is not None and own.is_floating_point else own
        low = stored.index.state.get(stored.aliases.get(name, name), {}).get("low") if wanted != own else None
        found[name] = _streamed(stored, key, wanted, low if wanted == torch.float32 else None)
    return found


def _streamed(stored: Stored, key: str, dtype: torch.dtype | None, low: str | None = None) -> Streamed:
    shape = stored.index.shape_of(key)
    if shape is None:
        raise ValueError(f"{key} of the checkpoint is no tensor, expected one")
    wanted = stored.index.dtype_of(key) if dtype is None else dtype
    return Streamed(shape, wanted, partial(_read, stored, key, wanted, low))


def _read(stored: Stored, key: str, dtype: torch.dtype, low: str | None) -> Tensor:
    tensor = stored.read(key)
    if low is not None:
        return join_masters(tensor.reshape(-1), stored.read(low).reshape(-1)).view(tensor.shape)
    cast = tensor.to(dtype)
    if cast is not tensor and cast.is_floating_point() and cast.numel() and cast.abs().amax().isinf():
        if tensor.abs().amax().isfinite():
            raise ValueError(f"{key} has numbers beyond the range of {dtype}; export it as bfloat16 or float32")
    return cast


def _split(weights: dict[str, Streamed], max_nbytes: int) -> dict[str, list[str]]:
    """Return which tensors are in which file."""
    shards: list[list[str]] = [[]]
    nbytes = 0
    for name, each in weights.items():
        if shards[-1] and nbytes + each.nbytes > max_nbytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(name)
        nbytes += each.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": names for number, names in enumerate(shards, start=1)}


def _copy_beside(config: Path, where: Path, dtype: torch.dtype | None) -> None:
    for each in config.iterdir():
        if each.is_file() and any(fnmatch.fnmatch(each.name, pattern) for pattern in _BESIDE_WEIGHTS):
            shutil.copyfile(each, where / each.name)
    if dtype is not None:  # or transformers would cast the weights to what they were
        settings = json.loads((where / CONFIG).read_text(encoding="utf-8"))
        settings.pop("torch_dtype", None)
        settings["dtype"] = str(dtype).removeprefix("torch.")
        (where / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _write_text(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """Give a hidden directory beside ``out`` that gets its name at the end, or goes."""
    check_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    hidden = out.with_name(f".{out.name}.{secrets.token_hex(8)}.incomplete")
    hidden.mkdir()
    try:
        yield hidden
        check_free(out)
        hidden.rename(out)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def check_free(out: Path) -> None:
    """Raise FileExistsError if there is something of this name, NotADirectoryError if no directory can be there."""
    if os.path.lexists(out):
        raise FileExistsError(errno.EEXIST, "there is something of this name; remove it or name another", str(out))
    above = next(each for each in out.absolute().parents if each.exists())
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "this is a file, no directory to write in; name another", str(above))
