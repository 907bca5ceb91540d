# `make demo` and `make test` are all there is to know.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test test-slow lint torture attack-suite mutants gpu-check docs release-check clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

demo: $(VENV)/.demo  # installs what the demo needs and no more
	$(BIN)/rgp demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -m "not slow" -n 2 --dist worksteal

test-slow: setup  # what `make test` leaves out: minutes each, or the long form of a test that is in it
	$(BIN)/pytest -m slow -n 2 --dist worksteal

torture: setup  # kill a training process at 50 random moments, and a search
	$(BIN)/python tests/torture/kill.py --kills 50
	$(BIN)/python tests/torture/kill.py --kills 50 --bands 3
	$(BIN)/python tests/torture/kill_tune.py --kills 40
	$(BIN)/python tests/torture/kill_tune.py --kills 40 --bands 3
	$(BIN)/python tests/torture/kill_tune.py --kills 150 --sweep

attack-suite: setup  # scripts that once got an epsilon that is too small; each has to be refused, noticed or bounded
	$(BIN)/pytest tests/hostile -m ""

mutants: setup  # break the mechanism in one place at a time, and show which test notices; writes docs/mutants.md
	$(BIN)/python tests/mutants/run.py --jobs 2

gpu-check: setup  # for the owner of a GPU; writes a note into benchmarks/
	$(BIN)/pip install --quiet --constraint constraints.txt '.[bench]'
	$(BIN)/python benchmarks/gpu_check.py

$(VENV)/.docs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs  # the site, into site/; a broken link or a missing page is an error. python3 -m http.server -d site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

release-check:  # sdist and wheel; the wheel in a fresh environment, where it has to import, train, account and answer
	$(PYTHON) tests/release/check.py

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .mypy_cache
