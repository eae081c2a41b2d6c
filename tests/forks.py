"""Small worlds of forked processes that may be killed: starting one costs milliseconds, not seconds.

Call these functions inside of one rank process that has done nothing else, as in
``ranks.run(1, fn, fresh=True, has_group=False)``: a fork of a process that has computed on many threads may hang.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

KILLED = "killed"


class World:
    """Ranks that run ``fn(*args)`` in forked processes, in a gloo group of their own if there are several.

    Args:
        timeout_s: Of the group.
    """

    def __init__(self, num_ranks: int, fn: Callable[..., None], *args: Any, timeout_s: float = 8.0) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="forks-")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a thread waits for the end of the test run
            self.pids = [self._fork(rank, num_ranks, fn, args, timeout_s) for rank in range(num_ranks)]

    def _fork(self, rank: int, num_ranks: int, fn: Callable[..., None], args: tuple[Any, ...], timeout_s: float) -> int:
        pid = os.fork()
        if pid:
            return pid
        path, text = Path(self._directory.name), "done"
        try:
            signal.alarm(50)
            if num_ranks > 1:
                store = dist.FileStore(str(path / "store"), num_ranks)
                timeout = timedelta(seconds=timeout_s)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
            fn(*args)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            (path / f"trace{rank}").write_text(traceback.format_exc())
        (path / f"answer{rank}").write_text(text)
        os._exit(0)

    def kill(self) -> None:
        """Kill all of them now."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def answers(self) -> list[str]:
        """Return "done", what was raised, or `KILLED` of each rank, when all have ended."""
        for pid in self.pids:
            os.waitpid(pid, 0)
        found = [Path(self._directory.name) / f"answer{rank}" for rank in range(len(self.pids))]
        texts = [path.read_text() if path.exists() else KILLED for path in found]
        self._directory.cleanup()
        return texts


def run(num_ranks: int, fn: Callable[..., None], *args: Any, timeout_s: float = 8.0) -> tuple[list[str], float]:
    """Return the answers of a world and the seconds that it took."""
    start = time.monotonic()
    answers = World(num_ranks, fn, *args, timeout_s=timeout_s).answers()
    return answers, time.monotonic() - start
