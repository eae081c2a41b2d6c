#!/usr/bin/env bash
# Tests another interpreter and another torch, with the library of the working tree as it is: the one library is what must
# serve them all. From PyPI a torch is a CUDA build of some gigabytes. Every argument goes to pytest.
#
#   PYTHON=python3          the interpreter, 3.10 or newer
#   TORCH=2.10.0            the release of torch, 2.10 or newer
#   VENV=.venv-compat-...   the environment, made if it is not there
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-2.10.0}
VENV=${VENV:-.venv-compat-$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-$TORCH}
[[ -x $VENV/bin/python ]] || "$PYTHON" -m venv "$VENV"
# The versions of the other tools are the interpreter's choice.
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$TORCH" numpy pytest hypothesis expecttest \
  pyyaml safetensors 'tomli; python_version < "3.11"'

if [[ $# -eq 0 ]]; then
  set -- tests/test_ops.py tests/test_ops_adamw.py tests/test_equivalence.py tests/test_state.py tests/test_stage3.py \
    tests/test_gradients_dropin.py tests/test_compile.py tests/test_checkpoint.py tests/test_checkpoint_interchange.py \
    tests/test_plan.py
fi
CUDA_VISIBLE_DEVICES='' PYTHONPATH=$PWD "$VENV/bin/python" -m zero_shard --version
CUDA_VISIBLE_DEVICES='' PYTHONPATH=$PWD "$VENV/bin/python" -c 'import torch; from zero_shard import ops; print(f"torch {torch.__version__}; {ops.describe()}")'
CUDA_VISIBLE_DEVICES='' PYTHONPATH=$PWD "$VENV/bin/python" -m pytest -q "$@"
