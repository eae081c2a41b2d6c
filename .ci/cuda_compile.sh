#!/usr/bin/env bash
# Compiles the CUDA kernels for several architectures; needs no GPU. Warnings are errors, and so is a register spill.
#
#   ARCHS="80 90 120"   compute capabilities: A100, H100 / H200, and one newer
#   VENV=.venv-nvcc     where nvcc is installed with pip if none is on PATH
set -euo pipefail
cd "$(dirname "$0")/.."

ARCHS=${ARCHS:-80 90 120}
VENV=${VENV:-.venv-nvcc}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

nvcc=$(command -v nvcc || true)
if [[ -z $nvcc ]]; then
  [[ -x $VENV/bin/python ]] || "${PYTHON:-python3}" -m venv "$VENV"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check 'nvidia-cuda-nvcc>=13' 'nvidia-cuda-runtime>=13'
  nvcc=$(find "$(cd "$VENV" && pwd)" -path '*/bin/nvcc' -print -quit)
fi
"$nvcc" --version | sed -n 's/^.*release/nvcc: release/p'

# The flags of the real build, so that what is checked here is what is shipped.
mapfile -t flags < <("${PYTHON:-python3}" .ci/build_settings.py NVCC_FLAGS)
for source in csrc/cuda/*.cu; do
  for arch in $ARCHS; do
    log=$out/log
    "$nvcc" "${flags[@]}" -Werror=all-warnings -Xcompiler=-Werror -Xptxas=-v \
      -gencode="arch=compute_$arch,code=sm_$arch" -c "$source" -o "$out/object.o" >"$log" 2>&1 || { cat "$log"; exit 1; }
    awk -v where="$source sm_$arch" '
      /spill stores/ {
        kernels++
        for (i = 1; i < NF; i++) if ($i == "bytes" && $(i + 1) == "spill" && $(i - 1) > 0) spills++
      }
      /Used [0-9]+ registers/ { for (i = 1; i < NF; i++) if ($i == "Used" && $(i + 1) > most) most = $(i + 1) }
      END {
        printf "%s: %d kernels, at most %d registers, %d spill\n", where, kernels, most, spills
        exit kernels == 0 || spills > 0
      }' "$log" || { grep -B1 'spill' "$log"; echo "$source for sm_$arch: no kernel, or a register spill" >&2; exit 1; }
  done
done
