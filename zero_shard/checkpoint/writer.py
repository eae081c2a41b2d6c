"""Writing files of a checkpoint as DCP has them, with a checksum in the same pass.

Any DCP reader reads them. Unlike DCP's own writer this one holds and copies no tensor while it writes.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

METADATA = ".metadata"
_BUFFER_NBYTES = 1 << 18
_FLUSH_NBYTES = 8 << 20
_WRITE = 2  # SYNC_FILE_RANGE_WRITE of Linux: start, and don't wait
_libc = ctypes.CDLL(None)
_VERSION = "1.0.0"  # of DCP's format


class FileFacts(NamedTuple):
    """What a manifest says of a file: its length in bytes and its CRC-32."""

    nbytes: int
    crc32: int


# Called with a file's name before each piece is written; tests stop a rank here.
before_write: Callable[[str], object] | None = None


class CheckedFile(io.RawIOBase):
    """A new file whose checksum is taken while it is written; `close` has it on the disk.

    Args:
        directory_fd: Of the open directory.
        name: In the directory.
    """

    def __init__(self, directory_fd: int, name: str) -> None:
        self._name, self._crc32, self._position, self._flushed = name, 0, 0, 0
        self._fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=directory_fd)

    def writable(self) -> bool:
        """Whether it can be written: yes."""
        return True

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self._position

    def write(self, data: Any) -> int:
        """Write all of the data."""
        view = memoryview(data).cast("B")
        self._crc32 = zlib.crc32(view, self._crc32)
        start = 0
        while start < len(view):
            if before_write is not None:
                before_write(self._name)
            try:
                start += os.write(self._fd, view[start:])
            except OSError as error:
                raise self._named(error) from None
        self._position += len(view)
        if self._position - self._flushed >= _FLUSH_NBYTES and hasattr(_libc, "sync_file_range"):
            # The disk begins now and not when all is written.
            start, self._flushed = self._flushed, self._position
            _libc.sync_file_range(self._fd, ctypes.c_int64(start), ctypes.c_int64(self._position - start), _WRITE)
        return len(view)

    def close(self) -> None:
        """Wait until the disk has all of it."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.fsync(fd)
            except OSError as error:
                raise self._named(error) from None
            finally:
                os.close(fd)
        super().close()

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, self._name)

    @property
    def facts(self) -> FileFacts:
        """Length and checksum of what has been written."""
        return FileFacts(self._position, self._crc32)


class Writer(StorageWriter):
    """Writes the items of one rank into one file, one at a time.

    Args:
        directory_fd: Of the open directory.
        rank: Of this process among those that write.
        group_names: Names of the parameters of each group.
        aliases: Other key -> key under which something is found as well.
    """

    def __init__(
        self,
        directory_fd: int,
        rank: int,
        group_names: Sequence[Sequence[str]] = (),
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._directory_fd, self._rank = directory_fd, rank
        self._group_names, self._aliases = group_names, aliases
        self.facts: dict[str, FileFacts] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a writer serves once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the directory is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether DCP may choose this class by itself: no."""
        return False

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items; equal small values share their bytes."""
        name, results = f"__{self._rank}_0.distcp", []
        known: dict[bytes, tuple[int, int]] = {}
        if plan.items:
            checked = CheckedFile(self._directory_fd, name)
            with io.BufferedWriter(checked, _BUFFER_NBYTES) as file:  # torch.save writes in dozens of small pieces
                for item in sorted(plan.items, key=lambda each: each.type != WriteItemType.BYTE_IO):
                    offset, length = self._write(file, item, planner, known)
                    results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
            self.facts[name] = checked.facts
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(
        self, file: BinaryIO, item: WriteItem, planner: SavePlanner, known: dict[bytes, tuple[int, int]]
    ) -> tuple[int, int]:
        data = planner.resolve_data(item)
        if isinstance(data, Tensor) and data.numel() > 1:
            offset = file.tell()
            _save_alone(data, file)
            return offset, file.tell() - offset
        if isinstance(data, Tensor):
            stream = io.BytesIO()
            _save_alone(data, stream)
            data = stream
        content = data.getvalue()
        if content not in known:
            known[content] = (file.tell(), len(content))
            file.write(content)
        return known[content]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of all files."""
        metadata.version, metadata.storage_meta = _VERSION, StorageMeta()
        metadata.storage_data = {each.index: each.storage_data for of_rank in results for each in of_rank}
        self._add_aliases(metadata)
        self._add_flat_groups(metadata)
        with CheckedFile(self._directory_fd, METADATA) as file:
            file.write(pickle.dumps(metadata))
        self.facts[METADATA] = file.facts

    def _add_aliases(self, metadata: Metadata) -> None:
        """Let tied weights be found under each of their names; no byte is repeated."""
        entries, places, paths = metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data
        others: dict[str, list[str]] = {}
        for other, key in self._aliases.items():
            others.setdefault(key, []).append(other)
            entries[other], paths[other] = entries[key], (*paths[key][:-1], other.removeprefix(f"{paths[key][0]}."))
        for index, place in list(places.items()):
            for other in others.get(index.fqn, ()):
                places[MetadataIndex(other, index.offset)] = place

    def _add_flat_groups(self, metadata: Metadata) -> None:
        """Let settings of groups be found under each parameter, too, as FSDP2 may look for them; no byte is repeated.

        ``optim.param_groups.0.lr`` becomes ``optim.param_groups.layer.weight.lr`` as well, which is the key with
        ``StateDictOptions(flatten_optimizer_state_dict=True)``.
        """
        entries, places, paths = metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data
        for key, path in list(paths.items()):
            if path[:2] != ("optim", "param_groups") or len(path) != 4 or path[3] == "params":
                continue
            for name in self._group_names[path[2]]:
                alias = f"optim.param_groups.{name}.{path[3]}"
                if alias not in entries:
                    entries[alias], paths[alias] = entries[key], ("optim", f"param_groups.{name}.{path[3]}")
                    places[MetadataIndex(alias)] = places[MetadataIndex(key)]


def _save_alone(tensor: Tensor, file: BinaryIO) -> None:
    """Save a tensor in row-major order, without the rest of the storage that it may be a view of."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        torch.save(tensor, file)
        return
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())  # alive as long as the tensor
    torch.save(torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape), file)
