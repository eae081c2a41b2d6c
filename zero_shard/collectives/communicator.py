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
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_shard.collectives.agreements import Agreements
from zero_shard.collectives.groups import (
    ProcessGroup,
    Ranks,
    backends,
    control_group,
    group_of_mesh,
    has_world,
    name_of_host,
    rank_in,
    sub_group,
)
from zero_shard.collectives.pending import Hop, Pending, Received, announce, start
from zero_shard.fake_group import FakeGroup
from zero_shard.pages import on_large_pages
from zero_shard.topology import common_host_grid, shard_groups

_TAG_BASE = 0x5A0000  # keeps our messages apart from those a user sends with small tags
_TAGS_PER_OPTIMIZER = 1 << 20
_NUM_TAG_SPACES = 256
_num_built: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
_hosts: weakref.WeakKeyDictionary[ProcessGroup, list[str]] = weakref.WeakKeyDictionary()


_ALONE = Hop(None, 0, 1)


class Communicator(Agreements):
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
        num_steps: That are over.
    Raises:
        ValueError: This rank is not among them, or a mesh has other dimensions.
        RuntimeError: A launcher has started several processes, but there is no process group.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        if ranks is None and not has_world() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but there is no process group: every process would train "
                "a model of its own; call torch.distributed.init_process_group first"
            )
        if ranks is None and has_world():
            ranks = dist.group.WORLD
        self._rows: list[list[int]] | None = None  # shard groups of a mesh, as positions
        if isinstance(ranks, DeviceMesh):
            ranks, self._rows = group_of_mesh(ranks)
        process_group: ProcessGroup | None = ranks
        self.shard_size = None if self._rows is None else len(self._rows[0])
        if rank_in(process_group) < 0:
            raise ValueError("process_group does not contain this rank; build the optimizer on its members only")
        super().__init__(process_group, control_group(process_group), "the building of an optimizer")
        self.shards = self.replicas = _ALONE
        self.reduce_hops: list[Hop] = []
        self.num_inner_hops = 0
        self.sent_across_nbytes = 0
        self.sent_in_step = (0, 0)
        self.num_steps = 0
        self.number = self._next_number()
        self._native_devices = {device for device, backend in backends(process_group).items() if backend == "nccl"}

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
        return sub_group(self.group, [members[position] for position in positions], kind)

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
        for name in ("_first_tag", "_roll_call"):
            vars(copied).pop(name, None)
        copied.number = self._next_number()
        copied.end_step()
        copied.end_step()
        copied.num_steps = 0
        return copied

    def end_step(self) -> None:
        """Note that a step is over; the next one counts from zero. Local."""
        self.sent_in_step = (self.sent_nbytes, self.sent_across_nbytes)
        self.sent_nbytes = self.sent_across_nbytes = 0
        self.num_steps += 1

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
        self.name = f"optimizer {self.number}"
        vars(self).pop("_roll_call", None)
        self._first_tag = _TAG_BASE + self.number % _NUM_TAG_SPACES * _TAGS_PER_OPTIMIZER

    @cached_property
    def _first_tag(self) -> int:
        """Where this optimizer's tags begin. A copy, which is made without communication, asks all ranks here."""
        self.agree_on_number()
        return int(vars(self)["_first_tag"])

    def roll_call(self, label: str) -> None:
        """Return when every rank has come here, or raise RuntimeError with who has not. All ranks call."""
        assert self._first_tag >= 0  # a copy gets its number, and so its name, now
        super().roll_call(label)

    # ---- buckets -------------------------------------------------------------------------------------------

    def exchange(self, hop: Hop, full: Tensor, tag: int, label: str) -> tuple[Received, Pending]:
        """Start to bring the W slices of this rank's range together. All ranks of the hop call, same ``tag``.

        Args:
            full: [N] contributions of this rank, N a multiple of W; the others' part is read until the end of
                ``wait``, the own part is what ``Received.own`` is.
        Returns:
            Slices of N / W elements in the dtype of ``full``, and the handle.
        """
        announce(label, full.nbytes)
        numel = full.numel() // hop.num_ranks
        self._count(hop, numel * full.element_size())
        is_native = full.device.type in self._native_devices
        if is_native and full.dtype == torch.uint8:
            slices = full.new_empty(hop.num_ranks, numel)
            work = dist.all_to_all_single(slices.view(-1), full, group=hop.group, async_op=True)
            return Received(slices, None, 0), Pending(label, [work], [full, slices], is_native=True)
        if is_native:
            total = full.new_empty(1, numel)
            reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            work = reduce_scatter(total.view(-1), full, group=hop.group, async_op=True)
            return Received(total, None, 0), Pending(label, [work], [full], is_native=True)
        slices = on_large_pages(full.new_empty(hop.num_ranks - 1, numel))
        tag += self._first_tag
        pieces = full.view(hop.num_ranks, numel)
        peers = [peer for peer in range(hop.num_ranks) if peer != hop.rank]
        works = [
            start(label, dist.irecv, slices[row], group=hop.group, group_src=peer, tag=tag)
            for row, peer in enumerate(peers)
        ]
        works += [start(label, dist.isend, pieces[peer], group=hop.group, group_dst=peer, tag=tag) for peer in peers]
        return Received(slices, pieces[hop.rank], hop.rank), Pending(label, works, [full, slices], hop=hop)

    def all_gather_(self, hop: Hop, full: Tensor, tag: int, label: str) -> Pending:
        """Start to fill ``full`` [N] in place from the slices that the ranks of the hop own. All of them call.

        Where it takes two hops, the one inside the host starts when the other one is waited for.
        """
        if hop.num_ranks == 1:
            return Pending(label)
        announce(label, full.nbytes)
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
            start(label, dist.irecv, full[p * numel : (p + 1) * numel], group=hop.gathers, group_src=p, tag=tag)
            for p in peers
        ]
        works += [start(label, dist.isend, own, group=hop.gathers, group_dst=p, tag=tag) for p in peers]
        return Pending(label, works, [full], then=then, hop=hop)

    def _count(self, hop: Hop, nbytes: int) -> None:
        """Count a slice that goes to every other rank of a hop."""
        self.sent_nbytes += (hop.num_ranks - 1) * nbytes
        self.sent_across_nbytes += hop.num_remote * nbytes

    def broadcast_(self, tensor: Tensor, label: str) -> None:
        """Overwrite ``tensor`` on all ranks with that of rank 0; blocks. All ranks call."""
        if self.num_ranks == 1 or tensor.numel() == 0:
            return
        announce(label, tensor.nbytes)
        if self.rank == 0:
            self.sent_nbytes += tensor.numel() * tensor.element_size()
        Pending(label, [start(label, dist.broadcast, tensor, group=self.group, group_src=0, async_op=True)]).wait()

    def all_gather_small(self, values: Tensor, label: str) -> Tensor:
        """Return [W, n] from a small tensor [n] of each rank. All ranks call.

        Blocks, unless the group has native collectives for the tensor's device: then the device waits.
        """
        if self.num_ranks == 1:
            return values.view(1, -1)
        announce(label, values.nbytes)
        self.sent_nbytes += values.nbytes * (self.num_ranks - 1)
        is_native = values.device.type in self._native_devices
        sent = values if is_native or values.is_meta else values.cpu()
        gathered = torch.empty(self.num_ranks * values.numel(), dtype=values.dtype, device=sent.device)
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        group = self.group if is_native else self.control
        work = start(label, all_gather, gathered, sent, group=group, async_op=True)
        Pending(label, [work], [gathered, sent]).wait()
        return gathered.view(self.num_ranks, -1).to(values.device)
