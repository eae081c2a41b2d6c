"""The wire: the only file that calls torch.distributed. Counts the bytes that this rank sends.

# Note [Reduce-scatter on gloo]
gloo's own reduce_scatter is a clone plus an all-reduce: twice the traffic, sums rounded in the wire dtype, no
overlap. Instead each rank sends slice j of its bucket to rank j and receives W slices of its own range, which one
kernel then adds in rank order in fp32:

    rank 0   [a0 | a1]           rank 0 receives a0, b0  -> (a0 + b0) / W
    rank 1   [b0 | b1]           rank 1 receives a1, b1  -> (a1 + b1) / W

Messages are point to point and tagged by bucket, so that ranks whose hooks fire in another order still match.
On NCCL the native calls are used: in one node they run at the speed of the links, and they order themselves.
"""

from __future__ import annotations

import copy
import os
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

from zero_shard.roll_call import RollCall

ProcessGroup = dist.ProcessGroup

# Called with a label before each collective; tests set it to inject delays.
before_collective: Callable[[str], None] | None = None

DRAIN = "zero_shard drain"  # name of threads
_TAG_BASE = 0x5A0000  # keeps our messages apart from those a user sends with small tags
_TAGS_PER_OPTIMIZER = 1 << 20
_NUM_TAG_SPACES = 256
_num_built: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
_sub_groups: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = weakref.WeakKeyDictionary()
_control_groups: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
_background_groups: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
_ROLL_CALL_SHARE = 0.75  # of the time after which collectives give up


class Pending:
    """Communication that has been started; ``wait`` ends it. Keeps its tensors alive until then."""

    def __init__(
        self, label: str, works: Sequence[Any] = (), tensors: Sequence[Tensor] = (), is_native: bool = False
    ) -> None:
        self._label, self._works, self._tensors = label, list(works), list(tensors)
        self._is_native = is_native
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

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
        return True

    def __del__(self) -> None:
        # gloo wedges the connection if a buffer goes away before its message has come, as when an exception ends a
        # backward and everything is deleted. So somebody has to hold it until then.
        if self._works and not self._is_native and not sys.is_finalizing():
            threading.Thread(target=_drain, args=(self._works, self._tensors), name=DRAIN, daemon=True).start()

    def _finish(self) -> None:
        works, self._works = self._works, []
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._error = error


def _drain(works: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Wait for communication that nobody waits for any more; holds its tensors until then."""
    with suppress(RuntimeError):
        for work in works:
            work.wait()


class Hop(NamedTuple):
    """One group of ranks that reduce together, and the place of this rank in it."""

    group: ProcessGroup | None
    rank: int
    num_ranks: int


class Communicator:
    """The ranks of one optimizer: a shard group (who splits the state) and a replica group (who repeats it).

    Args:
        process_group: All ranks that train together; None = the default group, or a world of one without any.
        num_shards: Ranks per shard group S; W / S replicas. Ranks of a shard group are neighbours.
    Raises:
        ValueError: S does not divide the number of ranks W.
    """

    def __init__(self, process_group: ProcessGroup | None) -> None:
        if process_group is None and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but there is no process group: every process would train "
                "a model of its own; call torch.distributed.init_process_group first"
            )
        if process_group is None and dist.is_available() and dist.is_initialized():
            process_group = dist.group.WORLD
        self.group = process_group
        self.num_ranks = dist.get_world_size(process_group) if process_group is not None else 1
        self.rank = dist.get_rank(process_group) if process_group is not None else 0
        if self.rank < 0:
            raise ValueError("process_group does not contain this rank; build the optimizer on its members only")
        self.shards = Hop(process_group, self.rank, self.num_ranks)
        self.replicas = Hop(None, 0, 1)
        self.sent_nbytes = 0
        self.number = self._next_number()
        self._num_background = 0
        self._native_devices = {device for device, backend in _backends(process_group).items() if backend == "nccl"}
        self.control = _control_group(process_group)

    @classmethod
    def alone(cls) -> Communicator:
        """Return the communicator of a process that needs no other."""
        alone = cls.__new__(cls)
        alone.group = alone.control = None
        alone.rank, alone.num_ranks, alone.number, alone.sent_nbytes = 0, 1, 0, 0
        alone.shards = alone.replicas = Hop(None, 0, 1)
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

    def split(self, num_shards: int) -> None:
        """Form shard groups of ``num_shards`` neighbours and replica groups across them. All ranks call."""
        if self.num_ranks % num_shards:
            raise ValueError(f"shard_size must divide the {self.num_ranks} ranks, got {num_shards}")
        if num_shards == self.num_ranks:
            return
        shard_rank, replica = self.rank % num_shards, self.rank // num_shards
        if num_shards == 1:
            self.shards, self.replicas = Hop(None, 0, 1), Hop(self.group, self.rank, self.num_ranks)
            return
        assert self.group is not None
        members = dist.get_process_group_ranks(self.group)
        start, timeout = replica * num_shards, _timeout_of(self.group)
        shard_members, replica_members = members[start : start + num_shards], members[shard_rank::num_shards]
        shard_group = _sub_group(self.group, shard_members, timeout)
        replica_group = _sub_group(self.group, replica_members, timeout)
        self.shards = Hop(shard_group, shard_rank, num_shards)
        self.replicas = Hop(replica_group, replica, self.num_ranks // num_shards)

    def copy(self) -> Communicator:
        """Return a communicator over the same groups for another optimizer. Local."""
        copied = copy.copy(self)
        vars(copied).pop("_first_tag", None)
        copied.number, copied.sent_nbytes = self._next_number(), 0
        return copied

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
        self.sent_nbytes += (hop.num_ranks - 1) * numel * full.element_size()
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
        return slices, Pending(label, works, [full, slices])

    def all_gather_(self, hop: Hop, full: Tensor, tag: int, label: str) -> Pending:
        """Start to fill ``full`` [N] in place from the slices that the ranks of the hop own. All of them call."""
        if hop.num_ranks == 1:
            return Pending(label)
        _announce(label)
        numel = full.numel() // hop.num_ranks
        own = full[hop.rank * numel : (hop.rank + 1) * numel]
        self.sent_nbytes += (hop.num_ranks - 1) * numel * full.element_size()
        if full.device.type in self._native_devices:
            all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            work = all_gather(full, own, group=hop.group, async_op=True)
            return Pending(label, [work], [full], is_native=True)
        tag += self._first_tag
        peers = [peer for peer in range(hop.num_ranks) if peer != hop.rank]
        works = [
            _start(label, dist.irecv, full[p * numel : (p + 1) * numel], group=hop.group, group_src=p, tag=tag)
            for p in peers
        ]
        works += [_start(label, dist.isend, own, group=hop.group, group_dst=p, tag=tag) for p in peers]
        return Pending(label, works, [full])

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
        sent = values if is_native else values.cpu()
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
    pairs = (entry.partition(":") for entry in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def _sub_group(parent: ProcessGroup, members: list[int], timeout: timedelta) -> ProcessGroup:
    """Return a group of some ranks of ``parent``, made once and shared by all optimizers on it."""
    groups = _sub_groups.setdefault(parent, {})
    if tuple(members) not in groups:
        groups[tuple(members)] = dist.new_group(members, timeout=timeout, use_local_synchronization=True)
    return groups[tuple(members)]


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
