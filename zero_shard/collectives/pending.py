"""Communication that has been started, and the error that names who is missing when it does not end."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from zero_shard.collectives.groups import ProcessGroup, has_world
from zero_shard.phases import Phase

# Called with a label before each collective; tests set it to inject delays.
before_collective: Callable[[str], None] | None = None

# Called before and after a wait of the device and not of the host; a monitor sets it to put marks into the stream.
around_native_wait: Callable[[], None] | None = None

# Called with what has gone wrong when a peer is missing; returns what to add to the text of the error.
on_failure: Callable[[str], str] | None = None

DRAIN = "zero_shard drain"  # name of threads


_NUM_RECENT = 64


class Begun(NamedTuple):
    """A collective that this rank has begun.

    Attributes:
        number: Counts all collectives of this process.
        time_s: `time.perf_counter` at its beginning.
        nbytes: Of the tensor, on this rank; 0 where something else goes over the wire.
    """

    number: int
    time_s: float
    label: str
    nbytes: int


recent_collectives: deque[Begun] = deque(maxlen=_NUM_RECENT)
"""Those that were begun last, oldest first."""
_numbers = itertools.count()


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


class Received(NamedTuple):
    """What an exchange brings: slices of one range from W ranks, as ``reduce_slices_`` takes them.

    Attributes:
        slices: [K, n]: of the other W - 1 ranks in their order, the sum of all, K = 1, or (blocks of codes,
            which NCCL can't add) of all W ranks.
        own: [n], that of this rank, where it was flattened; None if it is in the sum.
        own_rank: Of this rank among the W.
    """

    slices: Tensor
    own: Tensor | None
    own_rank: int

    def in_order(self) -> list[Tensor]:
        """Return the slices in the order of ranks."""
        slices = list(self.slices)
        if self.own is not None:
            slices.insert(self.own_rank, self.own)
        return slices


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
            with Phase("wait", self._label):
                self._thread.join(patience_s)
            if self._thread.is_alive():
                return False
        elif self._works:
            with Phase("wait", self._label), _marked(self._is_native):
                self._finish()
        if self._error is not None:
            raise peer_missing(self._label, self._error) from self._error
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


@contextmanager
def _marked(is_native: bool) -> Iterator[None]:
    mark = around_native_wait if is_native else None
    if mark is not None:
        mark()
    yield
    if mark is not None:
        mark()


def _drain(works: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Wait for communication that nobody waits for any more; holds its tensors until then."""
    with suppress(RuntimeError):
        for work in works:
            work.wait()


def announce(label: str, nbytes: int = 0) -> None:
    """Note that a collective begins, of a tensor of so many bytes, and call the hook before it."""
    recent_collectives.append(Begun(next(_numbers), perf_counter(), label, nbytes))
    if before_collective is not None:
        before_collective(label)


def start(label: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start a collective; what it raises says what was waited for."""
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        raise peer_missing(label, error) from error


def peer_missing(label: str, error: Exception, missing: str = "") -> RuntimeError:
    """Return the error that says what this rank was waiting for, and who is missing as far as that is known."""
    lines = str(error).strip().splitlines() or [repr(error)]
    text = (
        f"zero_shard: rank {default_rank()} was waiting for {label}, but {f'{missing}; ' if missing else ''}a peer "
        f"failed or did not take part ({lines[0]}). "
        "Look at the first error on the other ranks: all ranks must run the same backward, step, save and gather calls."
    )
    return RuntimeError(with_report(text))


def with_report(text: str) -> str:
    """Return the text of an error, with where to find what every rank was doing."""
    return text if on_failure is None else text + on_failure(text)


def default_rank() -> int:
    """Return the rank of this process in the default group, 0 without one."""
    return dist.get_rank() if has_world() else 0
