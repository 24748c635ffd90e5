# Everything from a fresh checkout: `make demo` and `make test` set up what they need in .venv first.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUST := core/Cargo.toml core/Cargo.lock $(wildcard core/src/*.rs core/src/*/*.rs)

.DEFAULT_GOAL := help
.PHONY: help setup demo cluster-demo test test-cluster test-engine check bench routing generate clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(READY) ## build .venv with the Rust core and every dependency

demo: $(READY) ## emulated engines, real relays, a real scheduler, the report (two minutes)
	$(BIN)/servingfleet demo

cluster-demo: $(READY) ## a fleet in real pods on a real Kubernetes (12 minutes the first time, then 90 seconds)
	$(BIN)/python -m tests.cluster demo

test: $(READY) ## all tests that need no engine and no cluster: unit, property, contract, integration, faults, simulation, fuzzing
	$(BIN)/python -m pytest -q -rs

test-cluster: $(READY) ## the operator, the chart and whole fleets on a real Kubernetes (docs/testing-on-kubernetes.md)
	SERVINGFLEET_CLUSTER=$${SERVINGFLEET_CLUSTER:-1} $(BIN)/python -m pytest -q -rs tests/cluster

test-engine: $(READY) ## the same against a real vLLM on CPU and SGLang's own cache, in an environment of their own (5 minutes, 6 GB)
	SERVINGFLEET_ENGINE=1 $(BIN)/python -m pytest -q -rs tests/engine

check: $(READY) ## lint, types, import rules, generated code, stubs, the Rust crate
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=bench $(BIN)/mypy bench/*.py
	$(BIN)/lint-imports
	$(BIN)/python protos/generate.py --check
	$(BIN)/python crds/reference.py --check
	$(BIN)/python docs/generate.py --check
	MYPYPATH=core $(BIN)/python -m mypy.stubtest servingfleet_core._native
	cargo fmt --manifest-path core/Cargo.toml --check
	cargo clippy --manifest-path core/Cargo.toml --locked --all-targets -- -D warnings
	cargo test --manifest-path core/Cargo.toml --locked --no-default-features --quiet

bench: $(READY) ## time and memory of the hot paths, as ratios, into bench/out
	$(BIN)/python bench/run.py

routing: $(READY) ## replay public traces (TRACES=FOLDER) and rewrite the tables of docs/routing.md (a quarter of an hour)
	$(BIN)/python bench/routing.py $(if $(TRACES),--traces $(TRACES))

generate: $(READY) ## regenerate the committed Python of protos/ and the generated pages of docs/
	$(BIN)/python protos/generate.py
	$(BIN)/python crds/reference.py
	$(BIN)/python docs/generate.py

clean: ## remove what the targets above made
	rm -rf $(VENV) build core/target bench/out core/servingfleet_core/*.so

# The stamp is touched last, so that a set-up that was interrupted starts again.
$(READY): pyproject.toml $(RUST)
	@command -v $(PYTHON) >/dev/null || { \
		echo "servingfleet needs Python 3.11 or newer, and '$(PYTHON)' is not there."; \
		echo "Install it (Debian, Ubuntu: apt install python3 python3-venv) or name one: make PYTHON=/path/to/python3"; \
		exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "servingfleet needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V)."; \
		echo "Name a newer one: make PYTHON=/path/to/python3.11"; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "This Python can't make virtual environments (Debian, Ubuntu: apt install python3-venv)."; \
		exit 1; }
	@command -v cargo >/dev/null || { \
		echo "servingfleet builds its core with Rust 1.88 or newer, and 'cargo' is not on the PATH."; \
		echo "Install it with rustup (https://rustup.rs) or your system's packages, then run make again."; \
		exit 1; }
	@echo "== 1/3 virtual environment in $(VENV) ($$($(PYTHON) -V))"
	$(PYTHON) -m venv $(VENV)
	@echo "== 2/3 build tools"
	$(BIN)/python -m pip install --disable-pip-version-check "setuptools>=80" "setuptools-rust>=1.12"
	@echo "== 3/3 Rust core and dependencies (a few minutes the first time)"
	@set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --verbose -e ".[dev]" 2>&1 \
		| tee $(VENV)/setup.log \
		| { grep --line-buffered -E "^ *(Collecting|Downloading|Compiling|Finished|Installing|Successfully|error)" || true; } \
		|| { echo "Set-up failed; the end of $(VENV)/setup.log:"; tail -n 40 $(VENV)/setup.log; exit 1; }
	touch $@
