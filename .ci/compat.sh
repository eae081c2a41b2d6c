#!/usr/bin/env bash
# Tests another interpreter and another torch, with the library of the working tree as it is: the one library is what must
# serve them all. Every argument goes to pytest. The exit status is 75 if pip could not get the packages, in ten minutes.
#
#   PYTHON=python3          the interpreter, 3.10 or newer
#   TORCH=2.10.0            the release of torch, 2.10 or newer
#   VENV=.venv-compat-...   the environment, made if it is not there
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-2.10.0}
VENV=${VENV:-.venv-compat-$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-$TORCH}

# From PyPI a torch is a CUDA build. On the CPU none of CUDA's libraries is called, but all are linked: 5 GB of them are
# replaced by functions that return 0 (there are 0 devices). Torch asks for the libraries by name and for their functions
# by name and version; so that no version is missed, the functions are in a library of their own behind empty ones.
leave_out_cuda() {
  local lib symbols libraries name
  lib=$("$VENV/bin/python" -c 'import importlib.util; print(importlib.util.find_spec("torch").submodule_search_locations[0])')/lib
  libraries=$(readelf -d "$lib"/lib{torch,c10}*.so | grep -oE 'lib(cu|nv|nccl)\w*\.so\.[0-9]+' | sort -u) || return 0
  symbols=$(nm -D --undefined-only "$lib"/lib{torch,c10}*.so | grep -oE '\b(__cuda|cu|nv|nccl)\w+' | sort -u)
  for name in $symbols; do echo "int $name(void) { return 0; }"; done | cc -shared -w -x c - -o "$lib/libno_cuda.so"
  cc -shared -x c /dev/null -o "$lib/libempty.so" -L"$lib" -Wl,--no-as-needed -lno_cuda -Wl,-rpath,'$ORIGIN'
  for name in $libraries; do ln -sf libempty.so "$lib/$name"; done
}

if [[ ! -e $VENV/.ready ]]; then
  [[ -x $VENV/bin/python ]] || "$PYTHON" -m venv "$VENV"
  pip=(timeout 600 "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
  # What torch needs beside CUDA, and the tools of the tests. Their versions are the interpreter's choice.
  { "${pip[@]}" filelock typing-extensions sympy networkx jinja2 fsspec 'setuptools>=77' numpy pytest hypothesis expecttest \
    pyyaml safetensors 'tomli; python_version < "3.11"' && "${pip[@]}" --no-deps "torch==$TORCH"; } || exit 75
  leave_out_cuda
  touch "$VENV/.ready"
fi

# What depends most on the interpreter and on torch, with two ranks or one: each rank imports torch.
if [[ $# -eq 0 ]]; then
  set -- tests/test_{config,ops,phases,equivalence,stage3,gradients_dropin,compile,checkpoint,checkpoint_interchange,plan}.py \
    -k "test_config and not within_seconds or opcheck or schema or every_form or chosen or test_phases \
      or bits_of_stage_0 and float64-2 or all_kinds and -2] or test_gradients_dropin and not [1- and not [3- and not replicas \
      or graphs_in_each_unit or interchange or loads_anywhere and 1-2- or fake_group"
fi
export CUDA_VISIBLE_DEVICES='' PYTHONPATH=$PWD
"$VENV/bin/python" -m zero_shard --version
"$VENV/bin/python" -c 'import torch; from zero_shard import ops; print(f"torch {torch.__version__}; {ops.describe()}")'
"$VENV/bin/python" -m pytest -q -p no:cacheprovider "$@"
