"""Process groups: of a mesh, of some ranks, and over gloo, each made once and shared by all optimizers."""

from __future__ import annotations

import os
import socket
import weakref
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_shard.fake_group import FakeGroup

ProcessGroup = dist.ProcessGroup
Ranks = ProcessGroup | DeviceMesh  # that train together

_sub_groups: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[Any, ...], ProcessGroup]] = weakref.WeakKeyDictionary()
_control_groups: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
_background_groups: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()


def backends(group: ProcessGroup | None) -> dict[str, str]:
    """Return the backend of a group for each kind of device, as in "cpu:gloo,cuda:nccl"."""
    if group is None:
        return {}
    if isinstance(group, FakeGroup):
        return group.backends
    pairs = (entry.partition(":") for entry in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


class World(NamedTuple):
    """The default group, or this process alone.

    Attributes:
        store: Of the group; None without one, or where torch does not tell.
    """

    group: ProcessGroup | None
    rank: int
    num_ranks: int
    store: Any


def has_world() -> bool:
    """Whether there is a default group; a torch that was built without ``torch.distributed`` has none."""
    return dist.is_available() and dist.is_initialized()


def world() -> World:
    """Return the group of all processes. Local."""
    if not has_world():
        return World(None, 0, 1, None)
    group = dist.group.WORLD
    get_store = getattr(group, "get_group_store", None)
    return World(group, dist.get_rank(), dist.get_world_size(), get_store() if get_store is not None else None)


def rank_in(group: ProcessGroup | None) -> int:
    """Return the rank of this process in a group, 0 without one."""
    if group is None:
        return 0
    return group.rank() if isinstance(group, FakeGroup) else dist.get_rank(group)


def name_of_host() -> str:
    """Return what the ranks of one host have in common; under torchrun its agents count as hosts."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def group_of_mesh(mesh: DeviceMesh) -> tuple[ProcessGroup, list[list[int]] | None]:
    """Return the group of all ranks of a mesh and, if it has two dimensions, its shard groups, as positions in it.

    All ranks of the mesh call, each with the part of a larger mesh that it belongs to.
    """
    names, shape = mesh.mesh_dim_names, tuple(mesh.mesh.shape)
    if mesh.get_coordinate() is None:
        raise ValueError("process_group does not contain this rank; build the optimizer on its members only")
    if len(shape) == 1:
        return mesh.get_group(), None
    is_named = names is not None and not ("replicate" in names[0] and "shard" in names[-1])
    if len(shape) != 2 or is_named:
        dimensions = (
            ", ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True)) if names else str(shape)
        )
        example = f"mesh[{names[0]!r}]" if names else "one made with mesh_dim_names"
        raise ValueError(
            f"process_group got a device mesh with the dimensions {dimensions}, expected one dimension of the ranks "
            f"that train together on different data, or two: (replicate, shard). Pass a part of it, such as {example}"
        )
    members, world = sorted(mesh.mesh.flatten().tolist()), dist.group.WORLD
    assert world is not None
    is_whole = len(members) == dist.get_world_size(world)
    group = world if is_whole else sub_group(world, members)
    return group, [sorted(members.index(rank) for rank in row) for row in mesh.mesh.tolist()]


def sub_group(parent: ProcessGroup, members: list[int], kind: str = "") -> ProcessGroup:
    """Return a group of some ranks of ``parent``, made once and shared by all optimizers on it.

    Args:
        kind: What goes over it, if not everything.
    """
    groups, key = _sub_groups.setdefault(parent, {}), (kind, *members)
    if key not in groups:
        groups[key] = dist.new_group(members, timeout=timeout_of(parent), use_local_synchronization=True)
    return groups[key]


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return the time after which collectives of a group give up."""
    device = next(iter(backends(group)))
    return group._get_backend(torch.device(device)).options._timeout


def control_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """A group whose CPU tensors go over gloo: hosts agree on small facts without waiting for the device."""
    if group is None or backends(group).get("cpu") == "gloo":
        return group
    if group not in _control_groups:
        _control_groups[group] = gloo_group(group)
    return _control_groups[group]


def gloo_group(group: ProcessGroup) -> ProcessGroup:
    """Return a new group of the same ranks whose CPU tensors go over gloo."""
    made: ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout_of(group),
        backend="gloo",
        use_local_synchronization=True,
    )
    return made


def background_group(group: ProcessGroup) -> ProcessGroup:
    """Return a group over gloo for a thread beside the main one. All ranks call; blocks the first time."""
    if group not in _background_groups:
        _background_groups[group] = gloo_group(group)
    return _background_groups[group]
