"""What a process holds: resident memory on the CPU, the allocator's count on CUDA; and bytes over a network device."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

import torch

_SENT_FIELD = 8  # of a line of /proc/net/dev, after eight counters of what was received
_RESET_PEAK = "5"  # see proc(5), clear_refs


def settle(device: torch.device) -> None:
    """Give back what nobody uses, so that two readings differ by what is held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    else:
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def present_nbytes(device: torch.device) -> int:
    """Return the memory in use: resident, or allocated by tensors on the GPU."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else status_nbytes("VmRSS")


def reset_peak(device: torch.device) -> bool:
    """Let the peak begin anew; return whether that is possible here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def peak_nbytes(device: torch.device) -> int:
    """Return the most memory in use since `reset_peak`."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else status_nbytes("VmHWM")


def status_nbytes(field: str) -> int:
    """Return a size of /proc/self/status: VmRSS is what is resident, VmHWM its peak, VmData what RLIMIT_DATA limits."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)


def device_sent_nbytes(network_device: str) -> int | None:
    """Return how many bytes a network device has sent, for all processes of the machine; None: there is no such one."""
    with suppress(OSError):
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, fields = line.partition(":")
            if name.strip() == network_device:
                return int(fields.split()[_SENT_FIELD])
    return None
