"""Run an example's ``main()`` on the rank processes: as torchrun would start it, without the seconds that it takes."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ranks
import torch
import torch.distributed as dist

from zero_shard import failure_report

EXAMPLES = str(Path(__file__).parent.parent / "examples")


def example(name: str) -> Any:
    """Return the module of an example."""
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    return importlib.import_module(name)


def run_main(name: str, *arguments: str, num_ranks: int = 2) -> str:
    """Return what ``python examples/<name>.py <arguments>`` prints under torchrun."""
    (printed, _), *others = ranks.run(num_ranks, main_as_rank, name, arguments, free_port(), limit_s=240)
    assert not any(stdout for stdout, _ in others), "only rank 0 prints"
    return str(printed)


def free_port() -> int:
    """Return a port for the ranks of one run to meet at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def as_under_torchrun(port: int) -> Iterator[None]:
    """Let a script find what torchrun tells a rank, in place of the group of this task; undo what scripts set."""
    rank, world_size, num_threads = dist.get_rank(), dist.get_world_size(), torch.get_num_threads()
    dist.destroy_process_group()
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "test"}
    try:
        with mock.patch.dict(os.environ, {key: str(value) for key, value in environment.items()}):
            yield
    finally:
        torch.set_num_threads(num_threads)
        failure_report.begin()  # ends the reports that a script has asked for


class _Stderr(io.StringIO):
    def fileno(self) -> int:
        """Return where the stacks of a crash go, which torch's ``record`` asks for."""
        return 2


def main_as_rank(name: str, arguments: tuple[str, ...], port: int) -> tuple[str, str]:
    """Run it in this rank process, in a group of its own making; return what it prints to stdout and to stderr."""
    stdout, stderr = io.StringIO(), _Stderr()
    warnings.filterwarnings("ignore", module="lightning")  # its advice is no error; the task's filters end with it
    with (
        as_under_torchrun(port),
        mock.patch.object(sys, "argv", [name, *arguments]),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        example(name).main()
    return stdout.getvalue(), stderr.getvalue()
