"""A DeepSpeed JSON config as a ZeroConfig, and as the lines that a training script needs in its place."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_shard.config import ZeroConfig
from zero_shard.interchange.deepspeed_reading import Reading, read_keys
from zero_shard.interchange.deepspeed_script import script_of

_CLIPPING = 1.0  # DeepSpeed's default since 0.19
_MAX_BUCKET_MIB = 65536.0
_DTYPES = {
    name: full
    for full, names in {
        "float32": ("fp32", "float32", "float", "torch.float32"),
        "float16": ("fp16", "float16", "half", "torch.float16"),
        "bfloat16": ("bf16", "bfloat16", "torch.bfloat16"),
    }.items()
    for name in names
}


@dataclass(frozen=True)
class ImportedConfig:
    """What an import gives.

    Args:
        settings: Fields of ZeroConfig, as they are written to a file.
        reasons: By field, the key that it comes from.
        script: Lines of Python for the optimizer, the scheduler and the loop.
        notes: What was left out, and what is different.
    """

    settings: dict[str, Any]
    reasons: dict[str, str]
    script: str
    notes: list[str]

    def toml(self, source: str) -> str:
        """Return the settings as TOML, each with the key that it comes from."""
        lines = [f"# {source} (DeepSpeed), by zero-shard import-config"]
        for name, value in self.settings.items():
            lines.append(f"{name} = {_toml(value)}  # {self.reasons[name]}")
        return "\n".join(lines) + "\n"


def import_config(content: Mapping[str, Any], out: str = "zero_shard.toml") -> ImportedConfig:
    """Turn a config of DeepSpeed 0.19.8 (or older) into settings and lines of a script.

    Args:
        content: What the JSON file holds.
        out: Path under which the script finds the settings.
    Raises:
        ValueError: Keys that are unknown, have no meaning here, contradict each other, or have values that DeepSpeed
            refuses, too. The text names them.
    """
    reading = read_keys(content)
    settings, reasons = _settings(reading)
    ZeroConfig(**settings)
    script = script_of(reading, out)
    return ImportedConfig(settings, reasons, script, list(dict.fromkeys(reading.notes)))


def _settings(reading: Reading) -> tuple[dict[str, Any], dict[str, str]]:
    taken: dict[str, tuple[Any, str]] = {}
    taken["stage"] = _stage(reading)
    taken |= _precision(reading)
    taken |= _wire(reading, taken)
    taken |= _sharding(reading, taken["stage"][0])
    taken |= _clipping(reading)
    names = [each.name for each in dataclasses.fields(ZeroConfig) if each.name in taken]
    return {name: taken[name][0] for name in names}, {name: taken[name][1] for name in names}


def _stage(reading: Reading) -> tuple[int, str]:
    if reading.is_auto("zero_optimization.stage"):
        raise ValueError('zero_optimization.stage must be an integer from 0 to 3, got "auto"')
    stage = reading.get("zero_optimization.stage", int, None, lower=0)
    if stage is None:
        return 0, "without zero_optimization.stage DeepSpeed shards nothing"
    if stage > 3:
        raise ValueError(f"zero_optimization.stage must be an integer from 0 to 3, got {stage}")
    return stage, "zero_optimization.stage"


def _precision(reading: Reading) -> dict[str, tuple[Any, str]]:
    """What weights, masters and moments are stored in."""
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if reading.is_auto(f"{name}.enabled"):
            reading.notes.append(f'if the Trainer of transformers was given {name}=True, add param_dtype = "{dtype}"')
    is_bf16, is_fp16 = (reading.get(f"{name}.enabled", bool, False) for name in ("bf16", "fp16"))
    if is_bf16 and is_fp16:
        raise ValueError("bf16.enabled and fp16.enabled are both true; keep one of them")
    if not is_bf16 and not is_fp16:
        return {}
    section, dtype = ("bf16", "bfloat16") if is_bf16 else ("fp16", "float16")
    taken: dict[str, tuple[Any, str]] = {}
    params = _dtype(reading, "data_types.param_dtype") or dtype
    if params == "float32":
        reading.notes.append(f"data_types.param_dtype keeps float32 weights, so {section} has no effect on them")
    else:
        param_dtype = {"params": params, "norms": params}
        buffers = _dtype(reading, "data_types.buffer_dtype")
        if buffers is not None:
            param_dtype["buffers"] = buffers
        taken["param_dtype"] = (param_dtype, f"{section}.enabled")
        reading.notes.append(
            f"DeepSpeed stores norms in {params}, too; param_dtype = {params!r} keeps them in float32".replace("'", '"')
        )
    has_low_masters = is_bf16 and reading.get("bf16.bf16_master_weights_and_grads", bool, False)
    has_low_moments = is_bf16 and reading.get("bf16.bf16_optimizer_states", bool, False)
    if has_low_moments and not has_low_masters:
        raise ValueError("bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads = true, in DeepSpeed too")
    if has_low_masters:
        taken["master"] = ("none", "bf16.bf16_master_weights_and_grads")
        reading.notes.append('master = "stochastic" costs no memory and does not lose small updates; "none" does')
    if has_low_moments:
        taken["state_dtype"] = ("bfloat16", "bf16.bf16_optimizer_states")
    if is_bf16 and reading.get("bf16.check_grad_overflow", bool, True):
        taken["skip_nonfinite"] = (True, "bf16.check_grad_overflow, true by default")
    return taken


def _wire(reading: Reading, taken: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """What gradients travel in, and how much at a time."""
    found: dict[str, tuple[Any, str]] = {}
    dtype = _dtype(reading, "communication_data_type")
    if dtype is not None:
        found["reduce_dtype"] = (dtype, "communication_data_type")
    if reading.get("zero_optimization.zero_quantized_gradients", bool, False):
        found["reduce_dtype"] = ("int8", "zero_optimization.zero_quantized_gradients")
    num_elements = reading.get("zero_optimization.reduce_bucket_size", int, None, lower=1)
    if num_elements is None:
        return found
    if taken["stage"][0] == 3:
        reading.notes.append(
            "reduce_bucket_size has no effect at stage 3, where units are reduced as they are gathered"
        )
        return found
    param_dtype = taken["param_dtype"][0]["params"] if "param_dtype" in taken else "float32"
    nbytes = num_elements * (4 if (dtype or param_dtype) == "float32" else 2)
    mib = min(nbytes / 2**20, _MAX_BUCKET_MIB)
    found["bucket_mib"] = (round(mib, 2) or 0.01, f"zero_optimization.reduce_bucket_size, {num_elements} elements")
    reading.notes.append(f"two buckets of {mib:.4g} MiB are in memory during backward; the default here is 25 MiB")
    return found


def _sharding(reading: Reading, stage: int) -> dict[str, tuple[Any, str]]:
    """How far ahead, and over which ranks."""
    found: dict[str, tuple[Any, str]] = {}
    prefix = "zero_optimization."
    ahead = reading.get(prefix + "prefetch_bucket_size", int, None, lower=0)
    if ahead is not None and stage == 3:
        found["prefetch"] = (int(ahead > 0), f"{prefix}stage3_prefetch_bucket_size = {ahead}: units, not elements")
    hpz = reading.get(prefix + "zero_hpz_partition_size", int, 1, lower=0)
    mics = reading.get(prefix + "mics_shard_size", int, -1)
    if hpz > 1 and mics > 0:
        raise ValueError("zero_hpz_partition_size and mics_shard_size are both set; keep one of them")
    for name, size in (("zero_hpz_partition_size", hpz), ("mics_shard_size", mics)):
        if size <= 1 and not (name == "mics_shard_size" and size == 1):
            continue
        if stage != 3:
            raise ValueError(
                f"{prefix}{name} = {size} contradicts stage {stage}: it is for stage 3; remove one of them"
            )
        found["shard_size"] = (size, prefix + name)
        if name == "zero_hpz_partition_size":
            reading.notes.append(
                f"zero_hpz_partition_size: with shard_size = {size} gradients and moments, too, are sharded over "
                f"{size} ranks only, not over all; leave shard_size out if memory is short"
            )
    return found


def _clipping(reading: Reading) -> dict[str, tuple[Any, str]]:
    key = "gradient_clipping"
    if reading.is_auto(key):
        reading.notes.append(
            'gradient_clipping = "auto": the Trainer of transformers clips to its max_grad_norm itself'
        )
        return {}
    norm = reading.get(key, float, None, lower=0)
    if norm == 0:
        return {}
    if norm is None:
        reading.notes.append("gradient_clipping is not set: DeepSpeed 0.19 clips to 1.0 then, older versions do not")
        norm, key = _CLIPPING, "DeepSpeed's default for gradient_clipping since 0.19"
    if reading.get("zero_optimization.compute_grad_norm", bool, True) is False:
        raise ValueError("zero_optimization.compute_grad_norm = false contradicts clipping; set gradient_clipping to 0")
    return {"max_grad_norm": (float(norm), key)}


def _dtype(reading: Reading, key: str) -> str | None:
    name = reading.get(key, str, None)
    if name is None:
        return None
    if name.lower() not in _DTYPES:
        raise ValueError(f"{key} must be fp32, fp16 or bf16, got {json.dumps(name)}")
    return _DTYPES[name.lower()]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + " }"
    return json.dumps(value)  # numbers, strings and booleans are the same in TOML
