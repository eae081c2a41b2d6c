"""The deepest model that trains within a limit of memory per rank.

# Note [Which limit]
RLIMIT_DATA (``ulimit -d``): Linux counts in it what a process may write and shares with nobody, so heap, large
allocations and the stacks of threads, but not the code of libraries, which are gigabytes of RLIMIT_AS. It needs no
privilege, works in containers, holds for each rank by itself, and makes an allocation fail where a cgroup would have
the process killed. The limit is for the whole process: Python and torch are in it, too.
"""

from __future__ import annotations

import re
import resource
import subprocess
from collections.abc import Callable

from train_bench import memory

OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|MemoryError|bad_alloc|can't start new thread|OutOfMemoryError"
    r"|Resource temporarily unavailable",
    re.IGNORECASE,
)


def limit_memory(limit_nbytes: int) -> int:
    """Let this process have no more than ``limit_nbytes`` from here on; return what it has already."""
    used = memory.status_nbytes("VmData")
    if used >= limit_nbytes:
        raise ValueError(f"the limit must be above the {used >> 20} MiB of an idle rank, got {limit_nbytes >> 20} MiB")
    resource.setrlimit(resource.RLIMIT_DATA, (limit_nbytes, limit_nbytes))
    return used


def deepest(fits: Callable[[int], bool], first: int, limit: int) -> int:
    """Return the largest n <= limit that fits, 0 if not even 1 does: doubling from ``first``, then bisection."""
    low, high = 0, min(first, limit)
    while fits(high):
        low = high
        if low == limit:
            return low
        high = min(2 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def has_run(result: subprocess.CompletedProcess[str]) -> bool:
    """Return whether ranks ended well; False if they ran out of memory.

    Raises:
        RuntimeError: They failed for another reason.
    """
    if result.returncode == 0:
        return True
    if OUT_OF_MEMORY.search(result.stderr):
        return False
    errors = [line for line in result.stderr.splitlines() if "Error" in line] or result.stderr.splitlines()[-1:]
    raise RuntimeError(f"ranks failed with status {result.returncode}: {(errors or ['no output'])[0][:300]}")
