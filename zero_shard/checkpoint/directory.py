"""The directory of a checkpoint: it stands under its name whole or not at all.

It is written under a hidden name beside its own, ``.<name>.<random>.incomplete``; its manifest, with length and
checksum of every file, comes last; then it is renamed. Where one of that name stood before, the two change places in
one system call, and the old one goes afterwards. Whoever reads or writes a directory holds a lock on it, so that what
a crash has left can be told from what is in use, and a reader finishes with the version that it began with.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zero_shard.checkpoint.writer import METADATA, CheckedFile, FileFacts

MANIFEST = "manifest.json"
_FORMAT, _VERSION = "zero_shard checkpoint", 1
_ABANDONED_S = 86_400  # age at which a leftover without a lock goes
_PIECE_NBYTES = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux
_libc = ctypes.CDLL(None, use_errno=True)


class IncompleteDirectory:
    """A checkpoint that is being written, on the rank that gives it its name.

    Args:
        target: The name that it will have.
    Raises:
        FileExistsError: Something of this name is there that is not a checkpoint.
        OSError: It can't be made there.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        _check_replaceable(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        new = _hidden(target, "new")  # until it is locked, lest another saver takes it for a leftover
        new.mkdir()
        self._fd = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        self.path = _hidden(target, "incomplete")
        new.rename(self.path)

    def commit(self, files: Mapping[str, FileFacts], facts: Mapping[str, Any]) -> None:
        """Write the manifest and give the directory its name; what stood there goes.

        Args:
            files: Of all ranks.
            facts: What else the manifest says.
        """
        manifest = {
            "format": _FORMAT,
            "version": _VERSION,
            "id": secrets.token_hex(8),
            "saved_at_ns": max(time.time_ns(), 1 + self._last_saved_at_ns()),  # clocks of hosts differ
            **facts,
            "files": {name: each._asdict() for name, each in sorted(files.items())},
        }
        with CheckedFile(self._fd, MANIFEST) as file:
            file.write(json.dumps(manifest, indent=1).encode())
        os.fsync(self._fd)
        former = _put_in_place(self.path, self.target)
        _sync(self.target.parent)
        self._close()
        if former is not None:
            _remove(former)

    def _last_saved_at_ns(self) -> int:
        beside = _times_of_complete_ones(self.target.parent.iterdir())
        return max((saved_at_ns for saved_at_ns, _ in beside), default=0)

    def discard(self) -> None:
        """Remove what has been written, unless it has got its name."""
        if self._fd >= 0:
            self._close()
            shutil.rmtree(self.path, ignore_errors=True)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


class Directory:
    """A complete checkpoint, open for reading: no saver removes it until it is closed.

    Args:
        path: Its name.
    Raises:
        FileNotFoundError: There is none, or it lacks its manifest.
        ValueError: The manifest is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open_locked(path)
        try:
            self.manifest = self._read_manifest()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let savers remove it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def id(self) -> str:
        """Tells one version of a checkpoint from another of the same name."""
        return str(self.manifest.get("id", ""))

    def open_file(self, name: str) -> int:
        """Open a file for reading.

        Raises:
            FileNotFoundError: There is none, by name.
        """
        try:
            return os.open(name, os.O_RDONLY, dir_fd=self._fd)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "the checkpoint lacks a file", str(self.path / name)) from None

    def verify(self, share: int = 0, num_shares: int = 1) -> None:
        """Compare files with the manifest: a share of them by all their bytes, in the order of their length.

        Raises:
            FileNotFoundError, ValueError: A file is missing or damaged, by name.
        """
        files = sorted(self.manifest["files"].items(), key=lambda item: (-item[1]["nbytes"], item[0]))
        for name, facts in files[share::num_shares]:
            fd = self.open_file(name)
            try:
                nbytes = os.fstat(fd).st_size
                if nbytes != facts["nbytes"]:
                    raise ValueError(
                        f"{self.path / name} is damaged: it has {nbytes} bytes, expected {facts['nbytes']}"
                    )
                if _crc32(fd) != facts["crc32"]:
                    raise ValueError(f"{self.path / name} is damaged: its bytes don't match their checksum")
            finally:
                os.close(fd)

    def is_complete(self) -> bool:
        """Whether all files are there with the right length; their bytes are not read."""
        return all(_size(name, self._fd) == facts["nbytes"] for name, facts in self.manifest["files"].items())

    def _read_manifest(self) -> dict[str, Any]:
        try:
            fd = os.open(MANIFEST, os.O_RDONLY, dir_fd=self._fd)
        except FileNotFoundError:
            if _size(METADATA, self._fd) is None:
                raise FileNotFoundError(f"no complete checkpoint at {os.fspath(self.path)!r}") from None
            return {"files": {}}  # another program's
        with open(fd, "rb") as file:
            content = file.read()
        try:
            manifest = json.loads(content)
            is_right = manifest["format"] == _FORMAT and all(
                {"nbytes", "crc32"} <= facts.keys() for facts in manifest["files"].values()
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path / MANIFEST} is damaged: {error}") from None
        if not is_right or METADATA not in manifest["files"]:
            raise ValueError(f"{self.path / MANIFEST} is damaged: it is not that of a checkpoint")
        if manifest["version"] > _VERSION:
            raise ValueError(
                f"{self.path} has version {manifest['version']} of the format, and this zero_shard reads up to "
                f"{_VERSION}; update zero_shard"
            )
        return dict(manifest)


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint in a directory that was written last, None if there is none. Local.

    What a crash has left, and what lacks a file or bytes of one, is passed over. With several ranks, pass the directory
    to `load`, which has all of them take the same one.
    """
    found = complete_checkpoints(directory)
    return found[-1] if found else None


