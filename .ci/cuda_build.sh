#!/usr/bin/env bash
# Builds the whole extension against a CUDA build of torch, loads it, and says which operators have a CUDA kernel.
# Needs nvcc but no GPU.
#
#   VENV=.venv-cuda     the environment, made if it is not there
#   PYTHON=python3      the interpreter it is made from
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv-cuda}
if [[ ! -x $VENV/bin/python ]]; then
  "${PYTHON:-python3}" -m venv "$VENV"
fi
VENV=$(cd "$VENV" && pwd)
pip=("$VENV/bin/python" -m pip --quiet --quiet --disable-pip-version-check)
# Installs nothing where the environment has them already.
"${pip[@]}" install 'torch==2.14.1' 'setuptools>=77' numpy

# Built from a copy: the library for the CPU that lies in the working tree stays as it is.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r setup.py pyproject.toml MANIFEST.in csrc zero_shard "$copy"
for extra in README.md LICENSE; do [[ ! -e $extra ]] || cp "$extra" "$copy"; done
rm -rf "$copy"/zero_shard/_C*.so "$copy"/zero_shard/_build.json
cd "$copy"
ZERO_SHARD_CPU=1 ZERO_SHARD_CUDA=1 ZERO_SHARD_WERROR=1 "$VENV/bin/python" setup.py --quiet build_ext --inplace
"$VENV/bin/python" - <<'PYTHON'
import torch

from zero_shard import ops

print(f"torch {torch.__version__}; {ops.describe()}")
for name in ("flatten_", "unflatten_", "quantize_", "reduce_slices_", "sum_squares_", "sum_pairs_", "adamw_"):
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"zero_shard::{name}", "CUDA")
    print(f"zero_shard::{name}: CUDA kernel {'registered' if has_kernel else 'MISSING'}")
    assert has_kernel, name
assert ops.missing_reason("cuda") is None, "those kernels are the twins"
PYTHON
