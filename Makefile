# Everything runs from a virtual environment in .venv, which the first target that needs it makes.
#
#   make chat                          start a mesh, talk to it, stop it
#   make chat PROMPT="Who are you?"    one answer
#   make test                          format, lint, types, tests
#   make bench                         tokens per second beside transformers
#
# PYTHON      a Python 3.11 or later with venv      (default: the first one found)
# TORCH       what pip installs as torch            (default: torch==2.13.0)
# PIP_ARGS    more arguments for pip install, e.g. where to find a CPU-only torch
# TEST_JOBS   test files that run at a time          (default: 2)
# BENCH_ARGS  arguments of make bench, e.g. --rounds 1
# GPU_ARGS    arguments of make test-gpu, e.g. --budget-s 560 --parallel 3
# GPU_PYTHON  the Python of make test-gpu, which has torch for CUDA (default: that of .venv)

PYTHON ?=
TORCH ?= torch==2.13.0
PIP_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?= --budget-s 3600
GPU_PYTHON ?= .venv/bin/python
TEST_JOBS ?= 2
# An exported variable of this name is somebody else's; only make's own argument is a question.
ifeq ($(origin PROMPT),command line)
override PROMPT := $(value PROMPT)
else
override PROMPT :=
endif
export PROMPT

VENV := .venv/bin/python
PIP := $(VENV) -m pip install --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
RUN := $(VENV) -P -m
QUICK := not gpu and not gpu2 and not full
# A file is one process's, in the order of tests/conftest.py.
SHARED := --dist loadfile --no-loadscope-reorder
PROTO := .pythonpath/pdmesh/wire/chat.proto
STUBS := grpcio-tools==1.72.2

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev chat test test-full test-gpu bench proto clean

help:
	@echo 'make setup      install into .venv (needs Python 3.11 or later with venv)'
	@echo 'make chat       start a mesh on this machine, talk to it, stop it; PROMPT="..." asks once'
	@echo 'make test       format check, lint, types, and the tests but the large sets'
	@echo 'make test-full  all tests that need no GPU'
	@echo 'make test-gpu   GPU tests and benchmarks; GPU_ARGS="--list", GPU_PYTHON=python3 on a host without .venv'
	@echo 'make bench      tokens per second beside transformers, on the CPU; BENCH_ARGS="--rounds 1"'
	@echo 'make proto      generate the gRPC stubs from wire/chat.proto'
	@echo 'make clean      remove .venv and everything generated'

setup: .venv/.core

setup-dev: .venv/.dev

# pip is the last thing that venv makes.
.venv/bin/pip:
	@python=''; \
	for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo 'pdmesh needs Python 3.11 or later: install it, or name it: make PYTHON=/path/to/python3'; \
	  exit 2; fi; \
	if ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	  echo "$$python has no venv: install it (on Debian and Ubuntu: apt install python3-venv)"; \
	  exit 2; fi; \
	echo "making .venv with $$("$$python" --version)"; \
	rm -rf .venv && "$$python" -m venv .venv

.venv/.core: pyproject.toml constraints.txt | .venv/bin/pip
	@echo 'installing pdmesh into .venv (once; most of it is torch)'
	@$(PIP) '$(TORCH)' -e .
	@touch $@

.venv/.dev: .venv/.core
	@echo 'installing the tools for the tests into .venv (once)'
	@$(PIP) '$(TORCH)' -e '.[dev]'
	@touch $@

chat: .venv/.core
	@if [ -n "$$PROMPT" ]; then exec $(RUN) pdmesh.launch.cli up --chat --prompt "$$PROMPT"; \
	else exec $(RUN) pdmesh.launch.cli up --chat; fi

test: .venv/.dev
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) pytest -n $(TEST_JOBS) $(SHARED) -m '$(QUICK)'

test-full: .venv/.dev
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) pytest -n $(TEST_JOBS) $(SHARED) -m 'not gpu and not gpu2'

ifeq ($(GPU_PYTHON),.venv/bin/python)
test-gpu: .venv/.dev
endif
test-gpu:
	$(GPU_PYTHON) -P tools/gpu_suite.py $(GPU_ARGS)

bench: .venv/.dev
	$(VENV) -P bench/cpu_chat.py $(BENCH_ARGS)

proto: .venv/stubs/.made
	.venv/stubs/bin/python -m grpc_tools.protoc -I .pythonpath --python_out=.pythonpath \
	  --pyi_out=.pythonpath --grpc_python_out=.pythonpath $(PROTO)

# Stubs ask for a grpcio and a protobuf at least as new as what generates them. So that they run
# beside most others, that is an old one, which needs an environment of its own.
.venv/stubs/.made: Makefile | .venv/bin/pip
	.venv/bin/python -m venv .venv/stubs
	.venv/stubs/bin/pip install -q --disable-pip-version-check '$(STUBS)'
	@touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
