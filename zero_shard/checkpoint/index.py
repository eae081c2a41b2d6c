"""What is where in a checkpoint, whoever wrote it: keys by the names of parameters.

{"model": {...}, "optim": {"state": {...}, "param_groups": [...]}}     get_state_dict, as DCP flattens it
"optim": {"state.<name>.exp_avg": ..., "param_groups.<name>.lr": ...}  with flatten_optimizer_state_dict=True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zero_shard.checkpoint.contents import FORMAT_KEY
from zero_shard.checkpoint.reader import Reader

_OPTIMIZER_KEYS = ("optim", "optimizer")
_APART = ("optim", "optimizer", "extra", "random", "averages", "zero_shard")


class Index:
    """The keys of a checkpoint.

    Args:
        metadata: DCP's.
        reader: Of the same checkpoint.
        first_name: Other name of a tied parameter -> its first one.
    Attributes:
        weights: Name -> key, of all that a model's state dict holds.
        state: Name -> kind ("step", "exp_avg", ...) -> key.
        extras: What the user passed -> key.
        averages: What the user passed -> name -> key.
    """

    def __init__(self, metadata: Metadata, reader: Reader, first_name: Mapping[str, str]) -> None:
        self._entries, self._reader, self._first_name = metadata.state_dict_metadata, reader, first_name
        self.weights: dict[str, str] = {}
        self.state: dict[str, dict[str, str]] = {}
        self.extras: dict[str, str] = {}
        self.averages: dict[str, dict[str, str]] = {}
        self._groups: dict[int, dict[str, str]] = {}
        self._flat_groups: dict[str, dict[str, str]] = {}
        paths = metadata.planner_data or {}
        has_model = any(key.startswith("model.") for key in self._entries)
        for key in self._entries:
            path = tuple(paths.get(key, (key,)))
            head, _, rest = key.partition(".")
            if head in _OPTIMIZER_KEYS:
                self._add_optimizer_key(key, path, rest)
            elif head == "extra":
                self.extras[rest] = key
            elif head == "averages":
                self.averages.setdefault(str(path[1]), {})[str(path[-1])] = key
            elif head == "model" and has_model:
                self.weights[rest] = key
            elif not has_model and head not in _APART:
                self.weights[key] = key

    def _add_optimizer_key(self, key: str, path: tuple[Any, ...], rest: str) -> None:
        part, _, tail = rest.partition(".")
        name, _, option = tail.rpartition(".")
        name = self._first_name.get(name, name)
        if part == "state" and name:
            self.state.setdefault(name, {})[option] = key
        elif part == "param_groups" and len(path) == 4 and isinstance(path[2], int):
            self._groups.setdefault(path[2], {})[str(path[3])] = key
        elif part == "param_groups" and name:
            self._flat_groups.setdefault(name, {})[option] = key

    @property
    def is_ours(self) -> bool:
        """Whether zero_shard wrote it, so that there must be a manifest."""
        return FORMAT_KEY in self._entries

    def shape_of(self, key: str) -> torch.Size | None:
        """Return the shape of a tensor, None if the key has something else."""
        entry = self._entries[key]
        return entry.size if isinstance(entry, TensorStorageMetadata) else None

    def dtype_of(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        entry = self._entries[key]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype

    def value(self, key: str) -> Any:
        """Return what a key has that is small: a value, or a tensor that was written as one piece."""
        return self._reader.read_value(key)

    def steps_of(self, name: str) -> float:
        """Return how often a parameter has been updated, 0 if it has no state."""
        key = self.state.get(name, {}).get("step")
        return 0.0 if key is None else float(self.value(key))

    def groups(self, names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Return the options of each group.

        Args:
            names: Of the parameters of the groups that are expected.
        Raises:
            ValueError: The checkpoint has other groups, or none.
        """
        if self._groups:
            found = [
                {option: self.value(key) for option, key in group.items()} for _, group in sorted(self._groups.items())
            ]
            stored = [[self._first_name.get(name, name) for name in group.pop("params", [])] for group in found]
            if stored != [list(group) for group in names]:
                raise ValueError(
                    f"the checkpoint's groups hold {_shown(stored)}, expected {_shown(names)}; build the optimizer "
                    "with the same groups in the same order"
                )
            return found
        return [self._flat_group(group) for group in names]

    def _flat_group(self, names: Sequence[str]) -> dict[str, Any]:
        options = [
            {option: self.value(key) for option, key in self._flat_groups.get(name, {}).items()} for name in names
        ]
        for name, each in zip(names, options, strict=True):
            if not each:
                raise ValueError(
                    f"the checkpoint has no options of the group of {name}; was it saved without optimizer?"
                )
            if each != options[0]:
                raise ValueError(
                    f"{names[0]} and {name} were in groups with different options ({options[0]} and {each}); build the "
                    "optimizer with the same groups"
                )
        return options[0] if options else {}

    def random_states(self, rank: int) -> dict[str, Any] | None:
        """Return the random states of a rank; None if there was no such rank."""
        key = f"random.{rank}"
        states: dict[str, Any] | None = self.value(key) if key in self._entries else None
        return states


def _shown(groups: Sequence[Sequence[str]]) -> str:
    parts = [", ".join(group[:4]) + (f", ... ({len(group)})" if len(group) > 4 else "") for group in groups]
    return " | ".join(parts)
