# `make help` lists the targets.

VENV := .venv
BIN := $(VENV)/bin
TRACE := build/nkw-trace.json
IMAGE := build/nkw-image.png
WORKERS := 2
# By default the first interpreter here that is 3.10 or later; `make PYTHON=…` names one.
PYTHON := $(shell for python in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo $$python; break; }; done)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# One thread per test worker: numpy's and torch's own threads would have WORKERS times as many compete for the cores.
# Tests start hundreds of interpreters, which take half as long to start when compiled modules are kept.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# A worker takes tests in their order, so that those of a module share what they cache, and others' when it is done.
PARALLEL := --numprocesses $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-image serve test test-fast deep mutants lint format docs docs-site timelines notebooks bench wheel hook pre-commit clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.base ## write a story on two simulated trn1 cores; the trace goes to build/
	@mkdir -p $(dir $(TRACE))
	$(BIN)/nkw generate --target trn1 --tp 2 --prompt "Once upon a time" --max-new-tokens 48 --trace $(TRACE)

demo-image: $(VENV)/.images ## draw an image on a simulated trn2 core; it goes to build/
	@mkdir -p $(dir $(IMAGE))
	$(BIN)/nkw imagine "a red circle above a blue square" --steps 20 --seed 1 --out $(IMAGE)

serve: $(VENV)/.serve ## answer OpenAI's API at 127.0.0.1:8000 with the default model
	$(BIN)/nkw serve

test: lint ## lint, then all tests but the exhaustive ones
	$(PYTEST) $(PARALLEL) -m "not deep"

test-fast: $(VENV)/.dev ## the tests that take seconds
	$(PYTEST) $(PARALLEL) -m "not slow and not deep"

deep: lint $(VENV)/.deep ## lint, then all tests, a million random instructions, ten minutes of bad input
	$(PYTEST) $(PARALLEL)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.oracle --instructions 1000000
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.hostile --seconds 600

mutants: $(VENV)/.dev ## break the shipped kernels in some 10,000 ways and count which checks notice
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tools.mutants --processes $(WORKERS)

lint: $(VENV)/.dev ## ruff, formatting, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev ## fix and format with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.base ## write docs/instructions and docs/images, the table of nki_kernels/README.md, the diagrams of docs/model
	$(BIN)/python -m tools.instruction_pages
	$(BIN)/python -m tools.helper_table
	$(BIN)/python -m tools.module_diagrams
	$(BIN)/python -m tools.pictures
	$(BIN)/python -m tools.command_page

docs-site: $(VENV)/.deep ## build the documentation as a site in build/site
	$(BIN)/python -m tools.docs_site

timelines: $(VENV)/.base ## store the predicted timelines of the shipped kernels anew
	$(BIN)/python -m tools.timelines

notebooks: $(VENV)/.dev ## run the notebooks and store their outputs
	$(BIN)/python -m tools.notebooks

bench: $(VENV)/.dev ## measure the simulator's own speed
	$(BIN)/python -m benchmarks.speed

wheel: $(VENV)/.base ## build the distribution into dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

hook: ## run `make pre-commit` before every commit of this clone
	printf '#!/bin/sh\nexec make pre-commit\n' > "$$(git rev-parse --git-path hooks)/pre-commit"
	chmod +x "$$(git rev-parse --git-path hooks)/pre-commit"

pre-commit: lint ## under a minute: lint and the contract tests
	$(PYTEST) --quiet -m "not slow" tests/contract

clean: ## remove the environment and everything generated
	rm -rf $(VENV) build dist .benchmarks .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.10 or later was found; install one, or name it: make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "error: $(PYTHON) cannot create environments; install its venv module (Debian: python3-venv)" >&2; exit 1; }

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.images: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[images]'
	@touch $@ $(VENV)/.base

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[serve]'
	@touch $@ $(VENV)/.base

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.base

$(VENV)/.deep: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[dev,cluster,load,docs]'
	@touch $@
