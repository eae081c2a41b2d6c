"""A JSON config of DeepSpeed, read key by key: unknown ones and those without meaning here are refused by name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_shard.interchange.deepspeed_keys import ALIASES, HARMLESS, KEYS, REFUSED

AUTO = "auto"  # what the Trainer of transformers fills in
_SECTIONS = {key.rpartition(".")[0] for key in KEYS if "." in key}
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", dict: "a table"}


@dataclass
class Reading:
    """The values of a config by dotted key.

    Args:
        values: By dotted key, aliases resolved; sections that are taken as a whole by theirs.
        notes: What a user should know.
    """

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def get(self, key: str, kind: type, default: Any, lower: float | None = None, upper: float = 2.0**53) -> Any:
        """Return a value of a kind; the default if the key is absent, null or "auto" (which is noted).

        Raises:
            ValueError: It is of another kind, or outside of ``lower`` to ``upper``.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if value == AUTO:
            self.notes.append(f'{key} = "auto" is for the Trainer of transformers to fill in; {self._said(default)}')
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_right = is_number if kind in (int, float) else isinstance(value, kind)
        if is_number and is_right:
            is_right = (-upper if lower is None else lower) <= value <= upper and (kind is float or value % 1 == 0)
        if not is_right:
            bound = "" if lower is None else f" of at least {lower:g}"
            raise ValueError(f"{key} must be {_KINDS[kind]}{bound}, got {json.dumps(value)[:60]}")
        return int(value) if kind is int else value

    def is_auto(self, key: str) -> bool:
        """Whether the Trainer of transformers fills a value in."""
        return bool(self.values.get(key) == AUTO)

    @staticmethod
    def _said(default: Any) -> str:
        return "here it is left out" if default is None else f"here it counts as {json.dumps(default)}"


def read_json(path: Path) -> dict[str, Any]:
    """Return the table that a file holds.

    Raises:
        OSError: It can't be read. ValueError: It is not JSON, or no table, or names a key twice.
    """
    if not path.is_file():
        state = "is a directory" if path.is_dir() else "is no file" if path.exists() else "does not exist"
        raise ValueError(f"{path} {state}; name the JSON file that deepspeed.initialize gets as config")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_twins)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); comments and commas at the end of lists must go") from None
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} must hold a table of DeepSpeed's settings, got {json.dumps(content)[:60]}")
    return content


def read_keys(content: Mapping[str, Any]) -> Reading:
    """Return the values of a config.

    Raises:
        ValueError: Keys that DeepSpeed does not know, with the nearest it knows; or that have no meaning here, each
            with the remedy.
    """
    reading, refused, idle = Reading(), [], []
    for given, value in _leaves(content):
        key = ALIASES.get(given, given)
        if key in reading.values:
            raise ValueError(f"{given} and another name of it are both set; keep one of them")
        reading.values[key] = value
        if not _asks(key, value) or (key not in REFUSED and _is_off(content, key)):
            continue
        if key in REFUSED:
            refused.append(f"{given}: {REFUSED[key]}")
        elif HARMLESS.get(key):
            reading.notes.append(f"{given} has no counterpart: {HARMLESS[key]}")
        elif key in HARMLESS:
            idle.append(given)
    if refused:
        raise ValueError("; ".join(refused))
    if idle:
        reading.notes.append(f"nothing need be done for {', '.join(idle)}")
    return reading


def _leaves(content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the keys with the names of their sections, and refuse those that nobody knows."""
    leaves = []
    for name, value in content.items():
        section = ALIASES.get(name, name)
        if section == "zero_optimization" and isinstance(value, bool):  # the old form
            leaves.append(("zero_optimization.stage", int(value)))
        elif section in _SECTIONS and value is not None:
            if not isinstance(value, dict):
                raise ValueError(f"{name} must be a table, got {json.dumps(value)}")
            leaves += [(_known(f"{section}.{inner}", f"{name}.{inner}"), each) for inner, each in value.items()]
        else:
            leaves.append((_known(name, name), value))
    return leaves


def _known(key: str, given: str) -> str:
    if key not in KEYS:
        section = key.rpartition(".")[0]
        close = difflib.get_close_matches(key, [each for each in KEYS if each.rpartition(".")[0] == section], n=1)
        close = close or difflib.get_close_matches(key, list(KEYS), n=1)
        hint = f"; did you mean {close[0]}?" if close else "; remove it"
        raise ValueError(f"{given} is no key of DeepSpeed 0.19.8{hint}")
    return key


def _asks(key: str, value: Any) -> bool:
    """Whether a value asks for what its key is about."""
    if isinstance(value, dict):
        value = {name: each for name, each in value.items() if not isinstance(each, dict) or _asks(key, each)}
        return bool(value) and not (
            value.get("enabled") is False
            or value.get("device") == "none"
            or (key == "tensor_parallel" and value.get("autotp_size", 0) in (0, 1))
            or (key == "compile" and value.get("deepcompile", False) is False)
        )
    if key == "gradient_allreduce_op":
        return not (isinstance(value, str) and value.lower() == "mean")
    if key == "zero_optimization.ignore_unused_parameters":
        return value is False
    if key in ("sequence_parallel_size", "data_parallel_size"):
        return bool(value != 1)
    return value is not None and value is not False and value != AUTO


def _is_off(content: Mapping[str, Any], key: str) -> bool:
    """Whether a key is in a section that is not enabled."""
    section = key.rpartition(".")[0]
    tables = [table for name, table in content.items() if ALIASES.get(name, name) == section]
    return f"{section}.enabled" in KEYS and all(table.get("enabled") is not True for table in tables)


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twin!r} stands there twice; keep one of them")
    return content
