"""Real text that every machine with Python has: the source of its standard library, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which files are read and how they are split: the ``[data]`` table of the configuration file.

    Args:
        root: Directory that is searched; empty = the standard library of the running Python.
        pattern: Glob below ``root``.
        exclude: Directory names that are left out, at any depth.
        held_out_every: Every so-many-th file, in alphabetical order, is never trained on.
    """

    root: str = ""
    pattern: str = "**/*.py"
    exclude: tuple[str, ...] = ("site-packages", "dist-packages", "__pycache__")
    held_out_every: int = 20

    def __post_init__(self) -> None:
        if self.held_out_every < 2:
            raise ValueError(f"held_out_every must be at least 2, got {self.held_out_every}")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text split by file, so that no held-out byte was ever seen in training.

    Args:
        training: Bytes ``[N]``, uint8, all training files one after the other.
        held_out: Bytes ``[M]``, uint8.
        digest: Names this exact text, to notice a resume on another one.
    """

    training: Tensor
    held_out: Tensor
    digest: str

    def training_windows(self, step: int, rows: range, num_rows: int, window_numel: int, seed: int) -> Tensor:
        """Return windows ``[len(rows), window_numel]`` (int64): ``rows`` of the global batch of ``step``.

        The batch is a function of ``seed``, ``step`` and ``num_rows`` alone: no generator lives between
        steps, so a resumed run reads what the unbroken one would have read.
        """
        generator = torch.Generator().manual_seed(_mix(seed, step))
        last_start = self.training.numel() - window_numel
        starts = torch.randint(last_start + 1, (num_rows,), generator=generator)
        return _windows(self.training, starts[rows.start : rows.stop], window_numel)

    def held_out_windows(self, num_windows: int, window_numel: int) -> Tensor:
        """Return windows ``[num_windows, window_numel]`` (int64), spread evenly over the held-out text."""
        starts = torch.arange(num_windows) * (self.held_out.numel() - window_numel) // max(num_windows - 1, 1)
        return _windows(self.held_out, starts, window_numel)


def read_corpus(config: DataConfig, window_numel: int) -> Corpus:
    """Read the files that ``config`` names, in alphabetical order.

    Raises:
        ValueError: No file matches, or a part is shorter than one window.
    """
    root = Path(config.root or sysconfig.get_path("stdlib"))
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.glob(config.pattern)
        if path.is_file() and not set(config.exclude) & set(path.relative_to(root).parts)
    )
    contents = [(root / name).read_bytes() for name in names]
    held_out = b"".join(contents[:: config.held_out_every])
    training = b"".join(text for index, text in enumerate(contents) if index % config.held_out_every)
    if min(len(held_out), len(training)) < window_numel:
        raise ValueError(
            f"the text under {root} is too short: {len(names)} files match {config.pattern!r}, "
            f"{len(training)} bytes to train on and {len(held_out)} held out, expected at least "
            f"{window_numel} of each; set root and pattern in [data]"
        )
    return Corpus(
        training=torch.frombuffer(bytearray(training), dtype=torch.uint8),
        held_out=torch.frombuffer(bytearray(held_out), dtype=torch.uint8),
        digest=hashlib.sha256(training + b"\0" + held_out).hexdigest(),
    )


def _windows(text: Tensor, starts: Tensor, window_numel: int) -> Tensor:
    return text[starts[:, None] + torch.arange(window_numel)].long()


def _mix(seed: int, step: int) -> int:
    """Return one 63-bit generator seed for the pair, so that neighbouring steps and seeds share no stream."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:8], "little") >> 1
