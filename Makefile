# make quickstart | test | test-unit | test-parallel | test-e2e | test-full | test-gpu | test-slurm | test-faults | bench | lint | install | clean
# PYTHON=python3.12 make install   takes another interpreter (3.11 or newer).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-unit test-parallel test-e2e test-full test-gpu test-slurm test-faults bench lint clean

PYTHON ?= $(shell if python3.11 --version >/dev/null 2>&1; then echo python3.11; else echo python3; fi)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOCK := requirements/cpu.txt
SHELL_SCRIPTS := .ci/run $(wildcard examples/*/*.sh)

# More threads than one spin against the other ranks and the engine of the same machine.
export OMP_NUM_THREADS := 1
export PYTHONUNBUFFERED := 1

help:
	@sed -n '1,2s/^# //p' Makefile

install: $(STAMP)

$(STAMP): $(LOCK) setup.py
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "megatron_dapo needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Install one, then: make install PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check "$$(grep '^torch==' $(LOCK))"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -r $(LOCK)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

quickstart: install
	$(BIN)/python examples/quickstart/run.py

test: test-unit test-parallel test-e2e

test-unit: install
	$(BIN)/python -m pytest -m 'not slow' tests/unit

test-parallel: install
	$(BIN)/python -m pytest -m 'not slow' tests/parallel

test-e2e: install
	$(BIN)/python -m pytest -m 'not slow' tests/e2e

test-full: install
	$(BIN)/python -m pytest tests/unit tests/parallel tests/e2e

# Every point at which a save can die, and a run that is killed again and again. Minutes.
test-faults: install
	$(BIN)/python -m pytest -m faults tests/parallel tests/e2e

test-gpu: install
	$(BIN)/python -m pytest tests/gpu

# run.sh on a real scheduler: four nodes of SLURM on this machine, where it is installed.
test-slurm: install
	$(BIN)/python -m pytest tests/slurm

# On a quiet machine: the table of docs/performance.md. Fails where a bar is missed.
bench: install
	$(BIN)/python benchmarks/loss_memory.py
	$(BIN)/python benchmarks/loss_time.py
	$(BIN)/python -m benchmarks.resharding
	$(BIN)/python benchmarks/data_check.py
	$(BIN)/python benchmarks/grading.py
	$(BIN)/python benchmarks/engine_requests.py
	$(BIN)/python -m benchmarks.rollout_modes

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck $(SHELL_SCRIPTS)

clean:
	rm -rf $(VENV) build dist ./*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
