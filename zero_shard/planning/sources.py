"""Where the model of ``zero-shard plan`` comes from: a config directory, a function, a name, or plain numbers."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_shard.planning.models import LLAMAS, Llama, LlamaShape, build_by_name, build_of_numbers

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_LLAMA_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_POSITIVE_KEYS = (*_LLAMA_KEYS, "num_key_value_heads", "head_dim")
_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


class UnusableError(ValueError):
    """Input that can't be used; the text is one line with the remedy."""


class Source(NamedTuple):
    """A model and its name."""

    name: str
    model: nn.Module


def find_source(model: str | None, numel: str | None, num_layers: int | None, dtype: str | None) -> Source:
    """Return the model that the command line names, built on the meta device.

    Raises:
        UnusableError: It can't be found or built.
    """
    wanted = None if dtype is None else _dtype(dtype)
    if model is None:
        count = None if numel is None else number_of(numel)
        if count is None or count < 1 or num_layers is None:
            raise UnusableError(f"--params must be a positive number, as 70e9 or 70b, got {numel!r}")
        built = build_of_numbers(int(count), num_layers, wanted or torch.bfloat16)
        return Source(f"{numel} parameters in {num_layers} layers", built)
    if model in LLAMAS:
        return Source(model, build_by_name(model, wanted or torch.bfloat16))
    path = Path(model)
    if path.exists():
        return Source(path.resolve().name, _of_config(path, wanted))
    if ":" in model:
        built = _of_function(model)
        return Source(model, built if wanted is None else built.to(wanted))
    names = ", ".join(LLAMAS)
    raise UnusableError(
        f"{model!r} is no directory with a config.json, no module:function, and none of {names}; "
        "check the path, or give plain numbers: --params 70e9 --layers 80"
    )


def number_of(text: str) -> int | float | None:
    """Read 70e9, 70b or 4096; None for what is no number."""
    scale = _SUFFIXES.get(text[-1:].lower(), 1.0)
    try:
        value = float(text[:-1] if scale != 1.0 else text) * scale
        return int(value) if value == int(value) else value
    except (ValueError, OverflowError):
        return None


def _dtype(text: str) -> torch.dtype:
    if text not in _DTYPES:
        raise UnusableError(f"--dtype must be one of {', '.join(_DTYPES)}, got {text!r}")
    return _DTYPES[text]


# ---- Hugging Face ------------------------------------------------------------------------------------------------


def _of_config(path: Path, dtype: torch.dtype | None) -> nn.Module:
    directory = path.parent if path.name == "config.json" else path
    values = _read_config(directory)
    _check_config(values, directory)
    kept = values.get("dtype") or values.get("torch_dtype")
    dtype = dtype or _DTYPES.get(str(kept).removeprefix("torch."), torch.float32)
    if importlib.util.find_spec("transformers") is None:
        return _of_llama_keys(values).to(dtype)
    with _told_in_one_line(f"transformers can't build the model of {os.fspath(directory / 'config.json')!r}"):
        return _with_transformers(directory, values).to(dtype)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise UnusableError(f"there is no config.json in {os.fspath(directory)!r}; name the directory that holds it")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UnusableError(f"{os.fspath(path)!r} is not valid JSON: {error}; download it again") from error
    if not isinstance(values, dict) or not values:
        raise UnusableError(f"{os.fspath(path)!r} must hold a table of settings, got {str(values)[:60]}")
    return values


def _check_config(values: dict[str, Any], directory: Path) -> None:
    """Refuse numbers that contradict each other, which some models would only notice in their forward."""
    where = f"{os.fspath(directory / 'config.json')!r}"
    for key in _POSITIVE_KEYS:
        value = values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UnusableError(f"{key} in {where} must be a positive integer, got {value!r}; correct it")
    width, num_heads = values.get("hidden_size"), values.get("num_attention_heads")
    num_kv_heads = values.get("num_key_value_heads")
    if width and num_heads and not values.get("head_dim") and width % num_heads:
        raise UnusableError(f"{where} contradicts itself: hidden_size {width} does not divide by {num_heads} heads")
    if num_heads and num_kv_heads and num_heads % num_kv_heads:
        raise UnusableError(
            f"{where} contradicts itself: num_attention_heads {num_heads} does not divide by "
            f"num_key_value_heads {num_kv_heads}"
        )


def _with_transformers(directory: Path, values: dict[str, Any]) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.from_pretrained(os.fspath(directory), local_files_only=True)
    names = values.get("architectures") or []
    kind = getattr(transformers, names[0], None) if names else None
    with torch.device("meta"):
        built: nn.Module = transformers.AutoModel.from_config(config) if kind is None else kind(config)
    return built


def _of_llama_keys(values: dict[str, Any]) -> nn.Module:
    missing = [key for key in _LLAMA_KEYS if key not in values]
    if values.get("model_type") not in ("llama", "mistral") or missing:
        raise UnusableError(
            f"a model of type {values.get('model_type')!r} needs transformers: pip install transformers, "
            "or give plain numbers: --params 70e9 --layers 80"
        )
    width, num_heads = values["hidden_size"], values["num_attention_heads"]
    shape = LlamaShape(
        values["vocab_size"],
        width,
        values["num_hidden_layers"],
        num_heads,
        values.get("num_key_value_heads") or num_heads,
        values["intermediate_size"],
    )
    with torch.device("meta"):
        model = Llama(shape)
        if values.get("tie_word_embeddings"):
            model.output.weight = model.embedding.weight
    return model


# ---- a function --------------------------------------------------------------------------------------------------


def _of_function(text: str) -> nn.Module:
    module_name, _, function_name = text.partition(":")
    if not module_name or not function_name:
        raise UnusableError(f"a function is given as module:function, got {text!r}")
    sys.path.insert(0, os.getcwd())
    try:
        with _told_in_one_line(f"importing {module_name} failed", "run python -c 'import ...' for the traceback"):
            module = importlib.import_module(module_name)
    finally:
        sys.path.remove(os.getcwd())
    function: Callable[[], Any] | None = getattr(module, function_name, None)
    if not callable(function):
        raise UnusableError(f"{module_name} has no function {function_name!r}; give one that returns the model")
    with _told_in_one_line(f"{text} raised", "call it alone for the traceback"), torch.device("meta"):
        built = function()
    if not isinstance(built, nn.Module):
        raise UnusableError(f"{text} must return an nn.Module, got {type(built).__name__}")
    return built


@contextlib.contextmanager
def _told_in_one_line(what: str, remedy: str = "") -> Iterator[None]:
    """Turn whatever other people's code raises into one line, and keep what it prints out of our output."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except UnusableError:
        raise
    except (Exception, SystemExit) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        text = f"{what}: {type(error).__name__}: {first}" if first else f"{what}: {type(error).__name__}"
        raise UnusableError(f"{text}; {remedy}" if remedy else text) from error
