"""Reading files of a checkpoint that any DCP writer has written, without running code that they may hold.

Unlike with DCP's own reader, a box of a tensor is read straight into its place where it is one run of the file, and
pickles may build nothing but DCP's own records.
"""

from __future__ import annotations

import copy
import ctypes
import io
import math
import os
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from zero_shard.checkpoint.writer import METADATA

_PIECE_NBYTES = 1 << 20  # read at a time where numbers change their form on the way
_MAX_OPEN_FILES = 64
_NAME_LENGTH_AT = 26  # in the header that a zip archive has before each file
_LOCAL_HEADER_NBYTES = 30
_STORAGE_DTYPES = {  # by the name that a header has for them; others are read by torch.load
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _FileView(io.RawIOBase):
    """A part of an open file, as ``zipfile`` and ``torch.load`` read it."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd, self._start, self._length, self._position = fd, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        read = os.preadv(self._fd, [view[:count]], self._start + self._position)
        self._position += read
        return read


class Record(NamedTuple):
    """Where the numbers of a stored tensor lie in its file, row-major."""

    start: int
    dtype: torch.dtype
    shape: torch.Size


class Reader(StorageReader):
    """Reads tensors and values of a checkpoint, each rank what it needs, without communication.

    Args:
        open_file: Opens a file of the directory by its name; the caller closes what it returns.
    Attributes:
        has_weights_only: Keys are the names of a model's state dict, and there is nothing else.
    """

    has_weights_only = False

    def __init__(self, open_file: Callable[[str], int]) -> None:
        self._open_file = open_file
        self._places: dict[MetadataIndex, Any] = {}
        self._fds: dict[str, int] = {}
        self._records: dict[tuple[str, int], Record | None] = {}
        self._values: dict[tuple[str, int], Any] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a reader serves one directory."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index of all files.

        Raises:
            ValueError: It is none.
        """
        fd = self._fd(METADATA)
        try:
            metadata = _MetadataUnpickler(_FileView(fd, 0, os.fstat(fd).st_size)).load()
        except Exception as error:  # a damaged pickle raises anything
            raise ValueError(f"{METADATA} is damaged: {type(error).__name__}: {error}") from error
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{METADATA} holds a {type(metadata).__name__}, not an index of a checkpoint")
        self.set_up_storage_reader(metadata, False)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take over where everything lies."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether DCP may choose this class by itself: no."""
        return False

    def check(self, plan: LoadPlan) -> None:
        """See that every file that a plan reads is there, long enough, and has the tensors where they should be.

        Raises:
            FileNotFoundError, ValueError: It is not, by name.
        """
        ends: dict[str, int] = {}
        for item in plan.items:
            place = self._places[item.storage_index]
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in ends.items():
            nbytes = os.fstat(self._fd(name)).st_size
            if nbytes < end:
                raise ValueError(f"{name} is damaged: it has {nbytes} bytes, expected at least {end}")
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO and self._record(item.storage_index) is None:
                self._load_value(item.storage_index.fqn, self._places[item.storage_index])

    def read_value(self, key: str, num_dims: int = 0) -> Any:
        """Return something that was stored in one piece; no code is run.

        Args:
            num_dims: Of a tensor.
        Raises:
            ValueError: It needs a class that is not safe to load, or is damaged.
        """
        place = self._places.get(MetadataIndex(key)) or self._places[MetadataIndex(key, torch.Size([0] * num_dims))]
        spot = (place.relative_path, place.offset)
        if spot not in self._values:
            self._values[spot] = self._load_value(key, place)
        return copy.deepcopy(self._values[spot])

    def _load_value(self, key: str, place: Any) -> Any:
        try:
            return torch.load(self._view(place), map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(f"{key} in {place.relative_path} can't be read: {reason_of(error)}") from error

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors, in the order of the plan: one is complete before the next one begins."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._view(self._places[item.storage_index]).read()))
            else:
                target = planner.resolve_tensor(item).detach()
                if not self._read_run(item, target):
                    self._read_whole(item, target)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_whole(self, item: ReadItem, target: Tensor) -> None:
        """Read the stored tensor and copy the part that is wanted."""
        piece = self._load_stored(item.storage_index)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            piece = piece.narrow(dim, start, length)
        target.copy_(piece)

    def _load_stored(self, index: MetadataIndex) -> Tensor:
        stored: Tensor = torch.load(self._view(self._places[index]), map_location="cpu", weights_only=True)
        return stored

    def _read_run(self, item: ReadItem, target: Tensor) -> bool:
        """Read straight into place what is one run of the file; return False where it is not."""
        record = self._record(item.storage_index)
        if record is None or not target.is_contiguous():
            return False
        lengths, shape = tuple(item.lengths), tuple(record.shape)
        lead = next((dim for dim, length in enumerate(lengths) if length != 1), len(lengths))
        if lengths[lead + 1 :] != shape[lead + 1 :]:
            return False
        start = sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(item.storage_offsets))
        fd = self._fd(self._places[item.storage_index].relative_path)
        position = record.start + start * record.dtype.itemsize
        flat = target.view(-1)
        if target.dtype == record.dtype and target.device.type == "cpu":
            read_into(fd, position, flat)
            return True
        room = torch.empty(min(len(flat), _PIECE_NBYTES // record.dtype.itemsize), dtype=record.dtype)
        for piece in flat.split(max(1, len(room))):
            read_into(fd, position, room[: len(piece)])
            piece.copy_(room[: len(piece)])
            position += len(piece) * record.dtype.itemsize
        return True

    def _record(self, index: MetadataIndex) -> Record | None:
        place = self._places[index]
        key = (place.relative_path, place.offset)
        if key not in self._records:
            try:
                self._records[key] = _find_record(self._view(place), place.offset)
            except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, AttributeError, ValueError):
                self._records[key] = None  # written in another way
        return self._records[key]

    def _view(self, place: Any) -> BinaryIO:
        if getattr(place, "transform_descriptors", None):
            raise NotImplementedError(
                f"{place.relative_path} was written through {place.transform_descriptors}; save without extensions"
            )
        view = _FileView(self._fd(place.relative_path), place.offset, place.length)
        return cast(BinaryIO, io.BufferedReader(view))

    def _fd(self, name: str) -> int:
        if name not in self._fds:
            if len(self._fds) >= _MAX_OPEN_FILES:
                os.close(self._fds.pop(next(iter(self._fds))))
            self._fds[name] = self._open_file(name)
        return self._fds[name]


def reason_of(error: Exception) -> str:
    """Return why ``torch.load`` has failed, without its advice to load what is not safe."""
    text = str(error).strip() or repr(error)
    found = re.search(r"WeightsUnpickler error: (.+)", text)
    return found[1].strip() if found else text.splitlines()[0]


def read_into(fd: int, position: int, target: Tensor) -> None:
    """Fill a contiguous CPU tensor from a file."""
    view = memoryview((ctypes.c_char * target.nbytes).from_address(target.data_ptr())).cast("B")
    start = 0
    while start < len(view):
        count = os.preadv(fd, [view[start:]], position + start)
        if count == 0:
            raise ValueError("a file of the checkpoint ends too early")
        start += count


class _HeaderUnpickler(pickle.Unpickler):
    """Reads the header of a tensor that ``torch.save`` wrote: builds tuples only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *args: args
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} in the header of a tensor")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _find_record(view: BinaryIO, offset: int) -> Record | None:
    """Return where the numbers of one stored tensor lie; None if they don't lie in row-major order."""
    with zipfile.ZipFile(view) as archive:
        (data,) = (info for info in archive.infolist() if "/data/" in info.filename and info.filename.endswith("/0"))
        root = data.filename.removesuffix("data/0")
        storage, first, size, stride, *_ = _HeaderUnpickler(io.BytesIO(archive.read(f"{root}data.pkl"))).load()
        if archive.read(f"{root}byteorder") != sys.byteorder.encode() or data.compress_type != zipfile.ZIP_STORED:
            return None
    dtype, shape = _STORAGE_DTYPES[storage[1]], torch.Size(size)
    is_row_major = torch.empty(shape, device="meta").stride() == tuple(stride)
    if first != 0 or not is_row_major or data.file_size != shape.numel() * dtype.itemsize:
        return None
    view.seek(data.header_offset + _NAME_LENGTH_AT)
    name_length, extra_length = struct.unpack("<HH", view.read(4))
    return Record(offset + data.header_offset + _LOCAL_HEADER_NBYTES + name_length + extra_length, dtype, shape)


_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's records and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in _RECORDS.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of a checkpoint's index")
        return super().find_class(module, name)
