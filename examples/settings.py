"""The configuration file of the example: five TOML tables, every one typed, unknown keys refused."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from corpus import DataConfig
from gpt import GPTConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Table = TypeVar("Table")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The ``[train]`` table; ``gpt.toml`` says what each key means."""

    steps: int = 220
    batch: int = 16
    accumulate: int = 1
    lr: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    checkpoint_every: int = 100
    log_every: int = 5
    held_out_windows: int = 256
    sample_numel: int = 300
    sample_prompt: str = "def "
    sample_temperature: float = 0.8
    seed: int = 0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "checkpoint_every", "log_every", "held_out_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"[train] {name} must be at least 1, got {getattr(self, name)}")
        if not self.sample_prompt:
            raise ValueError("[train] sample_prompt must not be empty: the model needs a byte to look at")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All tables. ``zero`` goes to ``zero_shard.AdamW``, ``rollback`` to ``zero_shard.Rollback``, which check them."""

    zero: Mapping[str, Any] = field(default_factory=dict)
    rollback: Mapping[str, Any] = field(default_factory=dict)
    model: GPTConfig = field(default_factory=GPTConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def as_dict(self) -> dict[str, Any]:
        """Return plain nested dicts, to be stored with a checkpoint."""
        return {
            "zero": dict(self.zero),
            "rollback": dict(self.rollback),
            "model": dataclasses.asdict(self.model),
            "train": dataclasses.asdict(self.train),
            "data": dataclasses.asdict(self.data),
        }


def read_settings(path: Path, *, stage: int | None, steps: int | None, seed: int | None) -> Settings:
    """Read ``path``; what is given here, from the command line, goes before what is written there.

    Raises:
        ValueError: A table or key that does not exist, or a value out of range.
    """
    tables = tomllib.loads(path.read_text())
    _refuse_unknown(tables, [each.name for each in dataclasses.fields(Settings)], f"table in {path}")
    zero = dict(tables.get("zero", {}))
    train = dict(tables.get("train", {}))
    if stage is not None:
        zero["stage"] = stage
    if steps is not None:
        train["steps"] = steps
    if seed is not None:
        train["seed"] = seed
    return Settings(
        zero=zero,
        rollback=tables.get("rollback", {}),
        model=_build(GPTConfig, tables.get("model", {}), f"key of [model] in {path}"),
        train=_build(TrainConfig, train, f"key of [train] in {path}"),
        data=_build(DataConfig, tables.get("data", {}), f"key of [data] in {path}"),
    )


def _build(kind: type[Table], table: Mapping[str, Any], what: str) -> Table:
    _refuse_unknown(table, kind.__dataclass_fields__, what)  # type: ignore[attr-defined]
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()})


def _refuse_unknown(given: Mapping[str, Any], known: Any, what: str) -> None:
    for key in given:
        if key not in known:
            nearest = difflib.get_close_matches(key, list(known), n=1) or list(known)
            raise ValueError(f"unknown {what}: got {key!r}, expected one like {nearest[0]!r}")
