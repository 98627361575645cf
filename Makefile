# Every target works from a bare checkout with Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup demo test check bench format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

demo: setup
	$(BIN)/pd-coordinator demo $(ARGS)

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

check: setup
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 -m "not slow" tests/unit tests/conformance tests/repo

bench: setup
	@set -e; if [ -f bench/__main__.py ]; then $(BIN)/python -m bench $(ARGS); else \
	for script in bench/bench_*.py; do echo "$$script"; $(BIN)/python -m "bench.$$(basename "$$script" .py)" $(ARGS); done; fi

format: setup
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --fix --quiet .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
