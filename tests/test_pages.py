"""Large pages are asked for only where the C library maps memory for one tensor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from zero_shard.pages import on_large_pages

_SMAPS = Path("/proc/self/smaps")


def _is_advised(address: int) -> bool:
    """Whether the kernel has noted MADV_HUGEPAGE for the mapping that an address lies in."""
    is_here = False
    for line in _SMAPS.read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            is_here = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"no mapping holds {address:x}")


@pytest.mark.skipif(not _SMAPS.exists(), reason="needs Linux with /proc/self/smaps")
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no large pages")
@pytest.mark.parametrize(("mib", "is_wanted"), [(64, True), (16, False)])
def test_only_large_tensors_ask_for_large_pages(mib: int, is_wanted: bool) -> None:
    plain, asked = (torch.empty(mib << 20, dtype=torch.uint8) for _ in range(2))
    assert on_large_pages(asked) is asked
    assert _is_advised(asked.data_ptr() + asked.nbytes // 2) == is_wanted
    assert not _is_advised(plain.data_ptr() + plain.nbytes // 2)
