"""Starting ranks: by torchrun from here, or by a torchrun that is there already; and what ranks share at the start."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

BAD_ARGUMENTS = 2
_PATH_OPTIONS = ("--out", "--merge", "--as-rank")


class OneLineParser(argparse.ArgumentParser):
    """Refuses bad arguments in one line, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end."""
        self.exit(BAD_ARGUMENTS, f"{self.prog}: {message}\n")


def is_rank() -> bool:
    """Whether a launcher has started this process as one of several."""
    return "RANK" in os.environ


def torchrun_command(script: str, words: Sequence[str], num_ranks: int) -> list[str]:
    """Return the command that starts ``num_ranks`` ranks of a script on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [*launcher, script, *words]


def rank_variables(threads: int) -> dict[str, str]:
    """Return the variables of ranks: OpenMP runtimes read their thread count when they start."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


def public_command(script: str, words: Sequence[str]) -> list[str]:
    """Return the command line without the directories of this machine."""
    command, is_path = [f"benchmarks/{script}"], False
    for word in words:
        option, equals, value = word.partition("=")
        if word.startswith("--"):
            is_path = option in _PATH_OPTIONS
            command.append(f"{option}={Path(value).name}" if is_path and equals else word)
        else:
            command.append(Path(word).name if is_path else word)
    return command


def run_ranks(script: str, words: Sequence[str], num_ranks: int, threads: int) -> None:
    """Start ranks and wait for them.

    Raises:
        SystemExit: They have failed; the text of the first error is on stderr.
    """
    command = torchrun_command(script, words, num_ranks)
    # Packages print while they are imported; the report keeps stdout to itself.
    result = subprocess.run(command, env=rank_variables(threads), stdout=sys.stderr, check=False)
    if result.returncode:
        sys.exit(f"{Path(script).name}: {num_ranks} ranks failed with status {result.returncode}; see above")


def join_group(device_type: str, timeout_s: float) -> tuple[torch.device, Any]:
    """Join the process group of the launcher; return this rank's device, and a gloo group for objects."""
    timeout = timedelta(seconds=timeout_s)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
        return device, dist.new_group(backend="gloo", timeout=timeout)
    dist.init_process_group("gloo", timeout=timeout)
    return torch.device("cpu"), dist.group.WORLD


def leave(status: int) -> NoReturn:
    """End this process without the interpreter's clean-up, in which some of gloo's programs abort."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
