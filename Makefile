# `make test` and `make demo` need Python 3.11 or newer and a package registry; they set up everything else.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
NEWEST_VENV := .venv-newest
PIP_INSTALL := -m pip install -qq --disable-pip-version-check
BUILD_FILES := pyproject.toml CMakeLists.txt $(shell find csrc -type f)

# The real path of python3.12: on PATH, or kept by pyenv without being activated. Empty when there is none.
NEWEST_PYTHON = $(shell for v in "$$PYENV_VERSION" $$(pyenv versions --bare 2>/dev/null | grep '^3\.12'); do \
	PYENV_VERSION=$$v python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)

.PHONY: test test-default test-newest lint types format demo bench docs clean

test: lint types test-default test-newest

# Unit tests, doctests, the README's blocks and the scripts of docs/ and examples/ are all pytest items.
test-default: $(VENV)/dev.stamp
	$(VENV)/bin/python -m pytest -n $(WORKERS) --ignore=tests/oracle

test-newest:
	@if [ -n "$(NEWEST_PYTHON)" ]; then $(MAKE) --no-print-directory run-newest; \
	else echo "test-newest: SKIPPED, no python3.12 on PATH or in pyenv"; fi

.PHONY: run-newest
run-newest: $(NEWEST_VENV)/test.stamp
	$(NEWEST_VENV)/bin/python -m pytest -n $(WORKERS) --ignore=tests/oracle

lint: $(VENV)/dev.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/dev.stamp
	$(VENV)/bin/basedpyright --pythonpath $(VENV)/bin/python

format: $(VENV)/dev.stamp
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

demo: $(VENV)/run.stamp
	$(VENV)/bin/python examples/quickstart.py

# Compares with bitsandbytes on the CPU; torch is pinned to a build without CUDA packages.
.PHONY: oracle
oracle: $(VENV)/oracle.stamp
	$(VENV)/bin/python -m pytest tests/oracle

# Each benchmark takes --quick and --json PATH.
bench: $(VENV)/dev.stamp
	@mkdir -p benchmarks/results/local
	@set -e; for f in benchmarks/[!_]*.py; do [ -e "$$f" ] || continue; echo "== $$f"; \
	$(VENV)/bin/python "$$f" --quick --json "benchmarks/results/local/$$(basename "$$f" .py).json"; done

docs: $(VENV)/dev.stamp
	@set -e; for f in docs/*.py; do [ -e "$$f" ] || continue; echo "== $$f"; $(VENV)/bin/python "$$f"; done
	$(VENV)/bin/pdoc eformer --output-directory site

clean:
	rm -rf $(VENV) $(NEWEST_VENV) build dist site .pytest_cache .ruff_cache .hypothesis benchmarks/results/local
	find src tests docs examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: $(BUILD_FILES) | $(VENV)/bin/python
	$(VENV)/bin/python $(PIP_INSTALL) -e .
	@touch $@

$(VENV)/dev.stamp: $(BUILD_FILES) | $(VENV)/bin/python
	$(VENV)/bin/python $(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/run.stamp

$(VENV)/oracle.stamp: $(VENV)/dev.stamp
	$(VENV)/bin/python $(PIP_INSTALL) torch==2.13.0
	$(VENV)/bin/python $(PIP_INSTALL) -e '.[oracle]'
	@touch $@

$(NEWEST_VENV)/test.stamp: $(BUILD_FILES)
	$(NEWEST_PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python $(PIP_INSTALL) --upgrade -e '.[test]' jax
	@touch $@
