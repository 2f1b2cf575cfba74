# `make demo` and `make test` set up all they need in .venv; so does every other target.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_CUDA ?= torch==2.11.0
# Processes that share the tests; 0: one after the other, in one that a debugger can stop.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
SOURCES := $(wildcard csrc/*.cpp csrc/*.cu csrc/*.h)

.PHONY: demo test test-all test-integrations run-test-integrations check docs pictures format format-check lint types native mutants package cuda gpu clean help

help:
	@echo "make demo    train, kill, resume: what pyckpt is for"
	@echo "make test    the Python tests that tell most, in a minute or two"
	@echo "make test-all  all Python tests"
	@echo "make test-integrations  pyckpt in Lightning, torchtitan, Transformers, Accelerate"
	@echo "make check   format, lint, types, tests, native tests under sanitizers, the CUDA build"
	@echo "make native  the native tests, plain and under the sanitizers"
	@echo "make mutants take waits out of the CUDA path: the native tests must notice"
	@echo "make package pack the sources, build a wheel from the pack, install and use it elsewhere"
	@echo "make cuda    compile and link with CUDA, in an environment of its own"
	@echo "make gpu     on a machine with a GPU: build, tests marked cuda, sanitizers, benchmark"
	@echo "make docs    the documentation as a site, in build/site; a warning is an error"
	@echo "make pictures  the plots and terminals in docs/pictures, from results and commands"
	@echo "make format  format the code"

# The environment. Torch first and alone, so that its version is ours to choose.
$(BIN)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet "setuptools>=77" wheel ninja
	touch $@

# The package, editable.
$(BIN)/.built: $(BIN)/.ready setup.py $(SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[examples]"
	touch $@

# What each target takes besides, so that a first test does not wait for what it does not use.
$(BIN)/.group-%: $(BIN)/.ready
	$(BIN)/python -m pip install --quiet --group $*
	touch $@

demo: $(BIN)/.built
	$(BIN)/python examples/demo.py

test: $(BIN)/.built $(BIN)/.group-test
	$(PYTEST) -m "not slow"

test-all: $(BIN)/.built $(BIN)/.group-test-all
	$(PYTEST)

# The frameworks, in an environment of their own: what they ask for need not agree with the tests'.
test-integrations:
	$(MAKE) VENV=.venv-integrations run-test-integrations

run-test-integrations: $(BIN)/.built $(BIN)/.group-integrations
	$(PYTEST) tests/integrations

check: format-check lint types docs native test test-all test-integrations package cuda

docs: $(BIN)/.built $(BIN)/.group-docs
	$(BIN)/python -m mkdocs build --strict

# They are committed: whoever reads the documentation needs none of what draws them.
pictures: $(BIN)/.built $(BIN)/.group-docs
	$(BIN)/python scripts/docs_plots.py
	$(BIN)/python scripts/docs_terminals.py

format: $(BIN)/.group-lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	clang-format -i csrc/*.cpp csrc/*.cu csrc/*.h tests/native/*.cpp tests/native/*.h

format-check: $(BIN)/.group-lint
	$(BIN)/ruff format --check .
	clang-format --dry-run --Werror csrc/*.cpp csrc/*.cu csrc/*.h tests/native/*.cpp tests/native/*.h

lint: $(BIN)/.group-lint
	$(BIN)/ruff check .
	$(MAKE) -C tests/native thread-safety

types: $(BIN)/.built $(BIN)/.group-test-all $(BIN)/.group-lint
	$(BIN)/mypy

native:
	$(MAKE) -C tests/native all-variants JOBS=$(shell nproc)

mutants:
	$(PYTHON) tests/native/mutants.py

package: $(BIN)/.built
	PYTHON="$(BIN)/python" bash scripts/check_package.sh

# Compiled and linked against a torch that has CUDA; running it takes a GPU.
cuda:
	PYTHON="$(PYTHON)" TORCH_CUDA="$(TORCH_CUDA)" bash scripts/build_cuda.sh

# With the torch of $(PYTHON) itself, built in the tree: a GPU machine may have no network.
gpu:
	PYTHON="$(PYTHON)" bash scripts/gpu.sh

clean:
	rm -rf build dist *.egg-info pyckpt/_C*.so pyckpt/_build.py $(VENV) $(VENV)-cuda $(VENV)-integrations
