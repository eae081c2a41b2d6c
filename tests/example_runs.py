"""Run an example's ``main()`` on the rank processes: as torchrun would start it, without the seconds that it takes."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import ranks
import torch.distributed as dist

EXAMPLES = str(Path(__file__).parent.parent / "examples")


def example(name: str) -> Any:
    """Return the module of an example."""
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    return importlib.import_module(name)


def run_main(name: str, *arguments: str, num_ranks: int = 2) -> str:
    """Return what ``python examples/<name>.py <arguments>`` prints under torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    printed: list[str] = ranks.run(num_ranks, _main, name, arguments, port, limit_s=240)
    assert not any(printed[1:]), "only rank 0 prints"
    return printed[0]


def _main(name: str, arguments: tuple[str, ...], port: int) -> str:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "test"}
    printed = io.StringIO()
    warnings.filterwarnings("ignore", module="lightning")  # its advice is no error; the task's filters end with it
    with (
        mock.patch.dict(os.environ, {key: str(value) for key, value in environment.items()}),
        mock.patch.object(sys, "argv", [name, *arguments]),
        contextlib.redirect_stdout(printed),
    ):
        example(name).main()
    return printed.getvalue()
