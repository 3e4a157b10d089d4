# Everything a clean clone needs is Python 3.11+, make and, for packages without a wheel, a C compiler.
#
#   make setup        .venv with all packages, and the demo model; next to nothing the second time
#   make demo         the whole story on this machine
#   make test         what CI runs: lint, then every test, three fault points among them
#   make test-faults  twenty fault points drawn by seed over a real job
#
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-$(shell cat requirements.lock pyproject.toml Makefile | cksum | tr ' ' '-')
# torch comes by pip, outside the lock: which build is right depends on the machine (CPU, or which CUDA).
# TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu keeps CUDA out where PyPI's default would bring it.
TORCH := torch>=2.13,<2.14
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROTO := protos/jobs.proto protos/admin.proto protos/context.proto
PACKAGES := context_daemon worker orchestrator
PROTOC = $(BIN)/python -m grpc_tools.protoc -I . --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTO)

.PHONY: help setup model demo test lint test-faults protos protos-check lock clean

help:
	@sed -n '3,6s/^# *//p' Makefile

setup: $(STAMP) model

$(STAMP): 
	@test -n "$(PYTHON)" || { echo "setup: no Python 3.11 to 3.13 found; install one or give make PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "setup 1/4: virtual environment in $(VENV), of $$($(PYTHON) --version)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "setup 2/4: torch (200 MB and more, once)"
	@$(PIP) install -qq $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) '$(TORCH)'
	@echo "setup 3/4: packages of requirements.lock, by their hashes"
	@$(PIP) install -qq --require-hashes -r requirements.lock
	@echo "setup 4/4: tideover itself"
	@$(PIP) install -qq --no-deps --no-build-isolation -e .
	@$(PIP) check --quiet
	@rm -f $(VENV)/.setup-*
	@touch $@
	@echo "setup: done; the command is $(BIN)/tideover"

model: $(STAMP)
	@$(BIN)/python -m worker.demo_model >/dev/null

demo: setup
	@$(BIN)/tideover demo

test: setup lint
	@$(BIN)/python -m pytest

lint: $(STAMP) protos-check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint

test-faults: setup
	@TIDEOVER_FAULT_POINTS=20 $(BIN)/python -m pytest -m faults

protos: $(STAMP)
	@$(call PROTOC,.)

protos-check: $(STAMP)
	@out=$$(mktemp -d); trap 'rm -rf "$$out"' EXIT; $(call PROTOC,$$out); \
	for file in protos/*_pb2*.py*; do \
		cmp -s "$$file" "$$out/$$file" || { echo "$$file is not what the .proto files say: run make protos" >&2; exit 1; }; \
	done

# Written without torch (see above) and without any index address. Takes new versions within pyproject's ranges.
lock:
	@printf "torch ; sys_platform == 'never'\n" > $(VENV)/.without-torch
	@$(BIN)/uv pip compile pyproject.toml --extra demo --extra dev --override $(VENV)/.without-torch --universal \
		--python-version 3.11 --generate-hashes --no-emit-package torch --no-emit-index-url --no-annotate --upgrade --quiet \
		--custom-compile-command "make lock" -o requirements.lock
	@! grep -nE '://|^(torch|nvidia)' requirements.lock || { echo "lock: an address or a CUDA package slipped in" >&2; exit 1; }

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
