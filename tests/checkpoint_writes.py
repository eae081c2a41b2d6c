"""What tests do to the writing of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zero_shard.checkpoint import writer


@contextmanager
def writing(call: Callable[[str], object]) -> Iterator[None]:
    """Have ``call`` called with a file's name before each piece that this rank writes."""
    writer.before_write = call
    try:
        yield
    finally:
        writer.before_write = None
