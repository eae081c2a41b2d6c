"""What is where in a checkpoint, whoever wrote it: keys by the names of parameters.

{"model": {...}, "optim": {"state": {...}, "param_groups": [...]}}     get_state_dict, as DCP flattens it
"optim": {"state.<name>.exp_avg": ..., "param_groups.<name>.lr": ...}  with flatten_optimizer_state_dict=True
"optim": {"state": {0: {...}}, "param_groups": [{"params": [0], ...}]} of a plain optimizer's state_dict
{"app": {"model": ..., "optim": ...}}                                  all of it one level down
{<name>: ...}                                                          a model's state dict alone, safetensors
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
        names: Of all that the model's state dict holds.
        first_name: Other name of a tied parameter -> its first one.
    Attributes:
        weights: Name -> key, of all that a model's state dict holds.
        state: Name -> kind ("step", "exp_avg", ...) -> key.
        extras: What the user passed -> key.
        averages: What the user passed -> name -> key.
    """

    def __init__(
        self, metadata: Metadata, reader: Reader, names: Collection[str], first_name: Mapping[str, str]
    ) -> None:
        self._entries, self._reader, self._first_name = metadata.state_dict_metadata, reader, first_name
        self.weights: dict[str, str] = {}
        self.state: dict[str, dict[str, str]] = {}
        self.extras: dict[str, str] = {}
        self.averages: dict[str, dict[str, str]] = {}
        self._groups: dict[int, dict[str, str]] = {}
        self._flat_groups: dict[str, dict[str, str]] = {}
        self._numbered: dict[int, str] = {}
        if reader.has_weights_only:
            self.weights = {key: key for key in self._entries}
            return
        paths = metadata.planner_data or {}
        prefix = "model." if self.is_ours else _model_prefix(self._entries, names)
        above = prefix.removesuffix("model.")  # of a tree that lies within another
        depth = above.count(".")
        for key in self._entries:
            path = tuple(paths.get(key, (key,)))[depth:]
            head, _, rest = key.removeprefix(above).partition(".")
            if key in names and not prefix:
                self.weights[key] = key
            elif not key.startswith(above):
                continue
            elif head in _OPTIMIZER_KEYS:
                self._add_optimizer_key(key, path, rest)
            elif head == "extra" and self.is_ours:
                self.extras[rest] = key
            elif head == "averages" and self.is_ours:
                self.averages.setdefault(str(path[1]), {})[str(path[-1])] = key
            elif prefix and head == "model":
                self.weights[rest] = key
            elif not prefix and head not in _APART:
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

    def name_numbered(self, names: Sequence[Sequence[str]]) -> None:
        """Give parameters that a plain optimizer numbered the names that those at the same places have here.

        Args:
            names: Of the parameters of the groups that are expected.
        Raises:
            ValueError: The checkpoint's groups are not as long.
        """
        stored = [self.value(group["params"]) for _, group in sorted(self._groups.items()) if "params" in group]
        if not any(isinstance(number, int) for group in stored for number in group):
            return
        if [len(group) for group in stored] != [len(group) for group in names]:
            raise ValueError(
                f"the checkpoint's groups hold {[len(group) for group in stored]} parameters, expected "
                f"{[len(group) for group in names]}; build the optimizer with the same groups in the same order"
            )
        pairs = zip(stored, names, strict=True)
        self._numbered = {number: name for group in pairs for number, name in zip(*group, strict=True)}
        by_text = {str(number): name for number, name in self._numbered.items()}
        self.state = {by_text.get(number, number): kinds for number, kinds in self.state.items()}

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
        return self._reader.read_value(key, len(self.shape_of(key) or ()))

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
                {option: self.value(key) for option, key in group.items() if option != "param_names"}
                for _, group in sorted(self._groups.items())
            ]
            known: dict[Any, str] = {**self._first_name, **self._numbered}
            stored = [[known.get(name, name) for name in group.pop("params", [])] for group in found]
            if stored != [list(group) for group in names]:
                raise ValueError(
                    f"the checkpoint's groups hold {_shown(stored)}, expected {_shown(names)}; build the optimizer "
                    "with the same groups in the same order"
                )
            return found
        return [self._flat_group(group) for group in names]

    def stored_groups(self) -> list[dict[str, Any]]:
        """Return the groups as they were saved, ``params`` by name; where they have no numbers, by equal options."""
        if self._groups:
            return [{each: self.value(key) for each, key in group.items()} for _, group in sorted(self._groups.items())]
        groups: list[tuple[dict[str, Any], list[str]]] = []
        for name, keys in self._flat_groups.items():
            options = {option: self.value(key) for option, key in keys.items()}
            names = next((names for others, names in groups if others == options), None)
            if names is None:
                groups.append((options, names := []))
            names.append(name)
        return [{**options, "params": names} for options, names in groups]

    def _flat_group(self, names: Sequence[str]) -> dict[str, Any]:
        options = [
            {o: self.value(key) for o, key in self._flat_groups.get(name, {}).items() if o != "param_names"}
            for name in names
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


def _model_prefix(entries: Collection[str], names: Collection[str]) -> str:
    """Return what the keys of weights begin with: "model.", the same one level down, or nothing."""
    first = next(iter(names), "")
    found = {key.removesuffix(first) for key in entries if key.endswith(first)}
    found = {prefix for prefix in found if prefix in ("", "model.") or prefix.endswith(".model.")}
    default = "model." if any(key.startswith("model.") for key in entries) else ""
    return max(
        sorted(found, key=len), key=lambda prefix: sum(prefix + name in entries for name in names), default=default
    )


def _shown(groups: Sequence[Sequence[str]]) -> str:
    parts = [", ".join(group[:4]) + (f", ... ({len(group)})" if len(group) > 4 else "") for group in groups]
    return " | ".join(parts)
