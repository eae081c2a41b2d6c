#!/usr/bin/env bash
# Compiles the CUDA kernels for several architectures; needs no GPU. Warnings are errors. What the compiler made of each
# kernel (registers, spills, 16-byte accesses) is checked by kernel_report.py.
#
#   ARCHS="80 90 120"   compute capabilities: A100, H100 / H200, and one newer
#   JOBS=2              sources compiled at a time
#   VENV=.venv-nvcc     where nvcc is installed with pip if none is on PATH
set -euo pipefail
cd "$(dirname "$0")/.."

ARCHS=${ARCHS:-80 90 120}
VENV=${VENV:-.venv-nvcc}
PYTHON=${PYTHON:-python3}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

nvcc=$(command -v nvcc || true)
if [[ -z $nvcc ]]; then
  [[ -x $VENV/bin/python ]] || "$PYTHON" -m venv "$VENV"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check 'nvidia-cuda-nvcc>=13' 'nvidia-cuda-runtime>=13'
  nvcc=$(find "$(cd "$VENV" && pwd)" -path '*/bin/nvcc' -print -quit)
fi
"$nvcc" --version | sed -n 's/^.*release/nvcc: release/p'

# The flags of the real build, so that what is checked here is what is shipped.
mapfile -t flags < <("$PYTHON" .ci/build_settings.py NVCC_FLAGS)
for arch in $ARCHS; do flags+=("-gencode=arch=compute_$arch,code=sm_$arch"); done

compile() {
  local kept=$out/$(basename "$1" .cu)
  mkdir "$kept"
  if ! "$nvcc" "${flags[@]}" -Werror=all-warnings -Xcompiler=-Werror -Xptxas=-v --keep --keep-dir "$kept" \
    -c "$1" -o "$kept/object.o" >"$kept/log" 2>&1; then
    cat "$kept/log"
    return 1
  fi
  "$PYTHON" .ci/kernel_report.py "$kept/log" "$kept"
}

status=0
running=()
wait_for_first() {
  wait "${running[0]}" || status=1
  running=("${running[@]:1}")
}
for source in csrc/cuda/*.cu; do
  [[ ${#running[@]} -lt ${JOBS:-2} ]] || wait_for_first
  compile "$source" &
  running+=($!)
done
while [[ ${#running[@]} -gt 0 ]]; do wait_for_first; done
exit $status
