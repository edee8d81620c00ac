# The whole life of a checkout: `make demo` and `make test` set up what they need. `make help` lists all.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
TREE := build/py3-none-linux_x86_64
# cmake, ninja and the tests' programs come from the virtual environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP_INSTALL := $(BIN)/python -m pip install --quiet --progress-bar off
SOURCES := CMakeLists.txt pyproject.toml version.txt README.md \
           $(shell find cmake include src python -not -name '*.pyc' -not -name __pycache__)

.DEFAULT_GOAL := help
.PHONY: help setup build wheel demo docs test test-quick test-all test-cpus test-arm test-peers test-torches test-gpu bench bench-peers fuzz format lint clean

help: ## list the targets
	@awk -F': .*## ' '/^[a-z-]+: .*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- setup: each step leaves a stamp, so that repeating it costs nothing ----
setup: $(STAMPS)/test ## system packages, .venv, torch and the build and test packages

$(STAMPS)/system: tools/system_packages
	@tools/system_packages
	@mkdir -p $(@D) && touch $@

# --clear mends a half-made environment; the interpreter's own pip.conf goes along with it.
$(STAMPS)/venv: $(STAMPS)/system
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stowage: Python must be 3.11 or newer, got " + sys.version.split()[0])'
	@echo "== making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@conf=$$($(PYTHON) -c 'import sys; print(sys.prefix)')/pip.conf; [ ! -f "$$conf" ] || cp "$$conf" $(VENV)/pip.conf
	@touch $@

$(STAMPS)/torch: requirements/torch.txt $(STAMPS)/venv
	@echo "== installing torch (set TORCH_INDEX_URL to take it from another index, e.g. its CPU-only one)"
	@$(PIP_INSTALL) -r $< $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
	@touch $@

$(STAMPS)/build: requirements/build.txt $(STAMPS)/torch
	@echo "== installing the build packages"
	@$(PIP_INSTALL) -r $< -c requirements/torch.txt
	@touch $@

$(STAMPS)/test: requirements/test.txt requirements/docs.txt requirements/peers.txt $(STAMPS)/build
	@echo "== installing the packages of the demo and the tests"
	@$(PIP_INSTALL) -r $< -r requirements/docs.txt -c requirements/torch.txt
	@$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/peers -r requirements/peers.txt
	@touch $@

# ---- build: one wheel, installed into .venv; the same tree serves the C++ tests ----
build: $(STAMPS)/wheel ## build the wheel and install it into .venv

$(STAMPS)/wheel: $(SOURCES) | $(STAMPS)/build
	@echo "== building and installing the wheel (some minutes; the tree is $(TREE))"
	@$(PIP_INSTALL) --no-build-isolation .
	@touch $@

wheel: build ## write the wheel to build/dist
	@rm -rf build/dist
	@$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/dist .
	@ls -l build/dist

demo: build $(STAMPS)/test ## a real model, packed, loaded, compared: the table, and build/demo.json
	@$(BIN)/python examples/demo.py

docs: $(STAMPS)/test ## the pages of docs/ as a site, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html; python -m http.server -d build/site can search too"

# ---- tests: stages, their times and the one closing count are in tools/run_tests ----
test: build $(STAMPS)/test ## every test: C++, sanitizers, checks, Python
	@$(BIN)/python tools/run_tests standard

test-quick: build $(STAMPS)/test ## what to run after each edit: without sanitizers and slow tests
	@$(BIN)/python tools/run_tests quick

# What shows pages to the tests (113 MB to load, 390 MB on the disk): elsewhere its tests are skipped.
$(STAMPS)/browser: $(STAMPS)/system
	@tools/system_packages chromium
	@touch $@

# What builds and runs programs for another processor (some 300 MB on the disk).
$(STAMPS)/arm: $(STAMPS)/system
	@tools/system_packages g++-aarch64-linux-gnu qemu-user libgtest-dev libgmock-dev
	@touch $@

test-all: build $(STAMPS)/test $(STAMPS)/browser $(STAMPS)/arm ## nightly: everything above, plus the slow extras and fuzzing
	@$(BIN)/python tools/run_tests all

test-cpus: build $(STAMPS)/test ## the tests at each level of instruction sets, of ours and of torch's
	@$(BIN)/python tools/run_tests cpus

test-arm: $(STAMPS)/arm ## the core built for AArch64, its bytes compared with everyone's and its kernels tested under qemu
	@tools/test_arm

test-peers: build $(STAMPS)/test ## peers' own test suites with the facades in their place
	@$(BIN)/python tools/test_peers

TORCHES ?= 2.11.0 2.12.0
test-torches: build $(STAMPS)/test ## the wheel under other torches (TORCHES="2.11.0 2.12.0", 0.5 GB each)
	@$(BIN)/python tools/test_torches $(TORCHES)

test-gpu: ## op tests on CUDA with the Python and torch (2.11 or newer) that stand here
	@PYTHON=$(PYTHON) tools/test_gpu

BENCH := build/bench
bench: build ## kernels beside memcpy and read bandwidth: build/bench/kernels.json and .html
	@mkdir -p $(BENCH)
	@$(BIN)/stowage bench --json > $(BENCH)/kernels.json
	@$(BIN)/python bench/python/bench_page.py $(BENCH)/kernels.json

bench-peers: build $(STAMPS)/test ## products beside those of other libraries: build/bench/peers.json and .html
	@$(BIN)/python tools/bench_peers --out $(BENCH)

fuzz: $(STAMPS)/test ## fuzz the parsers (needs clang) and the ops for a minute each
	@tools/fuzz 60

format: $(STAMPS)/test ## format C++ and Python in place
	@git ls-files '*.h' '*.cuh' '*.cpp' '*.c' | xargs $(BIN)/clang-format -i
	@$(BIN)/ruff check --quiet --fix . && $(BIN)/ruff format --quiet .

lint: build $(STAMPS)/test ## formatting, ruff, mypy, clang-tidy of changed sources (ALL=1: of all)
	@tools/lint $(if $(ALL),--all)

clean: ## remove what was built; .venv stays
	@rm -rf build $(STAMPS)/wheel
