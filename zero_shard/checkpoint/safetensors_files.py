"""Weights in safetensors files, as pretrained models come: read like a checkpoint, by each rank what it needs.

One file, or several with a ``*.safetensors.index.json`` that says which tensor is in which. Only headers and the own
parts are read, straight into place, so no rank ever holds the whole model.
"""

from __future__ import annotations

import json
import math
import operator
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zero_shard.checkpoint.reader import Reader, Record, read_into
from zero_shard.checkpoint.weight_files import SAFETENSORS_DTYPES
from zero_shard.checkpoint.writer import METADATA

_SUFFIX, _INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_MAX_HEADER_NBYTES = 100_000_000  # the format's own limit
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


def is_safetensors(path: Path) -> bool:
    """Whether a path is a safetensors file, or a directory with some that is no checkpoint."""
    if path.is_dir():
        return not (path / METADATA).exists() and any(each.name.endswith(_SUFFIX) for each in path.iterdir())
    return path.name.endswith(_SUFFIX) and path.is_file()


class SafetensorsFiles:
    """The files of one model, with what `load` asks of a checkpoint's directory.

    Args:
        path: Of a file, or of a directory with one file or an index.
    Raises:
        ValueError: Several files and no index, or an index that can't be read.
    """

    id = ""

    def __init__(self, path: Path) -> None:
        self.path = path if path.is_dir() else path.parent
        self.manifest: dict[str, Any] = {"files": {}}
        self._weight_map: dict[str, str] = {}
        self._names = [path.name] if path != self.path else self._find()

    def __enter__(self) -> SafetensorsFiles:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: each file is opened when it is read."""

    def verify(self, share: int = 0, num_shares: int = 1) -> None:
        """Do nothing: the format has no checksums. Lengths are compared when it is read."""

    def open_file(self, name: str) -> int:
        """Open a file for reading."""
        return os.open(self.path / name, os.O_RDONLY)

    def reader(self) -> Reader:
        """Return what reads the tensors."""
        return _Reader(self.open_file, self._names, self._weight_map)

    def _find(self) -> list[str]:
        names = sorted(each.name for each in self.path.iterdir())
        indices = [name for name in names if name.endswith(_INDEX_SUFFIX)]
        files = [name for name in names if name.endswith(_SUFFIX)]
        if len(indices) == 1:
            try:
                self._weight_map = json.loads((self.path / indices[0]).read_text())["weight_map"]
                return sorted({Path(name).name for name in self._weight_map.values()})
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"{self.path / indices[0]} is no index of safetensors: {error!r}") from None
        if len(files) != 1 or indices:
            raise ValueError(f"{self.path} has {', '.join(indices or files)}, expected one file or one index; name one")
        return files


class _Place(NamedTuple):
    """Where a tensor lies, in DCP's words."""

    relative_path: str
    offset: int
    length: int
    record: Record


class _Reader(Reader):
    """Reads tensors of safetensors files.

    Args:
        open_file: Opens a file by its name; the caller closes what it returns.
        names: Of the files.
        weight_map: Tensor -> the file that an index says it is in; may be empty.
    """

    has_weights_only = True

    def __init__(self, open_file: Callable[[str], int], names: Sequence[str], weight_map: dict[str, str]) -> None:
        super().__init__(open_file)
        self._names, self._weight_map = names, weight_map

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index of all files.

        Raises:
            FileNotFoundError: The index names a file that is not there.
            ValueError: A header is damaged, or the index does not fit the files; by name.
            NotImplementedError: A dtype that torch's tensors of weights don't have here.
        """
        entries: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, _Place] = {}
        file_of: dict[str, str] = {}
        for file_name in self._names:
            for name, place in self._places_in(file_name).items():
                if name in file_of:
                    raise ValueError(f"{name} is in {file_of[name]} and in {file_name}; expected it once")
                file_of[name] = file_name
                _, dtype, shape = place.record
                origin = torch.Size([0] * len(shape))
                box = ChunkStorageMetadata(origin, shape)
                entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [box])
                places[MetadataIndex(name, origin)] = place
        for name, file_name in self._weight_map.items():
            if file_of.get(name) != file_name:
                raise ValueError(f"the index says that {name} is in {file_name}, where it is not; a file is of another")
        metadata = Metadata(dict(entries), storage_data=places)
        self.set_up_storage_reader(metadata, False)
        return metadata

    def _places_in(self, file_name: str) -> dict[str, _Place]:
        """Return where each tensor of a file lies, from its header."""
        fd = self._fd(file_name)
        try:
            (length,) = struct.unpack("<Q", os.pread(fd, 8, 0))
            if length > _MAX_HEADER_NBYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(os.pread(fd, length, 8))
            header.pop("__metadata__", None)
            places = {name: _place(file_name, 8 + length, name, facts) for name, facts in header.items()}
            _check_covers(places, 8 + length, os.fstat(fd).st_size)
            return places
        except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file_name} is damaged, or no safetensors file: {error}") from None

    def _record(self, index: MetadataIndex) -> Record:
        record: Record = self._places[index].record
        return record

    def _load_stored(self, index: MetadataIndex) -> Tensor:
        start, dtype, shape = self._record(index)
        stored = torch.empty(shape, dtype=dtype)
        read_into(self._fd(self._places[index].relative_path), start, stored)
        return stored


def _place(file_name: str, base: int, name: str, facts: dict[str, Any]) -> _Place:
    shape, (start, stop) = torch.Size(facts["shape"]), map(operator.index, facts["data_offsets"])
    if facts["dtype"] not in _DTYPES:
        raise NotImplementedError(f"{name} in {file_name} has dtype {facts['dtype']}, which can't be loaded here")
    dtype = _DTYPES[facts["dtype"]]
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} has {stop - start} bytes, expected {math.prod(shape) * dtype.itemsize}")
    return _Place(file_name, base + start, stop - start, Record(base + start, dtype, shape))


def _check_covers(places: dict[str, _Place], start: int, stop: int) -> None:
    """Refuse gaps and overlaps, as the format does: tensors would have bytes of others."""
    for name, place in sorted(places.items(), key=lambda item: item[1][1:3]):
        if place.offset != start:
            raise ValueError(f"{name} begins at byte {place.offset}, expected {start}")
        start += place.length
    if start != stop:
        raise ValueError(f"it has {stop} bytes, expected {start}")
