"""Files of other programs, written as a stream: one tensor is on the heap at a time, however large the file.

safetensors   8 bytes with the length of the header, the header in JSON, then the numbers
torch         what ``torch.save`` writes: a zip archive with a pickle that names the storages, then the storages

Their own writers want all tensors at once.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ALIGNMENT_NBYTES = 64  # of storages in torch's archives, for who maps them
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # that a zip archive can name: files of equal contents have equal bytes
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH_STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}


class Streamed(NamedTuple):
    """A tensor of which only the form is known until it is written; row-major."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def content(self) -> memoryview:
        """Return the numbers."""
        tensor = self.read().contiguous()
        assert (tensor.shape, tensor.dtype) == (self.shape, self.dtype)
        numbers: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        return memoryview(numbers)


def write_safetensors(path: Path, tensors: Mapping[str, Streamed]) -> None:
    """Write a new file that ``safetensors`` and ``transformers`` read.

    Raises:
        NotImplementedError: The format lacks a dtype, by the tensor's name.
        OSError: It can't be written.
    """
    # The largest numbers first, so that each lies at a multiple of its size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, each in ordered:
        if each.dtype not in SAFETENSORS_DTYPES:
            raise NotImplementedError(f"safetensors has no {each.dtype}, which {name} is of; export it as torch")
        place = [start, start := start + each.nbytes]
        header[name] = {"dtype": SAFETENSORS_DTYPES[each.dtype], "shape": list(each.shape), "data_offsets": place}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(content)) + content)
        for _, each in ordered:
            file.write(each.content())
        file.flush()
        os.fsync(file.fileno())


class _Storage(NamedTuple):
    key: str
    dtype: torch.dtype
    numel: int


class _Stub:
    """Is pickled as ``torch.save`` pickles the tensor whose form it has."""

    def __init__(self, form: Streamed, key: str) -> None:
        self._form, self._key = form, key

    def __reduce__(self) -> tuple[Any, ...]:
        shape, dtype, _ = self._form
        strides = torch.empty(shape, device="meta").stride()
        storage = _Storage(self._key, dtype, shape.numel())
        return torch._utils._rebuild_tensor_v2, (storage, 0, tuple(shape), strides, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, found: Any) -> Any:
        if not isinstance(found, _Storage):
            return None
        key, dtype, numel = found
        return "storage", getattr(torch, _TORCH_STORAGES[dtype]), key, "cpu", numel


def write_torch(path: Path, tree: Any) -> None:
    """Write a new file that ``torch.load`` reads, also with ``weights_only=True`` and ``mmap=True``.

    Args:
        tree: Dicts and lists of anything small, with a `Streamed` in place of each large tensor; the same one twice is
            one tensor.
    Raises:
        NotImplementedError: The format lacks a dtype.
        OSError: It can't be written.
    """
    found: dict[int, tuple[Streamed, _Stub]] = {}
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(_with_stubs(tree, found))
    with open(path, "xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            _write_record(file, archive, f"{path.stem}/data.pkl", stream.getbuffer())
            _write_record(file, archive, f"{path.stem}/byteorder", memoryview(sys.byteorder.encode()))
            for number, (form, _) in enumerate(found.values()):
                _write_record(file, archive, f"{path.stem}/data/{number}", form.content())
            _write_record(file, archive, f"{path.stem}/version", memoryview(b"3\n"))
        file.flush()
        os.fsync(file.fileno())


def _with_stubs(tree: Any, found: dict[int, tuple[Streamed, _Stub]]) -> Any:
    if isinstance(tree, Streamed):
        if tree.dtype not in _TORCH_STORAGES:
            raise NotImplementedError(f"files of torch can't be written with {tree.dtype} here; export as safetensors")
        return found.setdefault(id(tree), (tree, _Stub(tree, str(len(found)))))[1]
    if isinstance(tree, Tensor):
        return _with_stubs(Streamed(tree.shape, tree.dtype, tree.clone), found)
    if isinstance(tree, dict):
        return {key: _with_stubs(each, found) for key, each in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_with_stubs(each, found) for each in tree)
    return tree


def _write_record(file: Any, archive: zipfile.ZipFile, name: str, content: memoryview) -> None:
    record = zipfile.ZipInfo(name, _EARLIEST)
    record.file_size = len(content)
    record.CRC = record.compress_size = 0  # until it is written
    is_large = len(content) * 1.05 > zipfile.ZIP64_LIMIT  # as zipfile decides
    start = file.tell() + len(record.FileHeader(is_large)) + 4  # of the contents, with an empty field of padding
    padding = -start % _ALIGNMENT_NBYTES
    record.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(record, "w") as target:
        target.write(content)
