# make demo | make test | make test-all: everything below sets itself up in .venv; nothing is installed elsewhere.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MINISTACK := .venv-ministack
MINISTACK_STAMP := $(MINISTACK)/.installed
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
# What the generated layouts came to, from which docs/layouts.md has its table.
OUTCOMES := build/layouts.jsonl
export OMP_NUM_THREADS := 1

.PHONY: help setup setup-test demo test test-all lint types imports proto api api-baseline unit service browser distributed infra e2e chaos readme wheel-test clean

help:
	@echo "make demo      prepare a corpus, start the services, train on 8 ranks, kill a rank and each service, change the layout, prove it, export (about 3 minutes)"
	@echo "make test      linters, strict types, import rules, contracts, unit, service, browser, distributed and end-to-end tests (on 2 cores about 100 minutes, 60 with --jobs=2)"
	@echo "make test-all  the same with the long tables and storms"
	@echo "make clean     remove .venv, .venv-ministack, .venv-peers, caches and ./runs"

setup: $(STAMP)
setup-test: $(STAMP) $(MINISTACK_STAMP) $(PEERS_STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Phalanx needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "python3 has no venv module: install it (Debian, Ubuntu: apt-get install python3-venv)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

$(MINISTACK_STAMP): tests/ministack-requirements.txt
	@test -x $(MINISTACK)/bin/python || $(PYTHON) -m venv $(MINISTACK)
	$(MINISTACK)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/ministack-requirements.txt
	@touch $(MINISTACK_STAMP)

# Other projects' loaders, to compare with: their own packages first, those of .venv (torch among them) behind.
$(PEERS_STAMP): tests/peers-requirements.txt | $(STAMP)
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@for folder in $(PEERS)/lib/python*/site-packages; do $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >$$folder/project.pth; done
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --requirement tests/peers-requirements.txt
	@touch $(PEERS_STAMP)

demo: setup
	@$(BIN)/phalanx demo $(ARGS)

# Several of them at once: make --jobs=2 --output-sync=target test; the longest come first.
test: lint types imports proto e2e service unit chaos distributed readme browser

test-all: lint types imports proto setup-test
	@mkdir -p build && rm -f $(OUTCOMES)
	PHALANX_LAYOUT_OUTCOMES=$(CURDIR)/$(OUTCOMES) $(BIN)/pytest tests -m "long or not long" $(ARGS); status=$$?; \
		test ! -e $(OUTCOMES) || $(BIN)/python scripts/layout_table.py $(OUTCOMES) || exit 1; exit $$status

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-test
	$(BIN)/mypy

imports: setup-test
	$(BIN)/python scripts/lint_imports.py

# The contracts: lint, format, no breaking change against the baseline, and generated code that is fresh.
proto: setup-test
	cd proto && ../$(BIN)/buf lint && ../$(BIN)/buf format --diff --exit-code && ../$(BIN)/buf breaking --against baseline.json
	$(BIN)/python scripts/generate_api.py --check

api: setup-test
	cd proto && ../$(BIN)/buf format --write
	$(BIN)/python scripts/generate_api.py

# What `proto` compares with; made anew only when a release fixes the contracts as they are.
api-baseline: setup-test
	cd proto && ../$(BIN)/buf build --exclude-source-info --output baseline.json

unit: setup-test
	$(BIN)/pytest tests/unit -m "not long" -q $(ARGS)

service: setup-test
	$(BIN)/pytest tests/service -m "not long" -q $(ARGS)

# The monitor's page in a real browser; skipped with a reason where there is no chromium.
browser: setup-test
	$(BIN)/pytest tests/browser -m "not long" -q $(ARGS)

# Terraform's module and docker compose, for real where their engines can be had (see .ci/run).
infra: setup-test
	$(BIN)/pytest tests/infra -q $(ARGS)

distributed: setup-test
	$(BIN)/pytest tests/distributed -m "not long" -q $(ARGS)

e2e: setup-test
	$(BIN)/pytest tests/e2e -m "not long" -q $(ARGS)

# Whole runs, with kills of ranks, services and agents at random moments, and cut networks.
chaos: setup-test
	$(BIN)/pytest tests/chaos -m "not long" -q $(ARGS)

readme: setup-test
	$(BIN)/pytest tests/readme -q $(ARGS)

clean:
	rm -rf $(VENV) $(MINISTACK) $(PEERS) build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
