"""The CUDA kernels on the host: csrc/cuda/*.cu compiled as C++ against the stand-in for CUDA's header, as operators."""

from __future__ import annotations

import ast
import ctypes
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_bool, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent.parent
NATIVE = Path(__file__).parent
# What nvcc does to the same sources: no contraction, and accesses that are wider than the type behind the pointer.
KERNEL_FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno", "-U_FORTIFY_SOURCE"]
KERNEL_FLAGS += ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", f"-I{NATIVE}"]
CUDA_SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.int8: 4}
_MAX_DIMS = 6


def build_setting(name: str) -> Any:
    """Return a constant of setup.py, without importing or building anything."""
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise KeyError(name)


def run(command: Sequence[str | Path]) -> None:
    """Run a command; its output is the error's text."""
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{done.stdout[-8000:]}")


def compile_all(jobs: Sequence[tuple[Path, Path, Sequence[str]]]) -> None:
    """Compile (source, object, flags) by C++, as many at a time as there are cores."""
    compiler = os.environ.get("CXX", "g++")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: run([compiler, *job[2], "-x", "c++", "-c", job[0], "-o", job[1]]), jobs))


class _AdamwArgs(ctypes.Structure):
    _fields_ = [
        ("numel", c_int64),
        ("param_dtype", c_int32),
        ("grad_dtype", c_int32),
        ("moment_dtype", c_int32),
        ("is_stochastic", c_bool),
        ("param", c_void_p),
        ("low", c_void_p),
        ("runs", c_void_p),
        ("num_runs", c_int64),
        ("exp_avg", c_void_p),
        ("exp_avg_sq", c_void_p),
        ("max_exp_avg_sq", c_void_p),
        ("exp_avg_scale", c_void_p),
        ("exp_avg_sq_scale", c_void_p),
        ("segments", c_void_p),
        ("num_segments", c_int64),
        ("slot_steps", c_void_p),
        ("slot_is_active", c_void_p),
        ("slot_groups", c_void_p),
        ("slot_numbers", c_void_p),
        ("group_hyper", c_void_p),
        ("grad_scale", c_void_p),
        ("is_grad_scale_double", c_bool),
        ("found_inf", c_void_p),
    ]


class _SumArgs(ctypes.Structure):
    _fields_ = [
        ("numel", c_int64),
        ("segments", c_void_p),
        ("num_segments", c_int64),
        ("sums", c_void_p),
        ("partials", c_void_p),
    ]


class _QuantizeArgs(ctypes.Structure):
    _fields_ = [("wire", c_void_p), ("values", c_void_p), ("numel", c_int64), ("dtype", c_int32)]


class _ReduceArgs(ctypes.Structure):
    _fields_ = [
        ("out", c_void_p),
        ("slices", c_void_p),
        ("own", c_void_p),
        ("own_rank", c_int64),
        ("world_size", c_int64),
        ("numel", c_int64),
        ("slice_dtype", c_int32),
        ("divisor", c_int64),
        ("is_accumulate", c_bool),
        ("sum", _SumArgs),
    ]


class _SumSquaresArgs(ctypes.Structure):
    _fields_ = [("dtype", c_int32), ("runs", c_void_p), ("num_runs", c_int64), ("sum", _SumArgs)]


class _Run(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("start", c_int64), ("numel", c_int64)]


class _Entry(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("start", c_int64),
        ("numel", c_int64),
        ("dtype", c_int64),
        ("num_dims", c_int64),
        ("lengths", c_int64 * _MAX_DIMS),
        ("strides", c_int64 * _MAX_DIMS),
    ]


class _FlattenArgs(ctypes.Structure):
    _fields_ = [
        ("flat", c_void_p),
        ("flat_dtype", c_int32),
        ("numel", c_int64),
        ("entries", c_void_p),
        ("num_entries", c_int64),
        ("scale", c_void_p),
    ]


