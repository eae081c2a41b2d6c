"""What a message takes: an alpha-beta model of the links within a node and between nodes, assumed or measured.

    seconds = alpha * messages one after the other  +  bytes / beta

A collective is a ring over its ranks, as NCCL's are for large messages: W - 1 steps, of which (nodes - 1) cross nodes.
All bytes cross each border between nodes once, over the links of all ranks of the node that take part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from zero_shard.collectives import Communicator, Hop, ProcessGroup
from zero_shard.fake_group import Message

_FIT_NBYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 23)
_NUM_REPEATS = 7
_SMALLEST_ALPHA_S = 1e-8


@dataclass(frozen=True)
class Link:
    """One direction of a link of one rank.

    Attributes:
        alpha_s: Seconds before the first byte arrives.
        bytes_per_s: Bandwidth once it flows, beta.
    """

    alpha_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Links:
    """The links of a cluster. The defaults are assumptions: H100 nodes, 80 % of what the makers say.

    Attributes:
        within: Between ranks of one node: NVLink 4, 450 GB/s.
        between: Between nodes, the share of one rank: an adapter of 400 Gb/s for each GPU.
        host: For the small agreements of hosts, over gloo and TCP.
    """

    within: Link = Link(5e-6, 360e9)
    between: Link = Link(15e-6, 40e9)
    host: Link = Link(25e-6, 1e9)

    def seconds(self, message: Message, ranks_per_node: int) -> float:
        """Return how long a message takes, as if nothing else were under way."""
        if message.is_host:
            return message.num_steps * self.host.alpha_s + message.sent_nbytes / self.host.bytes_per_s
        sizes = [len(list(ranks)) for _, ranks in groupby(message.members, lambda rank: rank // ranks_per_node)]
        num_ranks, num_crossings = len(message.members), len(sizes) - 1
        if num_crossings == 0:
            return message.num_steps * self.within.alpha_s + message.sent_nbytes / self.within.bytes_per_s
        share = num_crossings / (num_ranks - 1)  # of the steps, or of the peers that a message may go to
        if message.kind in ("send", "all_to_all"):
            num_away = (num_ranks - sizes[0]) / (num_ranks - 1)
            ways = ((1 - num_away, self.within), (num_away, self.between))
            return sum(part * (link.alpha_s + message.sent_nbytes / link.bytes_per_s) for part, link in ways)
        alpha_s = share * self.between.alpha_s + (1 - share) * self.within.alpha_s
        bandwidth = min(self.within.bytes_per_s, min(sizes) * self.between.bytes_per_s)
        return message.num_steps * alpha_s + message.sent_nbytes / bandwidth


def fit_links(
    process_group: ProcessGroup | None = None,
    ranks_per_node: int | None = None,
    device: torch.device | str = "cpu",
) -> Links:
    """Measure all-gathers of several sizes on the ranks that are here, and fit alpha and beta. All ranks call; blocks.

    Args:
        process_group: None = the default group.
        ranks_per_node: Consecutive ranks that share a node; None = all of them. What can't be measured (between nodes
            on one node, hosts) is taken from the links that were, where they are slower than the defaults.
        device: Where the tensors live that are sent: "cuda" for NCCL.
    Raises:
        ValueError: There is one rank only, or ``ranks_per_node`` does not divide the ranks.
    """
    ranks = Communicator(process_group)
    if ranks.num_ranks == 1:
        raise ValueError("fit_links needs at least two ranks, got a world of one; run it under torchrun")
    if ranks_per_node is not None and (ranks_per_node < 1 or ranks.num_ranks % ranks_per_node):
        raise ValueError(f"ranks_per_node must divide the {ranks.num_ranks} ranks, got {ranks_per_node}")
    ranks.agree_on_number()
    ranks.split(ranks_per_node or ranks.num_ranks)
    assumed = Links()
    host = _fit(_time_host(ranks))
    within = _fit(_time_gathers(ranks, ranks.shards, torch.device(device))) if ranks.shards.num_ranks > 1 else None
    between = _fit(_time_gathers(ranks, ranks.replicas, torch.device(device))) if ranks.replicas.num_ranks > 1 else None
    within = within or between or assumed.within
    return Links(within, between or _slower(within, assumed.between), host)


def _slower(one: Link, other: Link) -> Link:
    return Link(max(one.alpha_s, other.alpha_s), min(one.bytes_per_s, other.bytes_per_s))


_Sample = tuple[int, int, float]  # messages one after the other, bytes sent, seconds


def _time_gathers(ranks: Communicator, hop: Hop, device: torch.device) -> list[_Sample]:
    samples = []
    for nbytes in _FIT_NBYTES:
        full = torch.zeros(hop.num_ranks * nbytes, dtype=torch.uint8, device=device)
        seconds = []
        for tag in range(_NUM_REPEATS):
            ranks.agree(torch.zeros(1), "max", "the fit of links")
            start = time.perf_counter()
            ranks.all_gather_(hop, full, tag, "the fit of links").wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        sent_nbytes = (hop.num_ranks - 1) * nbytes
        samples.append((hop.num_ranks - 1, sent_nbytes, _agreed(ranks, statistics.median(seconds[1:]))))
    return samples


def _time_host(ranks: Communicator) -> list[_Sample]:
    samples = []
    for nbytes in _FIT_NBYTES[:3]:
        values, seconds = torch.zeros(nbytes, dtype=torch.uint8), []
        for _ in range(_NUM_REPEATS):
            start = time.perf_counter()
            ranks.agree(values, "max", "the fit of links")
            seconds.append(time.perf_counter() - start)
        num_peers = ranks.num_ranks - 1
        sent_nbytes = 2 * nbytes * num_peers // ranks.num_ranks
        samples.append((2 * num_peers, sent_nbytes, _agreed(ranks, statistics.median(seconds[1:]))))
    return samples


def _agreed(ranks: Communicator, seconds: float) -> float:
    return float(ranks.agree(torch.tensor([seconds], dtype=torch.float64), "max", "the fit of links").item())


def _fit(samples: Sequence[_Sample]) -> Link:
    """Fit alpha and beta so that the relative errors have the least squares; equal bits for equal samples."""
    unit = max(nbytes for _, nbytes, _ in samples)
    rows = [(num_steps / seconds, nbytes / unit / seconds) for num_steps, nbytes, seconds in samples]
    first, second = (sum(row[column] for row in rows) for column in (0, 1))
    aa, bb = (sum(row[column] ** 2 for row in rows) for column in (0, 1))
    ab = sum(one * other for one, other in rows)
    determinant = aa * bb - ab * ab
    alpha_s = (first * bb - second * ab) / determinant if determinant else 0.0
    s_per_byte = (second * aa - first * ab) / determinant / unit if determinant else 0.0
    if s_per_byte <= 0:  # noise: the largest message says what it can
        s_per_byte = samples[-1][2] / samples[-1][1]
    return Link(max(alpha_s, _SMALLEST_ALPHA_S), 1.0 / s_per_byte)
