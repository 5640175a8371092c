# Two commands to start with: `make demo` and `make test`. Both build .venv from requirements.lock.

PYTHON ?= python3
BIN := .venv/bin
DEMO ?= demo-output
JOBS ?= 2

# No usage telemetry from Prefect's SDK or server, and patience with a cold embedded server.
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS := 180

# Installed without being compiled ahead, so what is imported must be kept compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint format bench lock clean

demo: .venv/ready
	$(BIN)/signal-batch demo $(DEMO)

test: .venv/ready
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/ready
	$(BIN)/python -m benchmarks $(ARGS)

# The lock is made for all Pythons and platforms at once; it names versions and hashes only.
lock:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --universal --generate-hashes --no-annotate --all-extras \
		--no-header --python-version 3.11 --output-file requirements.lock

.venv/ready: requirements.lock pyproject.toml
	@echo "building .venv: a minute or two, 1.6 GB, once"
	@$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 14) or sys.exit( \
		"Python 3.11 to 3.13 is needed, this is %d.%d; try make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

clean:
	rm -rf .venv $(DEMO) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
