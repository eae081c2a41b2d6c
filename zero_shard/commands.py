"""What all commands do alike: an error is one line, and a file that they write is whole or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def text_of(error: BaseException) -> str:
    """Return what an error says, in one line."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    return " ".join(text.split()) or type(error).__name__


def check_place(path: Path, option: str) -> None:
    """Refuse a place where no file can be written.

    Raises:
        ValueError: It is no file, or its directory is not there or not writable; the text names the ``option``.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is {'a directory' if path.is_dir() else 'no file'}; name a file with {option}")
    if not path.parent.is_dir():
        raise ValueError(f"{path} can't be written: there is no directory {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path} can't be written: the directory is not writable; name another place with {option}")


@contextlib.contextmanager
def written_whole(path: Path, option: str) -> Iterator[Path]:
    """Give another name to write to, with the same suffix; the file gets its own name at the end, or goes.

    Raises:
        OSError: It can't be written; the text names the ``option``.
    """
    half = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield half
        half.replace(path)
    except OSError as error:
        raise OSError(f"{path} can't be written: {error.strerror or error}; name another place with {option}") from None
    finally:
        with contextlib.suppress(OSError):
            half.unlink()
