"""Which ranks share a host, and how a group of them splits into two hops. Integers and names only.

# Note [Two hops]
Slices that go straight from rank to rank cross the link between hosts once for every pair of ranks. With L ranks on
each of H hosts, and P bytes, each host sends L P (H-1)/H of them. If ranks of one host add up first and then exchange
sums with those of the same place on other hosts, it sends P (H-1)/H, and each rank no more than before:

    P (L-1)/L  +  (P/L) (H-1)/H  =  P (W-1)/W

A gather takes the same way back: first across hosts, then inside. Shard ``local_rank * H + host`` keeps both hops
contiguous, so that nothing is copied in between (L = H = 2; a.b is shard b of local rank a):

    bucket       | 0.0 | 0.1 | 1.0 | 1.1 |
    inside       |  local 0  |  local 1  |      ranks of one host
    across       | h.0 | h.1 |                  ranks of one place, on the slice that is left
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def host_grid(hosts: Sequence[Hashable]) -> list[list[int]] | None:
    """Return the positions of ranks as rows, one per host; None unless two hops are fewer bytes across.

    Args:
        hosts: Of each rank. Two hops need at least two hosts, at least two ranks on each, and as many on all.
    """
    rows: dict[Hashable, list[int]] = {}
    for position, host in enumerate(hosts):
        rows.setdefault(host, []).append(position)
    lengths = {len(row) for row in rows.values()}
    return list(rows.values()) if len(rows) > 1 and len(lengths) == 1 and lengths != {1} else None


def common_host_grid(groups: Sequence[Sequence[Hashable]]) -> list[list[int]] | None:
    """Return the `host_grid` that all groups (the hosts of their ranks) have; None if they differ or have none.

    Replicas hold the same shards, and ranks must agree on how many process groups are made.
    """
    grids = [host_grid(hosts) for hosts in groups]
    return grids[0] if all(grid == grids[0] for grid in grids) else None


def shard_groups(num_ranks: int, num_shards: int) -> list[list[int]]:
    """Return positions as rows of ``num_shards`` neighbours, which share one copy."""
    return [list(range(start, start + num_shards)) for start in range(0, num_ranks, num_shards)]
