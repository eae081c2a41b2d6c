"""A checkpoint on disk without the model that it is of: its index, and its tensors one at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zero_shard.checkpoint.directory import MANIFEST, Directory
from zero_shard.checkpoint.index import Index
from zero_shard.checkpoint.parts import LoadPlanner
from zero_shard.checkpoint.reader import Reader
from zero_shard.checkpoint.writer import METADATA


class Stored:
    """What an open checkpoint holds. Local.

    Args:
        directory: Open while this is in use.
        reader: Of it.
    Attributes:
        index: Its keys.
        entries: DCP's record of each key.
        aliases: Other name -> first name of weights that lie in the same bytes (tied ones).
        values: Key -> file, start and length of what is no tensor; keys may share bytes.
    Raises:
        FileNotFoundError, ValueError: It is damaged, by the file's name.
    """

    def __init__(self, directory: Directory, reader: Reader) -> None:
        self.directory, self._reader = directory, reader
        self._metadata = reader.read_metadata()
        self.index = Index(self._metadata, reader, (), {})
        if self.index.is_ours and not directory.manifest["files"]:
            raise FileNotFoundError(f"{directory.path / MANIFEST} is missing: the checkpoint is damaged")
        self.entries = self._metadata.state_dict_metadata
        places: dict[str, list[tuple[Any, ...]]] = {}
        self.values: dict[str, tuple[str, int, int]] = {}
        for index, place in self._metadata.storage_data.items():
            spot = (tuple(index.offset or ()), place.relative_path, place.offset)
            places.setdefault(index.fqn, []).append(spot)
            if not isinstance(self.entries[index.fqn], TensorStorageMetadata):
                self.values[index.fqn] = (place.relative_path, place.offset, place.length)
        self.aliases = self._find_aliases(places)

    def _find_aliases(self, places: dict[str, list[tuple[Any, ...]]]) -> dict[str, str]:
        first: dict[Any, str] = {}
        aliases = {}
        for name, key in self.index.weights.items():
            shape = self.index.shape_of(key)
            if shape is None or shape.numel() <= 1:  # equal small values share their bytes and are not tied
                continue
            found = first.setdefault(tuple(sorted(places[key])), name)
            if found != name:
                aliases[name] = found
        return aliases

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """The keys of tensors."""
        return {key: each for key, each in self.entries.items() if isinstance(each, TensorStorageMetadata)}

    def check_lengths(self) -> None:
        """See that every file that the index names is there, and long enough.

        Raises:
            FileNotFoundError, ValueError: It is not, by name.
        """
        ends: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in ends.items():
            fd = self.directory.open_file(name)
            nbytes = os.fstat(fd).st_size
            os.close(fd)
            if nbytes < end:
                raise ValueError(
                    f"{self.directory.path / name} is damaged: it has {nbytes} bytes, expected at least {end}"
                )

    def read(self, key: str) -> Tensor:
        """Return a whole tensor, on the CPU.

        Raises:
            ValueError: Its bytes are damaged.
        """
        tensor = torch.empty(self.index.shape_of(key) or (), dtype=self.index.dtype_of(key))
        if tensor.numel() == 0:
            return tensor
        planner = LoadPlanner()
        planner.set_up_planner({key: tensor}, self._metadata, True)
        try:
            plan = planner.create_local_plan()
            self._reader.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as error:  # a damaged archive raises anything
            raise ValueError(f"{key} in {self.directory.path} can't be read: {error}") from error
        return tensor


@contextmanager
def open_stored(path: Path) -> Iterator[Stored]:
    """Hold a checkpoint open, of zero_shard or of any other program that writes with DCP.

    Raises:
        FileNotFoundError, ValueError: There is none, or it is damaged, by the file's name.
    """
    with Directory(path) as directory, Reader(directory.open_file) as reader:
        yield Stored(directory, reader)


def checkpoints_in(path: Path) -> list[Path]:
    """Return the directories in a directory that are, or were to be, checkpoints; in the order of their numbers."""
    found = [each for each in path.iterdir() if not each.name.startswith(".") and each.is_dir() and _has_parts(each)]
    return sorted(found, key=lambda each: natural(each.name))


def natural(name: str) -> list[Any]:
    """Return a key that sorts ``layer.2`` before ``layer.10``."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _has_parts(path: Path) -> bool:
    return any(name in (MANIFEST, METADATA) or name.endswith(".distcp") for name in os.listdir(path))
