# Every target works from a bare checkout with Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# the tests start some hundred processes, each of which would compile the whole program where this is set
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-real test-compiled compiled check bench format clean

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

# the hot modules as C: a wheel in a venv of its own, so that nothing compiled is ever in the tree; see docs/adr/0021
COMPILED := build/compiled
WHEEL_SOURCES := $(shell find coordinator instances -type f -not -path '*/__pycache__/*') \
  pyproject.toml mypy.ini constraints.txt README.md LICENSE
compiled: $(COMPILED)/.ready

$(COMPILED)/.ready: $(STAMP) $(WHEEL_SOURCES)
	rm -rf $(COMPILED)
	mkdir -p $(COMPILED)/src
	@cp --parents $(WHEEL_SOURCES) $(COMPILED)/src
	HATCH_BUILD_HOOKS_ENABLE=1 PIP_CONSTRAINT="$(CURDIR)/constraints.txt" \
	  $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(COMPILED)/dist $(COMPILED)/src
	$(PYTHON) -m venv $(COMPILED)/.venv
	$(COMPILED)/.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(COMPILED)/dist/*.whl
	$(COMPILED)/.venv/bin/python -c "import pathlib, site; pathlib.Path(site.getsitepackages()[0], 'tools.pth').write_text( \
	  '$(CURDIR)/' + next(map(str, pathlib.Path('$(VENV)/lib').glob('python*/site-packages'))) + '\n')"
	touch $@

# tests on that wheel, from a folder that does not have the sources; those that put something of their own in the place
# of what is compiled are left out
COMPILED_TESTS := tests/conformance $(addprefix tests/unit/,api dispatch engines observability relay scheduler security server transport wire) \
  $(patsubst %,tests/e2e/test_%.py,client_needs commands disconnect drain failover limits openai_sdk recompute vllm_sglang workers)
test-compiled: compiled
	rm -rf $(COMPILED)/run
	mkdir -p $(COMPILED)/run
	cp -r tests bench configs docs deploy docker pyproject.toml README.md $(COMPILED)/run
	cd $(COMPILED)/run && ../.venv/bin/python -m pytest -n 3 --dist loadgroup -m "not uncompiled" $(COMPILED_TESTS) $(ARGS)

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

bench: setup compiled
	$(BIN)/python -m bench $(ARGS)

format: setup
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --fix --quiet .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
