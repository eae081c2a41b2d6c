"""What the example needs of ``torch.distributed``: who am I, on which device, and three small collectives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """This rank among its peers. With a world of one and no process group its collectives do nothing."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def describe(self) -> str:
        """Return how many ranks there are and what they run on."""
        if not dist.is_initialized():
            return f"1 process without a group, on {self.device.type}"
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks} on {self.device.type} over {dist.get_backend()}"

    def say(self, text: str) -> None:
        """Print once, not once per rank."""
        if self.is_first:
            print(text, flush=True)

    def mean(self, value: Tensor) -> float:
        """Return the mean over ranks of a scalar. All ranks call it."""
        total = value.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total) / self.world_size

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's ``value``, in rank order. All ranks call it."""
        if not dist.is_initialized():
            return [value]
        values: list[Value] = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Return when every rank is here. All ranks call it."""
        if dist.is_initialized():
            dist.barrier()


@contextmanager
def joined(*, timeout_s: float) -> Iterator[Ranks]:
    """Join the process group that torchrun describes, or none without torchrun; leave it at the end.

    NCCL needs a GPU for every rank; with fewer the same code runs on the CPUs over gloo. A rank that waits
    longer than ``timeout_s`` for the others raises, and torchrun then ends the rest: a failure never hangs.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_world_size = (
        int(os.environ.get("LOCAL_RANK", "0")),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size
    device = torch.device("cuda", local_rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        _make_deterministic(device)
    else:
        torch.set_num_threads(max(1, _num_usable_cpus() // local_world_size))
    if "RANK" not in os.environ:
        yield Ranks(rank, world_size, device)
        return
    dist.init_process_group(
        "nccl" if has_gpus else "gloo",
        timeout=timedelta(seconds=timeout_s),
        device_id=device if has_gpus else None,
        **_store_of_this_life(rank, world_size),
    )
    yield Ranks(rank, world_size, device)
    # Only after success: with a peer gone, leaving in good order would wait for it.
    dist.barrier()
    dist.destroy_process_group()


def _store_of_this_life(rank: int, world_size: int) -> dict[str, Any]:
    """Return what keeps ranks that torchrun has started again away from the addresses of those that died.

    torchrun keeps one store over all restarts (pytorch/pytorch issue 135712). With several agents, which count restarts
    each for itself, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started.
    """
    environment = os.environ
    is_shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_shared or environment.get("GROUP_WORLD_SIZE") != "1":
        return {}
    store = dist.TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
    life = dist.PrefixStore(f"life {environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return {"store": life, "rank": rank, "world_size": world_size}


def _num_usable_cpus() -> int:
    """Return how many CPUs this process may use, which in a container can be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _make_deterministic(device: torch.device) -> None:
    """Choose CUDA kernels that give the same bits every time, which a resume bit for bit needs."""
    torch.cuda.set_device(device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
