"""The limits that memory sets: a C++ loop with the traffic of AdamW on a CPU, a copy on a GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from step_bench.contender import Contender, Variant
from step_bench.workload import Workload

LOOP_SOURCE = r"""
#include <cstddef>
// Reads p, g, m and v, writes p, m and v: the traffic of AdamW, with just enough arithmetic to need all of it.
extern "C" void adamw_shaped(float* p, const float* g, float* m, float* v, std::size_t numel) {
#pragma omp parallel for simd schedule(static)
  for (std::size_t i = 0; i < numel; ++i) {
    const float grad = g[i];
    const float mean = m[i] + 0.1f * (grad - m[i]);
    const float square = v[i] + 0.05f * (grad * grad - v[i]);
    m[i] = mean;
    v[i] = square;
    p[i] -= 1e-3f * (mean + square);
  }
}
"""
LOOP_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")


def compile_loop(directory: Path) -> Any:
    """Compile the loop for this machine.

    Raises:
        RuntimeError: There is no g++, or it fails.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no g++ was found")
    source, library = directory / "loop.cpp", directory / "loop.so"
    source.write_text(LOOP_SOURCE)
    command = [compiler, *LOOP_FLAGS, str(source), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {result.stderr}")
    return ctypes.CDLL(str(library)).adamw_shaped


def bandwidth_loop(work: Workload) -> Contender:
    """The C++ loop over four arrays of its own."""
    with tempfile.TemporaryDirectory() as directory:
        loop = compile_loop(Path(directory))
    arrays = [work.values.clone(), work.grad.clone(), torch.zeros_like(work.grad), torch.zeros_like(work.grad)]
    numel = ctypes.c_size_t(work.grad.numel())
    return Contender([Variant(lambda: loop(*(ctypes.c_void_p(each.data_ptr()) for each in arrays), numel), 28)])


def copy_bandwidth(work: Workload) -> Contender:
    """A copy of as many fp32 elements: what memory gives to one stream of reads and one of writes."""
    target = torch.empty_like(work.values)
    return Contender([Variant(lambda: target.copy_(work.values), 8)])
