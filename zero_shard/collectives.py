"""The wire: the only file that calls torch.distributed. Counts the bytes that this rank sends.

# Note [Reduce-scatter on gloo]
gloo's own reduce_scatter is a clone plus an all-reduce: twice the traffic, sums rounded in the wire dtype, no
overlap. Instead each rank sends slice j of its bucket to rank j and receives W slices of its own range, which one
kernel then adds in rank order in fp32:

    rank 0   [a0 | a1]           rank 0 receives a0, b0  -> (a0 + b0) / W
    rank 1   [b0 | b1]           rank 1 receives a1, b1  -> (a1 + b1) / W

Messages are point to point and tagged by bucket, so that ranks whose hooks fire in another order still match.
On NCCL the native calls are used: they run at the speed of the links, and their rings cross each link between hosts
once. The slices above would cross it once for every pair of ranks, so between hosts they take two hops: see Note [Two
hops] in ``topology.py``.
"""

from __future__ import annotations

import copy
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_shard.fake_group import FakeGroup
from zero_shard.roll_call import RollCall
from zero_shard.topology import common_host_grid, shard_groups

ProcessGroup = dist.ProcessGroup
Ranks = ProcessGroup | DeviceMesh  # that train together

# Called with a label before each collective; tests set it to inject delays.
before_collective: Callable[[str], None] | None = None

DRAIN = "zero_shard drain"  # name of threads
_TAG_BASE = 0x5A0000  # keeps our messages apart from those a user sends with small tags
_TAGS_PER_OPTIMIZER = 1 << 20
_NUM_TAG_SPACES = 256
_num_built: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
_sub_groups: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[Any, ...], ProcessGroup]] = weakref.WeakKeyDictionary()
_hosts: weakref.WeakKeyDictionary[ProcessGroup, list[str]] = weakref.WeakKeyDictionary()
_control_groups: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
_background_groups: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
_ROLL_CALL_SHARE = 0.75  # of the time after which collectives give up


class Pending:
    """Communication that has been started; ``wait`` ends it. Keeps its tensors alive until then.

    Args:
        label: What is waited for.
        works: Handles of torch; with ``hop``, first those of a message from every other rank, ascending.
        tensors: That are read or written meanwhile.
        is_native: The wait does not block the host.
        then: Starts a second hop, whose end is waited for, too.
        hop: Whose ranks send.
    """

    def __init__(
        self,
        label: str,
        works: Sequence[Any] = (),
        tensors: Sequence[Tensor] = (),
        is_native: bool = False,
        then: Callable[[], Pending] | None = None,
        hop: Hop | None = None,
    ) -> None:
        self._label, self._works, self._tensors = label, list(works), list(tensors)
        self._is_native, self._then, self._hop = is_native, then, hop
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._second_hop: Pending | None = None

    def wait(self, patience_s: float | None = None) -> bool:
        """Block until done (on a GPU: make the current stream wait), or until patience ends; return whether it is done.

        Raises:
            RuntimeError: A peer failed or did not take part in time; the text names what was waited for.
        """
        # NCCL's wait does not block the host; it must run here, as it makes this thread's stream wait.
        if patience_s is not None and self._thread is None and self._works and not self._is_native:
            # gloo's own wait with a time limit would close the connection when it is reached.
            self._thread = threading.Thread(target=self._finish, daemon=True)
            self._thread.start()
        if self._thread is not None:
            self._thread.join(patience_s)
            if self._thread.is_alive():
                return False
        else:
            self._finish()
        if self._error is not None:
            raise _peer_missing(self._label, self._error) from self._error
        self._tensors = []
        if self._then is not None:
            then, self._then = self._then, None
            self._second_hop = then()
        return self._second_hop is None or self._second_hop.wait(patience_s)

    def __del__(self) -> None:
        # gloo wedges the connection if a buffer goes away before its message has come, as when an exception ends a
        # backward and everything is deleted. So somebody has to hold it until then.
        if self._works and not self._is_native and not sys.is_finalizing():
            threading.Thread(target=_drain, args=(self._works, self._tensors), name=DRAIN, daemon=True).start()

    def _finish(self) -> None:
        works, self._works = self._works, []
        for number, work in enumerate(works):
            try:
                work.wait()
            except RuntimeError as error:
                self._error = error
                self._label += self._sender_of(number)
                return

    def _sender_of(self, number: int) -> str:
        """Return in words whose message a work has waited for."""
        hop = self._hop
        if hop is None or hop.group is None or number >= hop.num_ranks - 1:
            return ""
        return f" from rank {dist.get_global_rank(hop.group, number + (number >= hop.rank))}"


