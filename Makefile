# Every target works from a bare checkout with Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# the tests start some hundred processes, each of which would compile the whole program where this is set
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-real check bench format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

demo: setup
	$(BIN)/pd-coordinator demo $(ARGS)

# three at a time on two cores: a good part of the time goes into waiting
test: setup
	$(BIN)/python -m pytest -n 3 --dist loadgroup $(ARGS)

# a real vLLM pair, built in a folder of its own (minutes, once); see docs/engines/vllm-real.md
REAL_VLLM_HOME ?= /tmp/pd-real-vllm-$(shell id -un)
test-real: setup
	PYTHON="$(PYTHON)" bash tests/real/setup.sh "$(REAL_VLLM_HOME)"
	PD_REAL_VLLM="$(REAL_VLLM_HOME)" $(BIN)/python -m pytest tests/real $(ARGS)

check: setup
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 -m "not slow" tests/unit tests/conformance tests/repo tests/deploy

bench: setup
	$(BIN)/python -m bench $(ARGS)

format: setup
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --fix --quiet .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
