# Every target sets itself up in .venv; nothing else needs to be installed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := test
.PHONY: setup demo test test-all chaos lint types layers check bench docs dist clean

setup: $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m shoestring.lab.demo

# A few minutes: everything but the tests that train long or start processes.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

test-all: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Kills, crash points, damaged and hostile files, full disks: counts at the end (docs/reliability.md).
KILLS ?= 100
FUZZ ?= 5000
CALLS ?= 100
POINTS ?= 40
DISKS ?= 5
SIGNALS ?= 10
SHARED ?= 3
chaos: $(STAMP)
	KILLS=$(KILLS) FUZZ=$(FUZZ) CALLS=$(CALLS) POINTS=$(POINTS) DISKS=$(DISKS) \
	SIGNALS=$(SIGNALS) SHARED=$(SHARED) $(BIN)/python -m pytest tests/chaos

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Which stage may import which (pyproject.toml, docs/flow.md).
layers: $(STAMP)
	$(BIN)/lint-imports --no-logo

check: lint types layers test

bench: $(STAMP)
	$(BIN)/python benchmarks/profile_accuracy.py

# The site, in build/site; a dead link or a warning ends it.
docs: $(STAMP) $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# sdist and wheel, in dist/.
dist: $(STAMP)
	$(PIP) install -q -c constraints.txt build
	rm -rf dist build/lib
	$(BIN)/python -m build

# Keeps .venv and runs/: both are slow to make again.
clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) else "shoestring needs Python 3.11 or newer, $(PYTHON) is " + v + "; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.docs-installed: $(STAMP)
	$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@

# torch alone and first, so that the pin is resolved before anything can ask for another build.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
