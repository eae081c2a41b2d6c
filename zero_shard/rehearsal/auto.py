"""``stage = "auto"``: the lowest stage whose rehearsed peak fits into the memory that is free on every rank."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_shard.collectives import Communicator
from zero_shard.config import ZeroConfig
from zero_shard.rehearsal.run import optimizer_maker, rehearse
from zero_shard.rehearsal.skeleton import Skeleton

PLANNED_SHARE = 0.8  # of the free memory; the rest is for activations, which nobody knows before the first batch
_GIB = 2**30
_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


class Choice(NamedTuple):
    """A stage, and why it was taken."""

    stage: int
    reason: str


def choose_stage(
    kind: Callable[..., Any],
    config: ZeroConfig,
    groups: Sequence[dict[str, Any]],
    module: nn.Module | None,
    communicator: Communicator,
) -> Choice:
    """Return the lowest stage that fits, the same on all ranks. All ranks call; blocks. Takes no memory.

    Args:
        kind: zero_shard.AdamW.
        groups: Parameter groups as it has them.
        module: None: stage 3 is out of the question.
    """
    room_nbytes = _agreed_room(groups, module, communicator)
    usable = int(PLANNED_SHARE * room_nbytes)
    refused: list[str] = []
    highest = 2 if module is None else 3
    choice = Choice(highest, "")
    for stage in range(highest + 1):
        with communicator.errors_on_all_ranks("choosing a stage"):
            peak = _peak_nbytes(
                optimizer_maker(kind, config.replace(stage=stage), groups), groups, module, communicator
            )
        peak = int(communicator.agree(torch.tensor([peak]), "max", "the peak of a stage").item())
        if peak <= usable:
            below = f", that of stage {stage - 1} of {refused[-1]} does not" if refused else ""
            share = f"{PLANNED_SHARE:.0%} of the {_size(room_nbytes)} that a rank has"
            return Choice(stage, f"its peak of {_size(peak)} fits into {share}{below}")
        refused.append(_size(peak))
    choice = choice._replace(
        reason=f"the highest, whose peak of {refused[-1]} does not fit into {_size(usable)} either"
    )
    remedy = "pass module=model for stage 3, " if module is None else ""
    warnings.warn(
        f"stage='auto' took stage {highest}, {choice.reason}; {remedy}use more ranks, or state_dtype='int8'",
        stacklevel=4,
    )
    return choice


def _agreed_room(groups: Sequence[dict[str, Any]], module: nn.Module | None, communicator: Communicator) -> int:
    """Return what every rank has for its model: free memory by those who share it, and what the model takes now."""
    tensors = {id(each): each for each in _tensors_of(groups, module) if not each.is_meta}.values()
    device = next((each.device for each in tensors), _default_device())
    with communicator.errors_on_all_ranks("choosing a stage"):
        free_nbytes = free_nbytes_of(device)
    place = (socket.gethostname(), str(device))
    num_sharers = communicator.gather_objects(place, "who shares a device's memory").count(place)
    room = free_nbytes // num_sharers + sum(each.numel() * each.element_size() for each in tensors)
    return int(communicator.agree(torch.tensor([room]), "min", "the memory of the ranks").item())


def _peak_nbytes(
    make: Callable[..., Any], groups: Sequence[dict[str, Any]], module: nn.Module | None, communicator: Communicator
) -> int:
    skeleton = Skeleton(module, [param for group in groups for param in group["params"]])
    rehearsal = rehearse(make, skeleton, communicator.num_ranks, communicator.is_native, is_timed=False)
    return max(sum(phase.peak.values()) for phase in rehearsal.phases.values())


def free_nbytes_of(device: torch.device) -> int:
    """Return the bytes that are free on a GPU, or on this host under the limits of its control groups."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return max(min(_available_on_host(), *_left_in_cgroups()), 0)


def _available_on_host() -> int:
    with suppress(OSError):
        for line in (_PROC / "meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_in_cgroups() -> list[int]:
    """Return what is left of the limits of the control groups (version 1 or 2) that this process is in."""
    try:
        lines = (_PROC / "self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    left = [1 << 62]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUP, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = _CGROUP / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = root / path.lstrip("/")  # in a container the path may be the one outside; then only the root is there
        left += [
            each for place in (inner, *inner.parents) if root in (place, *place.parents) for each in _left(place, names)
        ]
    return left


def _left(place: Path, names: tuple[str, str, str]) -> Iterator[int]:
    """Yield what is left of the limit of one control group, if it has one; file caches count as free."""
    with suppress(OSError, ValueError):  # "max" is no number
        limit, used = (int((place / name).read_text(encoding="ascii")) for name in names[:2])
        stat = (place / "memory.stat").read_text(encoding="ascii").splitlines()
        yield limit - used + sum(int(line.split()[1]) for line in stat if line.startswith(f"{names[2]} "))


def _tensors_of(groups: Sequence[dict[str, Any]], module: nn.Module | None) -> Iterator[Tensor]:
    for group in groups:
        yield from group["params"]
    if module is not None:
        yield from module.parameters()
        yield from module.buffers()


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / 2**20:.1f} MiB"
