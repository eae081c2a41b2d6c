"""Peak memory of this process, as Linux counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path


def status_nbytes(key: str) -> int:
    """Return a field of /proc/self/status: VmRSS is what is resident, VmHWM its peak since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def peak_above_nbytes(call: Callable[[], object]) -> int:
    """Return by how much a call raises this process's resident memory at its highest."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed before could be used again, unseen
    Path("/proc/self/clear_refs").write_text("5")
    before_nbytes = status_nbytes("VmRSS")
    call()
    return max(0, status_nbytes("VmHWM") - before_nbytes)
