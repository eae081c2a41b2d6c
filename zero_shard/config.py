"""The settings of a run: one frozen dataclass, checked when it is made."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
_DTYPE_ALIASES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_MAX_BUCKET_MIB = 65536.0
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_WIRE_DTYPES = (torch.float64, torch.float32, *_HALF_DTYPES)

Settings = TypeVar("Settings")


@dataclass(frozen=True, kw_only=True)
class ParamDtypes:
    """What ``param_dtype`` says when it says more than the dtype of the parameters.

    Args:
        params: Of float32 parameters: bfloat16 or float16.
        norms: Of the parameters of normalisation layers: float32, or that of ``params``.
        outputs: Floating outputs of the model are cast to it; None = they stay as they are.
        buffers: Float32 buffers (but those of norms that stay float32) are cast to it; None = they stay.
    Raises:
        ValueError, TypeError: A value is not among these; the text names it.
    """

    params: torch.dtype
    norms: torch.dtype = torch.float32
    outputs: torch.dtype | None = None
    buffers: torch.dtype | None = None

    def __post_init__(self) -> None:
        self._set("params", _HALF_DTYPES)
        self._set("norms", (torch.float32, self.params))
        self._set("outputs", _WIRE_DTYPES)
        self._set("buffers", (torch.float32, *_HALF_DTYPES))

    def _set(self, name: str, supported: tuple[torch.dtype, ...]) -> None:
        value = getattr(self, name)
        if value is not None or name in ("params", "norms"):
            object.__setattr__(self, name, _dtype_of(value, f"param_dtype.{name}", supported))


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What is sharded, and how. Every field is checked on construction; all ranks must pass the same.

    Args:
        stage: 0 replicates everything, 1 shards the optimizer state, 2 also the gradients, 3 also the parameters;
            "auto" takes the lowest of them whose peak, found by a dry run, fits into the memory of every rank.
        bucket_mib: Size of a bucket in MiB (stages 0 to 2): in backward two and a quarter are in flight. Capped so that
            a small model has small buckets; over gloo a bucket goes in up to four pieces.
        units: Stage 3: class names of the modules that are gathered as one; "auto" takes the elements of module
            stacks (``nn.ModuleList``, ``nn.Sequential``), else modules by size.
        reshard_after_forward: Stage 3: release after forward and gather again in backward.
        prefetch: Stage 3: how many units ahead are gathered.
        param_dtype: bfloat16 or float16: float32 parameters are stored, gathered and computed with in it, beside
            lossless float32 masters; norms and buffers stay as they are. None = as the model is. A mapping with the
            keys of `ParamDtypes` says more. Needs ``module``.
        reduce_dtype: dtype of gradients on the wire; None = the parameter's. Sums are fp32 (fp64 for fp64) always.
            int8: codes with a scale for each block of 256 elements (parameters below 4096 elements keep their dtype).
        state_dtype: dtype of the moments: float32 (fp64 for fp64 parameters), bfloat16, or int8: 8-bit codes with a
            scale for each block of 256 elements (parameters below 4096 elements keep float32).
        master: 16-bit weights: "auto" keeps the lossless rest of the fp32 master, "stochastic" keeps nothing and
            rounds bfloat16 weights up or down at random, "none" keeps nothing and rounds to the nearest.
        max_grad_norm: Clip to this global norm inside ``step()``; None = no clipping.
        shard_size: Ranks that share one copy of what is sharded; the rest are replicas. None = all ranks.
        sync_module_states: Take parameters and buffers of rank 0 at the start; false = compare and refuse.
        kernels: "auto", "native" (the compiled extension or an error), "torch" (the pure PyTorch fallback) or "apex"
            (NVIDIA apex's multi-tensor Adam on the shard).
        check: When ranks are compared: "off", "start", "every_step".
        skip_nonfinite: Skip a step with a NaN or inf gradient on all ranks, with a warning.
    Raises:
        ValueError: A value is out of range. TypeError: A value has the wrong type. Both name the field.
    """

    stage: int | str = 2
    bucket_mib: float = 25
    units: str | tuple[str, ...] = "auto"
    reshard_after_forward: bool = True
    prefetch: int = 1
    param_dtype: torch.dtype | ParamDtypes | None = None
    reduce_dtype: torch.dtype | None = None
    state_dtype: torch.dtype = torch.float32
    master: str = "auto"
    max_grad_norm: float | None = None
    shard_size: int | None = None
    sync_module_states: bool = True
    kernels: str = "auto"
    check: str = "start"
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        if self.stage != "auto":
            self._check_int("stage", 0, 3)
        self._check_int("prefetch", 0, 16)
        self._check_number("bucket_mib", upper=_MAX_BUCKET_MIB)
        if self.max_grad_norm is not None:
            self._check_number("max_grad_norm")
        if self.shard_size is not None:
            self._check_int("shard_size", 1, None)
        for name in ("reshard_after_forward", "sync_module_states", "skip_nonfinite"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be true or false, got {getattr(self, name)!r}")
        self._check_choice("master", ("auto", "stochastic", "none"))
        self._check_choice("kernels", ("auto", "native", "torch", "apex"))
        self._check_choice("check", ("off", "start", "every_step"))
        wire = (*_WIRE_DTYPES, torch.int8)
        if self.reduce_dtype is not None:
            object.__setattr__(self, "reduce_dtype", _dtype_of(self.reduce_dtype, "reduce_dtype", wire))
        moments = (torch.float32, torch.bfloat16, torch.int8)
        object.__setattr__(self, "state_dtype", _dtype_of(self.state_dtype, "state_dtype", moments))
        self._set_param_dtype()
        self._set_units()

    @property
    def param_dtypes(self) -> ParamDtypes | None:
        """``param_dtype`` in full; None = as the model is."""
        given = self.param_dtype
        return ParamDtypes(params=given) if isinstance(given, torch.dtype) else given

    def replace(self, **changes: Any) -> ZeroConfig:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def _check_int(self, name: str, lower: int, upper: int | None) -> None:
        value = getattr(self, name)
        span = f"an integer from {lower} to {upper}" if upper is not None else f"an integer of at least {lower}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be {span}, got {value!r}")
        if value < lower or (upper is not None and value > upper):
            raise ValueError(f"{name} must be {span}, got {value!r}")

    def _check_number(self, name: str, upper: float = math.inf) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a positive number, got {value!r}")
        if not 0 < value < math.inf or value > upper:
            limit = "" if upper == math.inf else f" of at most {upper:g}"
            raise ValueError(f"{name} must be a positive number{limit}, got {value!r}")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if not isinstance(value, str):
            raise TypeError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}{_nearest(value, choices)}")

    def _set_param_dtype(self) -> None:
        value: Any = self.param_dtype
        if isinstance(value, Mapping):
            names = [field.name for field in dataclasses.fields(ParamDtypes)]
            for key in value:
                if key not in names:
                    hint = _nearest(str(key), names) or f"; known keys: {', '.join(names)}"
                    raise ValueError(f"param_dtype has an unknown key {key!r} (value {value[key]!r}){hint}")
            if "params" not in value:
                raise ValueError(f"param_dtype needs the key 'params' (bfloat16 or float16), got {dict(value)!r}")
            value = ParamDtypes(**value)
        elif value is not None and not isinstance(value, ParamDtypes):
            value = _dtype_of(value, "param_dtype", _HALF_DTYPES)
        object.__setattr__(self, "param_dtype", value)

    def _set_units(self) -> None:
        value = self.units
        if value == "auto":
            return
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
            raise TypeError(f"units must be 'auto' or a list of module class names, got {value!r}")
        if not names:
            raise ValueError("units must be 'auto' or a list of module class names, got an empty list")
        object.__setattr__(self, "units", tuple(names))


