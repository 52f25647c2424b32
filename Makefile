# Everything to do with a checkout; `make` alone lists it. Nothing is installed outside .venv.

SHELL := /bin/sh
.SHELLFLAGS := -ec
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

FITS := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
  $$python -c '$(FITS)' 2>/dev/null && { command -v $$python; break; }; done)
VENV := .venv
RUN := $(VENV)/bin
# Most of what is installed is never imported, so pip compiles nothing. What commands import is compiled by importing it once: where
# PYTHONDONTWRITEBYTECODE is set, as in many containers, each command would compile it again.
IMPORTED := networkx, pandas, ray.dashboard.agent, ray.dashboard.dashboard, ray.data, ray.serve, ray.train.torch, ray.tune, \
  torch._dynamo, torch.export._trace, torchrec.distributed
PIP := $(RUN)/python -m pip install --no-compile --quiet --disable-pip-version-check --no-input --no-deps

SHIM := packaging/fbgemm-gpu-cpu
NATIVE := $(wildcard src/rayrec/native/*.c src/rayrec/native/*.h)
DEMO_LOG := demo/log
# One epoch at twice the network's learning rate is enough for so many rows; a small log gets the recipe's settings. The learning rate
# decays to zero over the run.
DEMO_FLAGS := --epochs 1 --workload.dense-optimizer.learning-rate 0.002
DEMO_ROWS := 1500000
SEEDS ?= 10
CHAOS_S ?= 120
FUZZ_S ?= 10
# A file at a time in each of two processes, the longest first (tests/conftest.py).
# A process that a test ends is not replaced: its replacement would run into the same test.
TWO_PROCESSES := -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
BENCHMARKS ?= ingest train checkpoint recover serve mnist gpt2
export PYTHONDONTWRITEBYTECODE := # empty: compiled tests and sources are written, or each process compiles them again
export DATA # the shell, not make, puts it into commands, so that it may hold spaces

.PHONY: help setup demo test test-extended test-exhaustive test-gpu gpu drills fuzz chaos check lint format types layers spelling prose docs site pictures wheel bench clean

help: ## what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.rayrec-installed ## the environment in .venv, from requirements.lock (CPU; docs/install.md for CUDA)

$(VENV)/.locked-installed: requirements.lock $(SHIM)/pyproject.toml
	@case "$$PWD" in *' '*) \
	  echo "make setup: Ray starts no workers from a path that holds a space: $$PWD; move this folder" >&2; exit 2;; esac
	@test -x $(RUN)/pip || { \
	  python="$(PYTHON)"; \
	  "$${python:-python3}" -c '$(FITS)' 2>/dev/null || { \
	    echo "make setup: needs Python 3.11, 3.12 or 3.13; name one: make setup PYTHON=/path/to/python3.11" >&2; exit 2; }; \
	  echo "setup: $(VENV) with $$("$$python" --version)"; \
	  "$$python" -m venv $(VENV); }
	@echo "setup: $$(grep -c '^[a-z]' requirements.lock) distributions of requirements.lock"
	@$(PIP) -r requirements.lock
	@$(PIP) --no-build-isolation ./$(SHIM)
	@$(RUN)/python -c 'import torch' || { \
	  echo "make setup: the torch that pip found does not import (above); on Linux pip needs the location of PyTorch's CPU wheels," \
	       "in PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS: see docs/install.md" >&2; \
	  $(RUN)/python -m pip uninstall --quiet --yes torch; exit 2; }
	@$(RUN)/python -W ignore -c 'import $(IMPORTED)'
	@touch $@

$(VENV)/.rayrec-installed: $(VENV)/.locked-installed pyproject.toml setup.py $(NATIVE)
	@echo "setup: rayrec and its kernels"
	@rm -f src/rayrec/native/*.so # one built for a single Python would be found first
	@$(PIP) --no-build-isolation --editable .
	@$(RUN)/python -m compileall -q src/rayrec
	@touch $@
	@echo "setup: done; $(RUN)/rayrec --help"

demo: setup ## trains on a synthetic log made once, or on DATA=path/to/train.txt
	@FLAGS=; if [ -z "$$DATA" ]; then \
	  DATA=$(DEMO_LOG)/train.txt; FLAGS="$(DEMO_FLAGS)"; \
	  test -e $(DEMO_LOG)/truth.json || { \
	    echo "demo: a synthetic click log of $(DEMO_ROWS) rows in $(DEMO_LOG)"; \
	    $(RUN)/rayrec generate $(DEMO_LOG) --rows $(DEMO_ROWS) --seed 0 >/dev/null; }; \
	fi; \
	name="demo-$$(date +%Y%m%d-%H%M%S)"; \
	echo "demo: criteo_demo on $$DATA, run demo/runs/$$name"; \
	$(RUN)/rayrec train criteo_demo --train-data.path "$$DATA" $$FLAGS --storage-path demo/runs --name "$$name" >/dev/null

test: setup ## all tests but the extended ones and those of the documentation, which have targets of their own
	@OMP_NUM_THREADS=1 $(RUN)/python -m pytest tests/integration tests/unit tests/test_architecture.py -m "not extended" $(TWO_PROCESSES)

test-extended: setup ## longer tests: what dies, several nodes, an S3 server
	@$(RUN)/python -m pytest --ignore tests/test_docs.py -m "extended and not exhaustive" $(TWO_PROCESSES)

test-exhaustive: setup ## what CI has no time for: most tests of Spark, forecasts held against the clock, variants of others
	@$(RUN)/python -m pytest -m exhaustive

drills: setup ## losses on a cluster of network namespaces: machines, links, processes (as root; needs iproute2, util-linux)
	@RAYREC_REQUIRE_NODES=1 $(RUN)/python -m pytest tests/integration/test_nodes.py

FUZZER := build/fuzz/kernels_fuzz
$(FUZZER): tests/fuzz/kernels_fuzz.c $(NATIVE)
	@mkdir -p $(@D)
	@$(CC) -g -O1 -std=c11 -Wall -Wextra -Wno-unused-value -fsanitize=address,undefined -fno-sanitize-recover=all -Isrc/rayrec/native \
	  $(filter-out %/module.c %.h,$^) -lm -o $@

test-gpu: $(if $(GPU_PYTHON),,setup) ## what only a GPU shows; skipped without one; GPU_PYTHON=python of an environment with CUDA
	@$(or $(GPU_PYTHON),$(RUN)/python) -m pytest tests/gpu

gpu: ## on a machine with a GPU: an environment for CUDA, test-gpu and `rayrec benchmark gpu`, into gpu-results (docs/gpu.md)
	@sh tools/gpu.sh

fuzz: $(FUZZER) ## random inputs for the C kernels under AddressSanitizer and UBSan for FUZZ_S=10 seconds; FUZZ_SEED repeats a run
	@$(FUZZER) $(FUZZ_S) $(FUZZ_SEED)

chaos: setup ## SEEDS=10 runs, something killed every few seconds for CHAOS_S=120 seconds; all must end with the same weights
	@$(RUN)/python tests/chaos.py --seeds $(SEEDS) --seconds $(CHAOS_S)

check: lint format types layers spelling prose ## lint, types, layers, spelling, prose (make -k check: all of them, failed or not)

lint: setup
	@echo "check: ruff check"; $(RUN)/ruff check --quiet .

format: setup
	@echo "check: ruff format"; $(RUN)/ruff format --quiet --diff .

types: setup
	@echo "check: mypy"; $(RUN)/mypy --no-error-summary

layers: setup
	@echo "check: import-linter"; out=$$($(RUN)/lint-imports 2>&1) || { echo "$$out"; exit 1; }

spelling: setup
	@echo "check: codespell, American in the documentation"; $(RUN)/codespell
	@$(RUN)/codespell --builtin en-GB_to_en-US -L labelled *.md docs examples # open_labelled is a name

prose: setup ## words, docstrings and names (tools/prose.py)
	@echo "check: prose"; $(RUN)/python tools/prose.py

docs: setup ## runs every example of the documentation, but for four notebooks on Ray
	@if [ -e tests/test_docs.py ]; then $(RUN)/python -m pytest tests/test_docs.py -m "not exhaustive" -n 2 --max-worker-restart 0 --dist worksteal; else echo "docs: no tests/test_docs.py"; fi

site: setup ## the documentation as a site in build/site, with reference pages made from the code; no network
	@NO_MKDOCS_2_WARNING=1 $(RUN)/python -m mkdocs build --strict

pictures: setup ## the drawings of docs/assets and the figures of README and docs, from benchmarks/results
	@$(RUN)/python tools/pictures.py
	@$(RUN)/python tools/results.py

WHEEL_TOOLS := build/wheel-tools
$(WHEEL_TOOLS)/.installed: packaging/wheel-tools.txt | setup
	@$(RUN)/python -m venv --clear $(WHEEL_TOOLS)
	@$(WHEEL_TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps -r $<
	@touch $@

wheel: $(WHEEL_TOOLS)/.installed ## wheel (Linux, Python 3.11 and later), source archive and fbgemm's stand-in in dist/, checked
	@$(WHEEL_TOOLS)/bin/python tools/wheels.py

bench: setup ## benchmarks, one JSON object a row: BENCHMARKS="ingest train ...", by default those above
	@status=0; for name in $(BENCHMARKS); do echo "bench: $$name" >&2; $(RUN)/rayrec benchmark $$name || status=1; done; exit $$status

clean: ## removes the environment and everything made here, the demo's log and runs too
	@rm -rf $(VENV) build dist demo src/rayrec.egg-info $(SHIM)/build $(SHIM)/*.egg-info .*_cache .hypothesis
	@rm -f src/rayrec/native/*.so
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
