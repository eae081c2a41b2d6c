"""A program: the built CPU operators on tensors that begin or end where the process has no memory.

The loops of the real build read vectors; one element too far ends the program with SIGSEGV.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from typing import Any

import torch
from op_cases import (
    FLOATS,
    SCHEMES,
    SIZES,
    Step,
    assert_same_bits,
    assert_same_step,
    instruction_sets,
    make_step,
    native,
)
from torch import Tensor

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_PAGE = mmap.PAGESIZE
_reserved: list[tuple[int, int]] = []  # address and length


def _reserve(nbytes: int) -> int:
    """Return the address of whole pages, with a page on either side that nothing may touch."""
    inside = -(-nbytes // _PAGE) * _PAGE
    total = inside + 2 * _PAGE
    address = _LIBC.mmap(None, total, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert address != ctypes.c_void_p(-1).value, "mmap failed"
    changed = _LIBC.mprotect(address + _PAGE, inside, mmap.PROT_READ | mmap.PROT_WRITE)
    assert changed == 0, "mprotect failed"
    _reserved.append((address, total))
    return int(address) + _PAGE


def guarded(value: Any, is_at_end: bool) -> Any:
    """Copy tensors (also those in lists) so that they end, or else begin, at a page without access."""
    if isinstance(value, list):
        return [guarded(each, is_at_end) for each in value]
    if not isinstance(value, Tensor) or value.numel() == 0:
        return value
    nbytes = value.numel() * value.element_size()
    address = _reserve(nbytes) + (-nbytes % _PAGE if is_at_end else 0)
    memory = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=value.dtype).view(value.shape).copy_(value)


def _segments(numel: int) -> Tensor:
    return torch.tensor([[0, numel // 3, 0, 0], [numel // 3, numel - numel // 3, 1, 80]])


def _check(numel: int, is_at_end: bool) -> None:
    for scheme in SCHEMES:
        step = make_step(numel, scheme, seed=numel)
        actual = Step(*(guarded(value, is_at_end) for value in step.arguments()))
        native().adamw_(*step.arguments())
        native().adamw_(*actual.arguments())
        assert_same_step(actual, step, scheme)
    for dtype, accumulate in itertools.product(FLOATS, (False, True)):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = torch.randn(3, numel).to(dtype)
        out, sums, segments = torch.ones(numel, dtype=wide), torch.zeros(2, 2, dtype=torch.float64), _segments(numel)
        guarded_out, guarded_sums = guarded(out, is_at_end), guarded(sums, is_at_end)
        native().reduce_slices_(out, values, 3, accumulate, segments, sums)
        arguments = guarded([values, segments], is_at_end)
        native().reduce_slices_(guarded_out, arguments[0], 3, accumulate, arguments[1], guarded_sums)
        assert_same_bits(guarded_out, out, "out")
        apart = torch.ones_like(out)
        slices, own = guarded([values[::2].contiguous(), values[1]], is_at_end)
        native().reduce_slices_(apart, slices, 3, accumulate, None, None, own, 1)
        assert_same_bits(apart, out, "out with the own slice apart")
        assert_same_bits(guarded_sums, sums, "sums of reduce_slices_")
        native().sum_squares_(sums, [values[1]], [0], numel, segments)
        native().sum_squares_(guarded_sums, [guarded(values[1], is_at_end)], [0], numel, arguments[1])
        assert_same_bits(guarded_sums, sums, "sums of sum_squares_")
    values, out = torch.randn(numel // 256 * 256), torch.ones(numel // 256 * 256)
    wire = torch.empty(numel // 256 * 260, dtype=torch.uint8)
    guarded_wire, guarded_out = guarded(wire, is_at_end), guarded(out, is_at_end)
    native().quantize_(wire, values)
    native().quantize_(guarded_wire, guarded(values, is_at_end))
    assert torch.equal(guarded_wire, wire), "wire"
    native().reduce_slices_(out, wire.view(1, -1), 3, True, None, None)
    native().reduce_slices_(guarded_out, guarded_wire.view(1, -1), 3, True, None, None)
    assert_same_bits(guarded_out, out, "out of blocks")
    for source, target in itertools.product(FLOATS, FLOATS):
        values, scale = torch.randn(numel).to(source), torch.tensor(0.3) if numel % 2 else None
        flat = torch.empty(numel, dtype=target)
        guarded_flat, guarded_values = guarded(flat, is_at_end), guarded(values, is_at_end)
        native().flatten_(flat, [values], [0], scale)
        native().flatten_(guarded_flat, [guarded_values], [0], scale)
        assert_same_bits(guarded_flat, flat, "flat")
        native().unflatten_([values], flat, [0], scale)
        native().unflatten_([guarded_values], guarded_flat, [0], scale)
        assert_same_bits(guarded_values, values, "tensor")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for _ in instruction_sets():
        for numel, is_at_end in itertools.product(SIZES, (False, True)):
            _check(numel, is_at_end)
            while _reserved:
                assert _LIBC.munmap(*_reserved.pop()) == 0
    print("ok")
