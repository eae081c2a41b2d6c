"""Finding what a path means, and holding it open: a checkpoint, a directory of checkpoints, or safetensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from zero_shard.checkpoint.directory import Directory, latest_checkpoint
from zero_shard.checkpoint.reader import Reader
from zero_shard.checkpoint.safetensors_files import SafetensorsFiles, is_safetensors
from zero_shard.collectives import Agreements

Source = Directory | SafetensorsFiles

_TRIES = 20


@contextmanager
def opened(path: Path, ranks: Agreements, label: str) -> Iterator[Source]:
    """Hold the same version of a checkpoint open on all ranks, while savers may replace it."""
    for _ in range(_TRIES):
        with ranks.errors_on_all_ranks(label):
            chosen = _chosen(path) if ranks.rank == 0 else path
        chosen = Path(ranks.gather_objects(str(chosen), label)[0])
        with ExitStack() as stack:
            with ranks.errors_on_all_ranks(label):
                source: Source = SafetensorsFiles(chosen) if is_safetensors(chosen) else Directory(chosen)
                stack.enter_context(source)
            if len(set(ranks.gather_objects(source.id, label))) == 1:
                yield source
                return
    raise RuntimeError(f"{path} is replaced faster than {ranks.num_ranks} ranks can open it; load a name that stays")


def reader_of(source: Source) -> Reader:
    """Return what reads its files."""
    return source.reader() if isinstance(source, SafetensorsFiles) else Reader(source.open_file)


def _chosen(path: Path) -> Path:
    """Return the checkpoint itself, the last one in a directory of checkpoints, or what has safetensors."""
    real = Path(os.path.realpath(path))  # as save has it, also for "gone/../x"
    try:
        Directory(real).close()
    except FileNotFoundError:
        found = latest_checkpoint(real)
        if found is not None:
            return Path(os.path.realpath(found))
        if is_safetensors(path):
            return path.absolute()  # a file may be a link to one of another name
        raise
    return real
