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

CHECK_PYTHON = $(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 14) or sys.exit( \
	"Python 3.11 to 3.13 is needed, this is %d.%d; try make PYTHON=python3.11" % v[:2])'

.PHONY: demo test lint format bench lock clean

demo: .venv/demo
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

# What the demo needs, in the versions of the lock.
.venv/demo: requirements.lock pyproject.toml
	@echo "building .venv for the demo: a minute or two, once"
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv
	sed -e 's/ *\\$$//' -e '/^ *--hash/d' requirements.lock > .venv/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint .venv/constraints.txt --editable '.[sklearn]'
	@touch $@

.venv/ready: requirements.lock pyproject.toml
	@echo "building .venv with every extra and the test tools: two or three minutes, 2 GB, once"
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@ .venv/demo

clean:
	rm -rf .venv $(DEMO) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
