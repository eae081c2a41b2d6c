"""Reads files of torch.save whose pickles name foreign classes, without importing or calling anything foreign.

``torch.load(weights_only=True)`` refuses such files. Here the unpickler builds tensors, sizes, dtypes and containers,
and for every other name an inert stand-in that does nothing. Memory is that of the pickle:
tensors are mapped from the file.
"""

from __future__ import annotations

import pickle
import struct
import types
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

_NUMPY_FORMATS = {"f4": "<f", "f8": "<d", "i4": "<i", "i8": "<q"}


class Inert:
    """Stands for an object whose class is not loaded: holds its constructor's arguments, drops its state."""

    __slots__ = ("arguments",)
    arguments: tuple[Any, ...]
    origin: ClassVar[str] = ""

    def __new__(cls, *arguments: Any, **_: Any) -> Inert:
        """Keep the arguments."""
        self = object.__new__(cls)
        self.arguments = arguments
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Drop it. Without this method a pickle's BUILD would set attributes, those of the class, too."""

    def __repr__(self) -> str:
        return f"<{self.origin}>"

    def __setitem__(self, *_: Any) -> None:
        """Drop an entry of a foreign mapping."""

    def append(self, _: Any) -> None:
        """Drop an element of a foreign sequence."""

    extend = add = append


class _Builder:
    """What a pickle may call. Without attributes, so that it cannot be changed by one."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        raise NotImplementedError


class _RebuildTensor(_Builder):
    __slots__ = ()

    def __call__(self, *arguments: Any) -> Tensor:
        storage, offset, size, stride = arguments[:4]
        if not isinstance(storage, torch.storage.TypedStorage):
            raise TypeError(f"a tensor is built from {type(storage).__name__}, expected a storage")
        return torch._utils._rebuild_tensor_v2(storage, offset, size, stride, False, OrderedDict())  # type: ignore[no-any-return]


class _RebuildParameter(_Builder):
    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        return arguments[0]


class _RebuildSubclass(_Builder):
    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        function, _, inner = arguments[:3]
        if not isinstance(function, _RebuildTensor):
            raise TypeError(f"a tensor is built by {function!r}")
        return function(*inner)


class _Encode(_Builder):
    """Bytes, as protocol 2 writes them."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> bytes:
        text, encoding = arguments
        if encoding != "latin1":
            raise TypeError(f"bytes are encoded by {encoding!r}, expected latin1")
        return str(text).encode("latin1")


class _NumpyScalar(_Builder):
    """A number of NumPy, as schedulers leave them in lr."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        dtype, data = arguments
        form = _NUMPY_FORMATS.get(dtype.arguments[0]) if isinstance(dtype, Inert) and dtype.arguments else None
        return Inert(*arguments) if form is None else struct.unpack(form, data)[0]


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
    ("torch._utils", "_rebuild_parameter"): _RebuildParameter(),
    ("torch._utils", "_rebuild_parameter_with_state"): _RebuildParameter(),
    ("torch._tensor", "_rebuild_from_type_v2"): _RebuildSubclass(),
    ("_codecs", "encode"): _Encode(),
    ("numpy.core.multiarray", "scalar"): _NumpyScalar(),
    ("numpy._core.multiarray", "scalar"): _NumpyScalar(),
    **{("torch", str(each).removeprefix("torch.")): each for each in vars(torch).values() if type(each) is torch.dtype},
}


class _Unpickler(pickle.Unpickler):
    """Never imports. torch.load derives from it and adds the storages."""

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        return type(name, (Inert,), {"__slots__": (), "origin": f"{module}.{name}"})


_PICKLE = types.SimpleNamespace(__name__="inert_pickle", Unpickler=_Unpickler)


def load_inert(path: Path, verify: bool = True) -> Any:
    """Return what torch.save wrote, with `Inert` for what is no tensor, number, text or container. Local.

    Args:
        verify: Compare the checksum that the file has of each of its tensors, which reads all of it once.
    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or none of torch.save's; the text names it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; copy the whole directory from where the checkpoint was written")
    try:
        check_archive(path, verify)
        return torch.load(path, map_location="cpu", pickle_module=_PICKLE, mmap=True, weights_only=False)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read: {type(error).__name__}: {error}. It is damaged, or torch.save of torch 1.6 or "
            "newer did not write it; copy it again from where the checkpoint was written"
        ) from error


def check_archive(path: Path, verify: bool) -> None:
    """Raise unless a file is what torch.save writes: stored members without code, and with ``verify`` undamaged."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{member.filename} is compressed")
            if member.filename.endswith("/constants.pkl"):
                raise ValueError("it holds TorchScript, which is code")
        damaged = archive.testzip() if verify else None
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} is wrong")