def _pointer(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    return tensor.data_ptr()


def _runs(tensors: Sequence[Tensor], offsets: Sequence[int]) -> Any:
    """Empty tensors get no run."""
    rows = [(_pointer(t), at, t.numel()) for t, at in zip(tensors, offsets, strict=True) if t.numel()]
    return (_Run * len(rows))(*rows)


def _joined_dims(tensor: Tensor) -> list[tuple[int, int]]:
    """Lengths and strides in row-major order, neighbours that are one run of memory joined."""
    dims: list[tuple[int, int]] = []
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if length == 1:
            continue
        if dims and dims[-1][1] == length * stride:
            dims[-1] = (dims[-1][0] * length, stride)
        else:
            dims.append((length, stride))
    return [] if dims in ([], [(tensor.numel(), 1)]) else dims


def _entries(tensors: Sequence[Tensor], offsets: Sequence[int]) -> Any:
    rows = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        if tensor.numel():
            dims = _joined_dims(tensor)
            lengths, strides = (tuple(column) for column in zip(*dims, strict=True)) if dims else ((), ())
            place = (tensor.data_ptr(), offset, tensor.numel(), _DTYPES[tensor.dtype], len(dims))
            rows.append((*place, (c_int64 * _MAX_DIMS)(*lengths), (c_int64 * _MAX_DIMS)(*strides)))
    return (_Entry * len(rows))(*rows)


class Shim:
    """The operators by the CUDA kernels, for tensors on the CPU, with the signatures of ``torch.ops.zero_shard``.

    Nothing is checked. A failed launch raises RuntimeError.
    """

    def __init__(self, directory: Path) -> None:
        sources = [*CUDA_SOURCES, NATIVE / "entries.cpp"]
        objects = [directory / f"{source.name}.o" for source in sources]
        flags = [*KERNEL_FLAGS, "-O1", "-fPIC"]
        compile_all([(source, target, flags) for source, target in zip(sources, objects, strict=True)])
        library = directory / "shim.so"
        run([os.environ.get("CXX", "g++"), "-shared", *objects, "-o", library])
        self._library = ctypes.CDLL(str(library))
        for name in ("adamw", "quantize", "reduce_slices", "sum_squares", "sum_pairs", "flatten", "unflatten"):
            getattr(self._library, f"run_{name}").restype = c_char_p
        for name, struct in (
            ("adamw", _AdamwArgs),
            ("quantize", _QuantizeArgs),
            ("reduce", _ReduceArgs),
            ("sum_squares", _SumSquaresArgs),
            ("flatten", _FlattenArgs),
            ("entry", _Entry),
        ):
            assert self._count(f"sizeof_{name}") == ctypes.sizeof(struct), f"{name}: csrc/kernels.h has changed"

    def configure(self, num_processors: int = 1, is_descending: bool = False) -> None:
        """Set how many blocks a grid may have (4 per processor), and the order in which threads run."""
        self._library.shim_configure(c_int(num_processors), c_int(is_descending))

    def num_launches(self) -> int:
        """Return how many kernels have been launched so far."""
        return self._count("shim_num_launches")

    def _count(self, name: str, *args: Any) -> int:
        function = getattr(self._library, name)
        function.restype = c_int64
        return int(function(*args))

    def _run(self, name: str, *args: Any) -> None:
        error = getattr(self._library, f"run_{name}")(*args)
        if error is not None:
            raise RuntimeError(error.decode())

    def _sum_args(self, numel: int, segments: Tensor | None, sums: Tensor | None) -> tuple[_SumArgs, Tensor]:
        if segments is None or sums is None:
            return _SumArgs(numel=numel), torch.empty(0)
        count = self._count("partials_numel", c_int64(numel), c_int64(len(segments)))
        partials = torch.full((count,), float("nan"), dtype=torch.float64)  # one that nobody writes would show
        args = _SumArgs(numel, _pointer(segments), len(segments), _pointer(sums), _pointer(partials))
        return args, partials

    def adamw_(
        self,
        param: Tensor,
        low: Tensor | None,
        grads: Sequence[Tensor],
        grad_offsets: Sequence[int],
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        max_exp_avg_sq: Tensor | None,
        exp_avg_scale: Tensor | None,
        exp_avg_sq_scale: Tensor | None,
        segments: Tensor,
        slot_steps: Tensor,
        slot_is_active: Tensor,
        slot_groups: Tensor,
        slot_numbers: Tensor,
        group_hyper: Tensor,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        stochastic: bool,
    ) -> None:
        """Update a shard by one step."""
        runs = _runs(grads, grad_offsets)
        args = _AdamwArgs(
            numel=param.numel(),
            param_dtype=_DTYPES[param.dtype],
            grad_dtype=_DTYPES[grads[0].dtype],
            moment_dtype=_DTYPES[exp_avg.dtype],
            is_stochastic=stochastic,
            param=_pointer(param),
            low=_pointer(low),
            runs=ctypes.addressof(runs),
            num_runs=len(runs),
            exp_avg=_pointer(exp_avg),
            exp_avg_sq=_pointer(exp_avg_sq),
            max_exp_avg_sq=_pointer(max_exp_avg_sq),
            exp_avg_scale=_pointer(exp_avg_scale),
            exp_avg_sq_scale=_pointer(exp_avg_sq_scale),
            segments=_pointer(segments),
            num_segments=len(segments),
            slot_steps=_pointer(slot_steps),
            slot_is_active=_pointer(slot_is_active),
            slot_groups=_pointer(slot_groups),
            slot_numbers=_pointer(slot_numbers),
            group_hyper=_pointer(group_hyper),
            grad_scale=_pointer(grad_scale),
            is_grad_scale_double=grad_scale is not None and grad_scale.dtype == torch.float64,
            found_inf=_pointer(found_inf),
        )
        self._run("adamw", ctypes.byref(args))

    def quantize_(self, wire: Tensor, values: Tensor) -> None:
        """Write values as blocks of the wire."""
        args = _QuantizeArgs(_pointer(wire), _pointer(values), values.numel(), _DTYPES[values.dtype])
        self._run("quantize", ctypes.byref(args))

    def reduce_slices_(
        self,
        out: Tensor,
        slices: Tensor,
        divisor: int,
        accumulate: bool,
        segments: Tensor | None,
        sums: Tensor | None,
        own: Tensor | None = None,
        own_rank: int = 0,
    ) -> None:
        """Reduce slices, and sum the squares of the result."""
        sum_args, _partials = self._sum_args(out.numel(), segments, sums)
        world_size = len(slices) + (own is not None)
        pointers = (_pointer(out), _pointer(slices), _pointer(own), own_rank)
        dtype = _DTYPES[torch.int8 if slices.dtype == torch.uint8 else slices.dtype]
        args = _ReduceArgs(*pointers, world_size, out.numel(), dtype, divisor, accumulate, sum_args)
        self._run("reduce_slices", ctypes.byref(args))

    def sum_squares_(
        self, sums: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], numel: int, segments: Tensor
    ) -> None:
        """Sum squares by segment."""
        sum_args, _partials = self._sum_args(numel, segments, sums)
        runs = _runs(tensors, offsets)
        dtype = _DTYPES[tensors[0].dtype] if tensors else 0
        args = _SumSquaresArgs(dtype, ctypes.addressof(runs), len(runs), sum_args)
        self._run("sum_squares", ctypes.byref(args))

    def sum_pairs_(self, total: Tensor, pairs: Tensor) -> None:
        """Add pairs."""
        pointers = (ctypes.cast(_pointer(tensor), POINTER(c_double)) for tensor in (total, pairs))
        self._run("sum_pairs", *pointers, c_int64(len(pairs)))

    def flatten_(self, flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], scale: Tensor | None) -> None:
        """Copy tensors into a flat buffer."""
        self._copy("flatten", flat, tensors, offsets, scale)

    def unflatten_(self, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int], scale: Tensor | None) -> None:
        """Copy ranges of a flat buffer into tensors."""
        self._copy("unflatten", flat, tensors, offsets, scale)

    def _copy(
        self, name: str, flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], scale: Tensor | None
    ) -> None:
        entries = _entries(tensors, offsets)
        args = _FlattenArgs(
            _pointer(flat),
            _DTYPES[flat.dtype],
            flat.numel(),
            ctypes.addressof(entries),
            len(entries),
            _pointer(scale),
        )
        self._run(name, ctypes.byref(args))