def complete_checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints in a directory, the one that was written last at the end. Local."""
    return _complete_ones(Path(directory).iterdir()) if Path(directory).is_dir() else []


def check_keep(target: Path, keep: int | None) -> None:
    """Raise ValueError if `prune` could not be called so."""
    if keep is None:
        return
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep must be a number of checkpoints, at least 1, got {keep!r}")
    if not target.name[-1:].isdecimal():
        raise ValueError(f"keep={keep} needs a path that ends in a number, as 'checkpoint-000100', got {target.name!r}")


def prune(target: Path, keep: int) -> None:
    """Remove older checkpoints beside ``target`` whose names differ from its name in the last number only.

    Args:
        keep: How many complete ones remain, those that were written last; ``target`` is always one of them.
    """
    stem = target.name.rstrip("0123456789")
    names = (each for each in target.parent.iterdir() if each.name.startswith(stem) and each != target)
    beside = [each for each in names if each.name.removeprefix(stem).isdecimal()]
    others = _complete_ones(beside)
    for old in others[: len(others) + 1 - keep] if len(others) >= keep else []:
        remove(old)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint: its name at once, its files unless somebody reads them; then a later saver does."""
    hidden = _hidden(checkpoint, "removed")
    with suppress(FileNotFoundError):  # another saver was faster
        checkpoint.rename(hidden)
        _remove(hidden)


def _complete_ones(paths: Iterable[Path]) -> list[Path]:
    """Return those that are complete checkpoints, the one that was written last at the end."""
    return [path for _, path in sorted(_times_of_complete_ones(paths))]


def _times_of_complete_ones(paths: Iterable[Path]) -> list[tuple[int, Path]]:
    found = []
    for path in paths:
        if path.name.startswith(".") or not path.is_dir():
            continue
        with suppress(OSError, ValueError), Directory(path) as directory:
            if "id" in directory.manifest and directory.is_complete():
                found.append((directory.manifest["saved_at_ns"], path))
    return found


def _check_replaceable(target: Path) -> None:
    """Raise FileExistsError if there is something else than a checkpoint."""
    if not os.path.lexists(target):
        return
    names = set(os.listdir(target)) if target.is_dir() else {""}
    if names and not names & {MANIFEST, METADATA}:
        raise FileExistsError(
            errno.EEXIST, "there is something that is no checkpoint; remove it or save under another name", str(target)
        )


def _hidden(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.{kind}")


def _put_in_place(new: Path, target: Path) -> Path | None:
    """Give a directory its name; return where the one that had it is now."""
    while True:
        try:
            if not os.path.lexists(target):
                new.rename(target)
                return None
            if _exchange(new, target):
                return new
            former = _hidden(target, "replaced")
            target.rename(former)
            new.rename(target)
            return former
        except OSError as error:  # another saver came between
            if error.errno not in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY) or not new.exists():
                raise


def _exchange(one: Path, other: Path) -> bool:
    """Let two directories change places in one step; return False where the system can't."""
    if not hasattr(_libc, "renameat2"):
        return False
    if _libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _open_locked(path: Path) -> int:
    """Open a directory and lock it against removal."""
    for attempt in range(100):
        where = path if path.is_dir() else _replaced(path)
        try:
            fd = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"no complete checkpoint at {os.fspath(path)!r}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # being removed, or just renamed
            if attempt < 99:
                os.close(fd)
                time.sleep(0.01)
                continue
        except OSError:  # a file system without locks
            pass
        if _size(MANIFEST, fd) is None and _is_replaced(path, fd):
            os.close(fd)
            continue
        return fd
    raise FileNotFoundError(f"{os.fspath(path)!r} is being replaced all the time")


def _is_replaced(path: Path, fd: int) -> bool:
    """Whether another directory has this name by now."""
    with suppress(FileNotFoundError):
        return not os.path.samestat(os.stat(path), os.fstat(fd))
    return True


def _replaced(path: Path) -> Path:
    """Return where the checkpoint is whose replacement was interrupted between two renames, else the name itself."""
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    found = [each for each in beside if _is_hidden(each.name, path.name, ("replaced",))]
    return max(found, key=lambda each: each.stat().st_mtime_ns, default=path)


def _is_hidden(name: str, target: str, kinds: Iterable[str]) -> bool:
    return re.fullmatch(rf"\.{re.escape(target)}\.[0-9a-f]{{16}}\.({'|'.join(kinds)})", name) is not None


def _sweep(target: Path) -> None:
    """Remove what crashed savers of this name have left, or of one that differs in the number at its end."""
    stem = target.name.rstrip("0123456789")
    for each in list(target.parent.iterdir()):
        match = re.fullmatch(rf"\.({re.escape(stem)}\d*)\.[0-9a-f]{{16}}\.(incomplete|removed|replaced|new)", each.name)
        if match is None or (match[2] == "replaced" and not target.with_name(match[1]).exists()):
            continue
        if match[2] != "new" or _age_s(each) > _ABANDONED_S:
            _remove(each)


def _remove(path: Path) -> None:
    """Remove a hidden directory, unless somebody writes or reads it; then a later saver does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except OSError:  # a file system without locks
        if path.name.endswith(".incomplete") and _age_s(path) < _ABANDONED_S:
            return
    finally:
        os.close(fd)
    shutil.rmtree(path, ignore_errors=True)


def _age_s(path: Path) -> float:
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0


def _crc32(fd: int) -> int:
    crc, room = 0, bytearray(_PIECE_NBYTES)
    while count := os.readv(fd, [room]):
        crc = zlib.crc32(memoryview(room)[:count], crc)
    return crc


def _size(name: str, directory_fd: int) -> int | None:
    try:
        return os.stat(name, dir_fd=directory_fd).st_size
    except FileNotFoundError:
        return None


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Hold a directory open; gives the file descriptor."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)
