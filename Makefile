# `make demo` and `make test` set up all they need in .venv; so does every other target.

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_CUDA ?= torch==2.11.0
# Processes that share the tests; 0: one after the other, in one that a debugger can stop.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# A test that hangs ends its process after faulthandler_timeout, and is named; others go on.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -o faulthandler_exit_on_timeout=true
SOURCES := $(wildcard csrc/*.cpp csrc/*.cu csrc/*.h)

.PHONY: demo test test-all test-slow test-integrations run-test-integrations check docs pictures format format-check lint types native schedules mutants torture torture-samples torture-power torture-concurrency fuzz soak restarts package cuda gpu clean help

help:
	@echo "make demo    train, kill, resume: what pyckpt is for"
	@echo "make test    the Python tests that tell most, in a minute or two"
	@echo "make test-all  all Python tests"
	@echo "make test-slow  those that make test leaves out"
	@echo "make test-integrations  pyckpt in Lightning, torchtitan, Transformers, Accelerate"
	@echo "make check   format, lint, types, tests, native tests under sanitizers, the CUDA build"
	@echo "make native  the native tests, plain and under the sanitizers"
	@echo "make mutants take waits out of the CUDA path: the native tests must notice"
	@echo "make schedules  what has threads, under the thread sanitizer and schedules of SEED=1"
	@echo "make fuzz    damaged and hostile input for each parser, for MINUTES=30"
	@echo "make torture each system call killed, failed, delayed, alone and in pairs; CASES=, SEED="
	@echo "make torture-power  the power fails in models of file systems, at each instant of real runs"
	@echo "make soak    20,000 saves and 2,000 restores with faults: nothing grows"
	@echo "make restarts  a job under torchrun, killed 100 times: it goes on without a gap"
	@echo "make torture-concurrency  everything at once, in processes that end at any instant"
	@echo "make torture-samples  some minutes of all these"
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

# After `make test`, the rest: what is marked slow, and what hypothesis tries more examples of.
test-slow: $(BIN)/.built $(BIN)/.group-test-all
	$(PYTEST) -m "slow or hypothesis"

# The frameworks, in an environment of their own: what they ask for need not agree with the tests'.
# Python and torch are those of $(VENV), so it takes the extension that was built for these.
test-integrations: $(BIN)/.built
	$(MAKE) VENV=.venv-integrations run-test-integrations

run-test-integrations: $(BIN)/.sees-tree $(BIN)/.group-integrations
	$(PYTEST) tests/integrations

$(BIN)/.sees-tree: $(BIN)/.ready
	echo "$(CURDIR)" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pyckpt.pth"
	touch $@

check: format-check lint types docs native test test-slow test-integrations torture-samples package cuda

docs: $(BIN)/.built $(BIN)/.group-docs
	$(BIN)/python -m mkdocs build --strict

# They are committed: whoever reads the documentation needs none of what draws them.
pictures: $(BIN)/.built $(BIN)/.group-docs
	$(BIN)/python scripts/docs_plots.py
	$(BIN)/python scripts/docs_terminals.py

format: $(BIN)/.group-lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	clang-format -i csrc/*.cpp csrc/*.cu csrc/*.h tests/native/*.cpp tests/native/*.h \
	  torture/fuzz/native/*.cpp torture/fuzz/native/*.h

format-check: $(BIN)/.group-lint
	$(BIN)/ruff format --check .
	clang-format --dry-run --Werror csrc/*.cpp csrc/*.cu csrc/*.h tests/native/*.cpp tests/native/*.h \
	  torture/fuzz/native/*.cpp torture/fuzz/native/*.h

lint: $(BIN)/.group-lint
	$(BIN)/ruff check .
	$(MAKE) -C tests/native thread-safety JOBS=$(shell nproc)

types: $(BIN)/.built $(BIN)/.group-test-all $(BIN)/.group-lint
	$(BIN)/mypy

native:
	$(MAKE) -C tests/native all-variants JOBS=$(shell nproc)

schedules:
	$(MAKE) -C tests/native -j$(shell nproc) build VARIANT=schedules
	PYCKPT_PERTURB_SEED=$(or $(SEED),1) $(MAKE) -C tests/native test VARIANT=schedules

mutants:
	$(PYTHON) tests/native/mutants.py

# Guided by coverage, if `pip install atheris` has a package for this Python.
fuzz: $(BIN)/.built $(BIN)/.group-test
	-$(BIN)/python -m pip install --quiet atheris
	$(BIN)/python -m torture.fuzz --minutes $(or $(MINUTES),30)

# The results are torture/results/*.json. CASES is a number of single faults, and of pairs.
CASES ?= 10000
SEEDED = $(if $(SEED),--seed $(SEED))
torture: $(BIN)/.built $(BIN)/.group-test
	$(BIN)/python -m torture.faults --cases $(CASES) $(SEEDED)

# What a change must pass: some of all of them, two at a time. ONLY='faults soak' takes these.
torture-samples: $(BIN)/.built $(BIN)/.group-test
	$(BIN)/python -m torture.samples $(SEEDED) $(if $(ONLY),--only $(ONLY))

# MINUTES=1 takes a sample of the states.
torture-power: $(BIN)/.built $(BIN)/.group-test
	$(BIN)/python -m torture.power $(if $(MINUTES),--minutes $(MINUTES) --output build/power.json)

soak: $(BIN)/.built $(BIN)/.group-docs
	$(BIN)/python -m torture.soak --saves $(or $(SAVES),20000) $(SEEDED)
	$(BIN)/python scripts/soak_plot.py

restarts: $(BIN)/.built $(BIN)/.group-test
	$(BIN)/python -m torture.restarts --kills $(or $(KILLS),100) $(SEEDED)

torture-concurrency: $(BIN)/.built
	$(BIN)/python -m torture.concurrency --minutes $(or $(MINUTES),10) $(SEEDED)

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