def _dtype_of(value: Any, name: str, supported: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return a dtype that is given by itself or by its name."""
    if isinstance(value, str):
        known = _DTYPES.get(_DTYPE_ALIASES.get(value, value))
        if known is None:
            hint = _nearest(value, (*_DTYPES, *_DTYPE_ALIASES))
            raise ValueError(f"{name} must name a dtype, got {value!r}{hint}")
        value = known
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name} must be a dtype or its name, got {value!r}")
    if value not in supported:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(supported))
        raise ValueError(f"{name} must be one of {names}, got {value!r}")
    return value


def load_config(source: Any) -> ZeroConfig:
    """Make a ZeroConfig of what the user passed as ``config``. Raises as `load_settings` does."""
    return load_settings(source, ZeroConfig, "zero")


def load_settings(source: Any, kind: type[Settings], table: str) -> Settings:
    """Make settings of a kind, a dataclass, of what the user passed for them.

    Args:
        source: None, such settings, a mapping of their fields, or the path of a TOML, YAML or JSON file with the
            fields at top level or in a table.
        table: The name of that table.
    Raises:
        FileNotFoundError: No such file. ValueError: Unknown key or bad value. TypeError: Wrong type.
    """
    if source is None:
        return kind()
    if isinstance(source, kind):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _from_mapping(_read_file(Path(source), table), kind, f" in {os.fspath(source)}")
    if isinstance(source, Mapping):
        return _from_mapping(source, kind, "")
    raise TypeError(f"config must be a {kind.__name__}, a mapping or a path, got {type(source).__name__}: {source!r}")


def with_shard_size(config: ZeroConfig, shard_size: int | None) -> ZeroConfig:
    """Return a config with the ``shard_size`` that a device mesh asks for, if one does.

    Raises:
        ValueError: It says another one itself.
    """
    if shard_size is None or config.shard_size == shard_size:
        return config
    if config.shard_size is not None:
        raise ValueError(
            f"shard_size is {config.shard_size}, but the shard dimension of the device mesh in process_group has "
            f"{shard_size} ranks; leave shard_size out"
        )
    return config.replace(shard_size=shard_size)


def _from_mapping(values: Mapping[str, Any], kind: type[Settings], where: str) -> Settings:
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in names:
            hint = _nearest(str(key), names) or f"; known keys: {', '.join(names)}"
            raise ValueError(f"unknown config key {key!r} (value {value!r}){where}{hint}")
    return kind(**values)


def _read_file(path: Path, table: str) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"config file not found: {os.fspath(path)!r}")
    text, suffix = path.read_text(encoding="utf-8"), path.suffix.lower()
    try:
        content = _parse(text, suffix)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(
            f"config file {os.fspath(path)!r} is not valid {suffix.lstrip('.') or 'TOML'}: {error}"
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get(table), Mapping):
        content = content[table]
    if not isinstance(content, Mapping):
        raise ValueError(f"config file {os.fspath(path)!r} must hold a table of settings, got {content!r}")
    return content


def _parse(text: str, suffix: str) -> Any:
    if suffix == ".json":
        return json.loads(text)
    if suffix in (".yaml", ".yml"):
        try:
            import yaml  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError("reading a YAML config needs PyYAML: pip install pyyaml") from error
        return yaml.safe_load(text)
    if suffix != ".toml":
        raise ValueError(f"unknown kind of file {suffix!r}, expected .toml, .yaml or .json")
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def _nearest(name: str, candidates: Any) -> str:
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