def _drain(works: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Wait for communication that nobody waits for any more; holds its tensors until then."""
    with suppress(RuntimeError):
        for work in works:
            work.wait()


class Hop(NamedTuple):
    """One group of ranks that reduce or gather together, and the place of this rank in it.

    Attributes:
        group: That reductions go over.
        rank: The range that this rank owns of what is reduced or gathered.
        num_ranks: W.
        gathers: The group that gathers go over: on NCCL one of its own, since ranks may start gathers and reductions in
            different orders, and everything in one group has to be in the same.
        num_remote: How many of the ranks are on other hosts.
        levels: Where it takes two hops, the one inside this host and the one across hosts; then it has no groups.
    """

    group: ProcessGroup | None
    rank: int
    num_ranks: int
    gathers: ProcessGroup | None = None
    num_remote: int = 0
    levels: tuple[Hop, ...] = ()


_ALONE = Hop(None, 0, 1)


class Communicator:
    """The ranks of one optimizer: a shard group (who splits the state) and a replica group (who repeats it).

    Args:
        ranks: All ranks that train together: a process group or a device mesh; None = the default group, or a world
            of one without any. A mesh of two dimensions says which ranks are replicas (first) and which share one copy.
    Attributes:
        shard_size: What a mesh of two dimensions says it is; None without one.
        reduce_hops: Of a gradient, in order: inside the shard group, then across replicas. Set by `split`.
        num_inner_hops: How many of them are inside the shard group.
        sent_nbytes, sent_across_nbytes: By this rank since the last step; of them to ranks on other hosts.
        sent_in_step: The same from the last step but one to the last step.
    Raises:
        ValueError: This rank is not among them, or a mesh has other dimensions.
        RuntimeError: A launcher has started several processes, but there is no process group.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        if ranks is None and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but there is no process group: every process would train "
                "a model of its own; call torch.distributed.init_process_group first"
            )
        if ranks is None and dist.is_available() and dist.is_initialized():
            ranks = dist.group.WORLD
        self._rows: list[list[int]] | None = None  # shard groups of a mesh, as positions
        if isinstance(ranks, DeviceMesh):
            ranks, self._rows = _group_of_mesh(ranks)
        process_group: ProcessGroup | None = ranks
        self.shard_size = None if self._rows is None else len(self._rows[0])
        self.group: ProcessGroup | None = process_group
        self.num_ranks = dist.get_world_size(process_group) if process_group is not None else 1
        self.rank = _rank_in(process_group)
        if self.rank < 0:
            raise ValueError("process_group does not contain this rank; build the optimizer on its members only")
        self.shards = self.replicas = _ALONE
        self.reduce_hops: list[Hop] = []
        self.num_inner_hops = 0
        self.sent_nbytes = self.sent_across_nbytes = 0
        self.sent_in_step = (0, 0)
        self.number = self._next_number()
        self._num_background = 0
        self._native_devices = {device for device, backend in _backends(process_group).items() if backend == "nccl"}
        self.control = _control_group(process_group)

    @classmethod
    def alone(cls) -> Communicator:
        """Return the communicator of a process that needs no other."""
        alone = cls.__new__(cls)
        alone.group = alone.control = None
        alone.rank, alone.num_ranks, alone.number = 0, 1, 0
        alone.sent_nbytes = alone.sent_across_nbytes = 0
        alone.shards = alone.replicas = _ALONE
        return alone

    @cached_property
    def _roll_call(self) -> RollCall:
        return self._new_roll_call("roll call")

    def _new_roll_call(self, name: str) -> RollCall:
        get_store = getattr(self.control, "get_group_store", None)
        store = get_store() if get_store is not None and self.num_ranks > 1 else None
        return RollCall(store, self.rank, self.num_ranks, f"zero_shard/{name} {self.number}")

    def roll_call(self, label: str) -> None:
        """Return when every rank has come here. All ranks call.

        Raises:
            RuntimeError: Some rank has not come in time, by number: well before the collectives give up.
        """
        if self.control is not None:
            self._roll_call.take(label, _ROLL_CALL_SHARE * _timeout_of(self.control).total_seconds())

    def in_background(self) -> Communicator:
        """Return what another thread may use for agreements, meanwhile. All ranks call; the first time blocks."""
        copied = copy.copy(self)
        vars(copied).pop("_roll_call", None)
        if self.group is not None and self.num_ranks > 1:
            if self.group not in _background_groups:
                _background_groups[self.group] = _gloo_group(self.group)
            copied.control = _background_groups[self.group]
            self._num_background += 1
            vars(copied)["_roll_call"] = copied._new_roll_call(f"background {self._num_background}")
        return copied

    @property
    def is_rehearsing(self) -> bool:
        """Whether there is no other process: a dry run on the meta device."""
        return isinstance(self.group, FakeGroup)

    @property
    def is_native(self) -> bool:
        """Whether the backend reduces and gathers by itself (NCCL)."""
        return bool(self._native_devices)

    def split(self, num_shards: int) -> None:
        """Form shard groups of ``num_shards`` neighbours and replica groups across them. All ranks call.

        Raises:
            ValueError: It does not divide the number of ranks.
        """
        if self.num_ranks % num_shards:
            raise ValueError(f"shard_size must divide the {self.num_ranks} ranks, got {num_shards}")
        if self.num_ranks == 1:
            return
        hosts = self._hosts_of_ranks()
        rows = self._rows if num_shards == self.shard_size else None
        rows = rows or shard_groups(self.num_ranks, num_shards)
        columns = [list(column) for column in zip(*rows, strict=True)]
        self.shards = self._hop(rows, hosts)
        self.replicas = self._hop(columns, hosts)
        inner, outer = ([*(hop.levels or (hop,))] * (hop.num_ranks > 1) for hop in (self.shards, self.replicas))
        self.reduce_hops, self.num_inner_hops = [*inner, *outer], len(inner)

    def _hop(self, groups: Sequence[Sequence[int]], hosts: Sequence[str]) -> Hop:
        """Return the hop over the one of these groups (of positions) that has this rank. All ranks call."""
        groups = [sorted(group) for group in groups]  # as the ranks of a process group are
        own = next(group for group in groups if self.rank in group)
        if len(own) == 1:
            return _ALONE
        num_remote = sum(hosts[position] != hosts[self.rank] for position in own)
        grid = None if self._native_devices else common_host_grid([[hosts[p] for p in group] for group in groups])
        if grid is None:
            group, gathers = self._sub_group(own), None
            if self._native_devices:
                gathers = self._sub_group(own, "gathers")
            return Hop(group, own.index(self.rank), len(own), gathers or group, num_remote)
        inside = [[group[place] for place in row] for group in groups for row in grid]
        across = [[group[place] for place in column] for group in groups for column in zip(*grid, strict=True)]
        levels = (self._hop(inside, hosts), self._hop(across, hosts))
        rank = levels[0].rank * levels[1].num_ranks + levels[1].rank
        return Hop(None, rank, len(own), None, num_remote, levels)

    def _sub_group(self, positions: Sequence[int], kind: str = "") -> ProcessGroup:
        assert self.group is not None
        if len(positions) == self.num_ranks and not kind:
            return self.group
        if isinstance(self.group, FakeGroup):
            return self.group.part(positions)
        members = dist.get_process_group_ranks(self.group)
        return _sub_group(self.group, [members[position] for position in positions], kind)

    def _hosts_of_ranks(self) -> list[str]:
        """Return the host of each rank. All ranks call; blocks the first time."""
        assert self.group is not None
        if isinstance(self.group, FakeGroup):
            return self.group.hosts
        if self.group not in _hosts:
            _hosts[self.group] = self.gather_objects(name_of_host(), "the hosts of the ranks")
        return _hosts[self.group]

    def copy(self) -> Communicator:
        """Return a communicator over the same groups for another optimizer. Local."""
        copied = copy.copy(self)
        vars(copied).pop("_first_tag", None)
        copied.number = self._next_number()
        copied.end_step()
        copied.end_step()
        return copied

    def end_step(self) -> None:
        """Note that a step is over; the next one counts from zero. Local."""
        self.sent_in_step = (self.sent_nbytes, self.sent_across_nbytes)
        self.sent_nbytes = self.sent_across_nbytes = 0

    def _next_number(self) -> int:
        """Number the optimizers on one group in the order in which this rank made them."""
        number = 0 if self.group is None else _num_built.get(self.group, 0)
        if self.group is not None:
            _num_built[self.group] = number + 1
        return number

    def agree_on_number(self) -> None:
        """Have the same number on all ranks, some of which may have copied more optimizers. All ranks call; blocks."""
        self.number = int(self.agree(torch.tensor([self.number]), "max", "the number of the optimizer").item())
        if self.group is not None:
            _num_built[self.group] = max(_num_built[self.group], self.number + 1)
        vars(self).pop("_roll_call", None)
        self._first_tag = _TAG_BASE + self.number % _NUM_TAG_SPACES * _TAGS_PER_OPTIMIZER

    @cached_property
    def _first_tag(self) -> int:
        """Where this optimizer's tags begin. A copy, which is made without communication, asks all ranks here."""
        self.agree_on_number()
        return int(vars(self)["_first_tag"])

    # ---- buckets -------------------------------------------------------------------------------------------

    def exchange(self, hop: Hop, full: Tensor, tag: int, label: str) -> tuple[Tensor, Pending]:
        """Start to bring the W slices of this rank's range together. All ranks of the hop call, same ``tag``.

        Args:
            full: [N] contributions of this rank, N a multiple of W; read until the end of ``wait``.
        Returns:
            Slices [K, N / W] in the dtype of ``full`` and the handle. K = W in rank order, or 1 where the
            backend has added them up already (NCCL).
        """
        _announce(label)
        numel = full.numel() // hop.num_ranks
        self._count(hop, numel * full.element_size())
        if full.device.type in self._native_devices:
            total = full.new_empty(1, numel)
            reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            work = reduce_scatter(total.view(-1), full, group=hop.group, async_op=True)
            return total, Pending(label, [work], [full], is_native=True)
        slices = full.new_empty(hop.num_ranks, numel)
        tag += self._first_tag
        works = [
            _start(label, dist.irecv, slices[peer], group=hop.group, group_src=peer, tag=tag)
            for peer in range(hop.num_ranks)
            if peer != hop.rank
        ]
        for peer in range(hop.num_ranks):
            piece = full[peer * numel : (peer + 1) * numel]
            if peer == hop.rank:
                slices[peer].copy_(piece)
            else:
                works.append(_start(label, dist.isend, piece, group=hop.group, group_dst=peer, tag=tag))
        return slices, Pending(label, works, [full, slices], hop=hop)

    def all_gather_(self, hop: Hop, full: Tensor, tag: int, label: str) -> Pending:
        """Start to fill ``full`` [N] in place from the slices that the ranks of the hop own. All of them call.

        Where it takes two hops, the one inside the host starts when the other one is waited for.
        """
        if hop.num_ranks == 1:
            return Pending(label)
        _announce(label)
        if not hop.levels:
            return self._gather(hop, full, tag, label)
        inside, across = hop.levels
        numel = full.numel() // inside.num_ranks
        region = full[inside.rank * numel : (inside.rank + 1) * numel]
        return self._gather(across, region, tag, label, then=lambda: self._gather(inside, full, tag, label))

    def _gather(
        self, hop: Hop, full: Tensor, tag: int, label: str, then: Callable[[], Pending] | None = None
    ) -> Pending:
        numel = full.numel() // hop.num_ranks
        own = full[hop.rank * numel : (hop.rank + 1) * numel]
        self._count(hop, numel * full.element_size())
        if full.device.type in self._native_devices:
            all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            work = all_gather(full, own, group=hop.gathers, async_op=True)
            return Pending(label, [work], [full], is_native=True)
        tag += self._first_tag
        peers = [peer for peer in range(hop.num_ranks) if peer != hop.rank]
        works = [
            _start(label, dist.irecv, full[p * numel : (p + 1) * numel], group=hop.gathers, group_src=p, tag=tag)
            for p in peers
        ]
        works += [_start(label, dist.isend, own, group=hop.gathers, group_dst=p, tag=tag) for p in peers]
        return Pending(label, works, [full], then=then, hop=hop)

    def _count(self, hop: Hop, nbytes: int) -> None:
        """Count a slice that goes to every other rank of a hop."""
        self.sent_nbytes += (hop.num_ranks - 1) * nbytes
        self.sent_across_nbytes += hop.num_remote * nbytes

    def broadcast_(self, tensor: Tensor, label: str) -> None:
        """Overwrite ``tensor`` on all ranks with that of rank 0; blocks. All ranks call."""
        if self.num_ranks == 1 or tensor.numel() == 0:
            return
        _announce(label)
        if self.rank == 0:
            self.sent_nbytes += tensor.numel() * tensor.element_size()
        Pending(label, [_start(label, dist.broadcast, tensor, group=self.group, group_src=0, async_op=True)]).wait()

    # ---- small agreements between hosts --------------------------------------------------------------------

    def agree(self, values: Tensor, op: str, label: str) -> Tensor:
        """Return the elementwise "min", "max" or "sum" of a small CPU tensor over all ranks; blocks. All call."""
        if self.num_ranks == 1:
            return values
        _announce(label)
        self.sent_nbytes += 2 * values.numel() * values.element_size() * (self.num_ranks - 1) // self.num_ranks
        reduce_op = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}[op]
        work = _start(label, dist.all_reduce, values, op=reduce_op, group=self.control, async_op=True)
        Pending(label, [work], [values]).wait()
        return values

    def gather_objects(self, value: Any, label: str) -> list[Any]:
        """Return the ``value`` of every rank, in rank order, on every rank; blocks. Only for start-up and errors."""
        if self.num_ranks == 1:
            return [value]
        _announce(label)
        if isinstance(self.group, FakeGroup):
            return [value] * self.num_ranks
        values: list[Any] = [None] * self.num_ranks
        try:
            dist.all_gather_object(values, value, group=self.control)
        except RuntimeError as error:
            raise _peer_missing(label, error, self._roll_call.describe_missing()) from error
        return values

    def gather_to_first(self, value: Any, label: str) -> list[Any]:
        """Return the ``value`` of every rank, in rank order, on rank 0, [] elsewhere; blocks. All ranks call."""
        if self.num_ranks == 1:
            return [value]
        _announce(label)
        values: list[Any] | None = [None] * self.num_ranks if self.rank == 0 else None
        try:
            dist.gather_object(value, values, group=self.control, group_dst=0)
        except RuntimeError as error:
            raise _peer_missing(label, error, self._roll_call.describe_missing()) from error
        return values or []

    @contextmanager
    def errors_on_all_ranks(self, label: str) -> Iterator[None]:
        """Run the body on each rank; if it raises on one, raise on all of them. All ranks call; blocks at the end."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # re-raised once the other ranks know
            error = raised
        text = "" if error is None else f"{type(error).__name__}: {error}"
        texts = self.gather_objects(text, label)
        if error is not None:
            raise error
        for rank, message in enumerate(texts):
            if message:
                raise RuntimeError(f"{label} failed on rank {rank}: {message}")

    def all_gather_small(self, values: Tensor, label: str) -> Tensor:
        """Return [W, n] from a small tensor [n] of each rank. All ranks call.

        Blocks, unless the group has native collectives for the tensor's device: then the device waits.
        """
        if self.num_ranks == 1:
            return values.view(1, -1)
        _announce(label)
        self.sent_nbytes += values.nbytes * (self.num_ranks - 1)
        is_native = values.device.type in self._native_devices
        sent = values if is_native or values.is_meta else values.cpu()
        gathered = torch.empty(self.num_ranks * values.numel(), dtype=values.dtype, device=sent.device)
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        group = self.group if is_native else self.control
        work = _start(label, all_gather, gathered, sent, group=group, async_op=True)
        Pending(label, [work], [gathered, sent]).wait()
        return gathered.view(self.num_ranks, -1).to(values.device)


def default_rank() -> int:
    """Return the rank of this process in the default group, 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _backends(group: ProcessGroup | None) -> dict[str, str]:
    """Return the backend of a group for each kind of device, as in "cpu:gloo,cuda:nccl"."""
    if group is None:
        return {}
    if isinstance(group, FakeGroup):
        return group.backends
    pairs = (entry.partition(":") for entry in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def _rank_in(group: ProcessGroup | None) -> int:
    if group is None:
        return 0
    return group.rank() if isinstance(group, FakeGroup) else dist.get_rank(group)


def name_of_host() -> str:
    """Return what the ranks of one host have in common; under torchrun its agents count as hosts."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def _group_of_mesh(mesh: DeviceMesh) -> tuple[ProcessGroup, list[list[int]] | None]:
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
    group = world if is_whole else _sub_group(world, members)
    return group, [sorted(members.index(rank) for rank in row) for row in mesh.mesh.tolist()]


def _sub_group(parent: ProcessGroup, members: list[int], kind: str = "") -> ProcessGroup:
    """Return a group of some ranks of ``parent``, made once and shared by all optimizers on it.

    Args:
        kind: What goes over it, if not everything.
    """
    groups, key = _sub_groups.setdefault(parent, {}), (kind, *members)
    if key not in groups:
        groups[key] = dist.new_group(members, timeout=_timeout_of(parent), use_local_synchronization=True)
    return groups[key]


def _timeout_of(group: ProcessGroup) -> timedelta:
    """Return the time after which collectives of a group give up."""
    device = next(iter(_backends(group)))
    return group._get_backend(torch.device(device)).options._timeout


def _control_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """A group whose CPU tensors go over gloo: hosts agree on small facts without waiting for the device."""
    if group is None or _backends(group).get("cpu") == "gloo":
        return group
    if group not in _control_groups:
        _control_groups[group] = _gloo_group(group)
    return _control_groups[group]


def _gloo_group(group: ProcessGroup) -> ProcessGroup:
    """Return a new group of the same ranks whose CPU tensors go over gloo."""
    made: ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=_timeout_of(group),
        backend="gloo",
        use_local_synchronization=True,
    )
    return made


def _announce(label: str) -> None:
    if before_collective is not None:
        before_collective(label)


def _start(label: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        raise _peer_missing(label, error) from error


def _peer_missing(label: str, error: Exception, missing: str = "") -> RuntimeError:
    lines = str(error).strip().splitlines() or [repr(error)]
    return RuntimeError(
        f"zero_shard: rank {default_rank()} was waiting for {label}, but {f'{missing}; ' if missing else ''}a peer "
        f"failed or did not take part ({lines[0]}). "
        "Look at the first error on the other ranks: all ranks must run the same backward, step, save and gather calls."
    )
