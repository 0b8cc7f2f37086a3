# Needs only Python 3.11 or newer and make. Everything is installed into .venv, pinned by constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= config.toml
MODEL ?= tiny
JOBS ?= 2
ARGS ?=

PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-input -c constraints.txt

.PHONY: help serve test test-engines test-vllm test-triton serve-vllm check format bench-overhead clean

help:
	@echo "make serve               start with $(CONFIG): two simulated engines, to try it out"
	@echo "make serve-vllm MODEL=M  install vLLM and serve M (tiny, gemma-270m, or a path) in the gateway's process"
	@echo "make test                every test that needs no engine"
	@echo "make test-engines        the tests against real engines: test-vllm and test-triton"
	@echo "make test-vllm           those with vLLM (installs it into .venv-engines)"
	@echo "make test-triton         those with a Triton server (installs it into .venv-triton, and vLLM)"
	@echo "make check               format, lint, types, imports, sizes"
	@echo "make bench-overhead      what the gateway itself costs"
	@echo "make clean               remove what these made"

serve: $(VENV)/.installed
	$(BIN)/signalbox serve --config $(CONFIG) $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not engines" -n $(JOBS) --dist worksteal $(ARGS)

test-engines: test-vllm test-triton

test-vllm:
	PYTHON=$(PYTHON) scripts/engines.sh
	.venv-engines/bin/python -m pytest -m engines --ignore tests/engines/triton $(ARGS)

test-triton:
	PYTHON=$(PYTHON) scripts/engines.sh
	PYTHON=$(PYTHON) scripts/triton.sh
	.venv-engines/bin/python -m pytest -m engines tests/engines/triton $(ARGS)

serve-vllm:
	PYTHON=$(PYTHON) scripts/serve_vllm.sh $(MODEL) $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/size_limit.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-overhead: $(VENV)/.installed-dev
	$(BIN)/python -m bench.overhead $(ARGS)

clean:
	rm -rf $(VENV) .venv-engines .venv-triton .models .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Signalbox needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) ..."
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV), with the tools for tests and checks ..."
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed
