"""A process group of any size without any other process: its collectives note what they would send, and return.

The real ``torch.distributed`` functions call it, so that all code above them runs as it is. What a rank would receive
is what it sent itself: its peers agree with it on everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch import distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
else:  # a torch that was built without process groups has stubs of some
    ProcessGroup, Work = dist.ProcessGroup, getattr(dist, "Work", object)


class Message(NamedTuple):
    """One call of a collective, as one rank sees it.

    Attributes:
        kind: "send", "all_to_all", "all_gather", "reduce_scatter", "all_reduce", "broadcast".
        members: Ranks that take part, of those of the outermost group.
        sent_nbytes: That this rank sends, by an algorithm that sends no more than it must.
        num_steps: Messages that this rank sends one after the other in a ring; 1 for a send.
        is_host: Of a tensor on the CPU beside those of the model: hosts agree on something.
    """

    kind: str
    members: range
    sent_nbytes: int
    num_steps: int
    is_host: bool


class FakeGroup(ProcessGroup):
    """Stands for ``num_ranks`` ranks, of which this process plays rank 0.

    Args:
        num_ranks: How many.
        is_native: Collectives on tensors as NCCL has them; False: as gloo has them.
        ranks_per_node: Consecutive ranks that share a node.
        members: For parts of another group: which of its ranks.
        messages: For parts of another group: its list.
    """

    def __init__(
        self,
        num_ranks: int,
        is_native: bool = True,
        ranks_per_node: int = 8,
        members: range | None = None,
        messages: list[Message] | None = None,
    ) -> None:
        if not dist.is_available():
            raise RuntimeError("this torch was built without torch.distributed, which a plan runs; install one with it")
        super().__init__(0, num_ranks)  # type: ignore[call-arg]
        self.members = range(num_ranks) if members is None else members
        self.messages: list[Message] = [] if messages is None else messages
        self.is_native, self._ranks_per_node = is_native, ranks_per_node
        self.hosts = [f"node {rank // ranks_per_node}" for rank in self.members]
        self.backends = {"cpu": "gloo", "meta": "nccl" if is_native else "gloo"}

    def part(self, members: Sequence[int]) -> FakeGroup:
        """Return the group of some of the ranks, equally spaced, this one first among them."""
        step = members[1] - members[0] if len(members) > 1 else 1
        return FakeGroup(
            len(members), self.is_native, self._ranks_per_node, range(members[0], members[-1] + 1, step), self.messages
        )

    def _note(self, kind: str, tensor: Tensor, sent_nbytes: int, num_steps: int) -> Work:
        self.messages.append(Message(kind, self.members, sent_nbytes, num_steps, tensor.is_cpu))
        return _Done()

    # ---- what torch.distributed calls ----------------------------------------------------------------------

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Note a message."""
        return self._note("send", tensors[0], tensors[0].nbytes, 1)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Do nothing: what is received costs who sends it."""
        return _Done()

    def all_gather_single(self, full: Tensor, own: Tensor, *_: Any) -> Work:
        """Note that a ring passes every other slice on; small tensors on the CPU are filled with the own one."""
        if full.is_cpu:
            full.view(self.size(), -1).copy_(own.view(1, -1))
        return self._note("all_gather", own, (self.size() - 1) * own.nbytes, self.size() - 1)

    _allgather_base = all_gather_single  # type: ignore[assignment] # before torch 2.13

    def reduce_scatter_single(self, own: Tensor, full: Tensor, *_: Any) -> Work:
        """Note that a ring passes every other slice on."""
        return self._note("reduce_scatter", own, (self.size() - 1) * own.nbytes, self.size() - 1)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def all_to_all_single(self, received: Tensor, sent: Tensor, *_: Any) -> Work:
        """Note a message to every other rank, all at once."""
        return self._note("all_to_all", sent, sent.nbytes // self.size() * (self.size() - 1), 1)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def allreduce(self, tensors: list[Tensor], *_: Any) -> Work:  # type: ignore[override]
        """Note a reduce-scatter and an all-gather."""
        num_peers = self.size() - 1
        return self._note("all_reduce", tensors[0], 2 * tensors[0].nbytes * num_peers // self.size(), 2 * num_peers)

    def broadcast(self, tensors: list[Tensor], *_: Any) -> Work:  # type: ignore[override]
        """Note that rank 0 sends once, in a chain."""
        return self._note("broadcast", tensors[0], tensors[0].nbytes, 1)


class _Done(Work):
    """Communication that is over."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True
