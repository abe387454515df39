# `make run` and `make test` need Python 3.11 or newer and nothing else; everything is installed into .venv.
# Which index pip uses is up to the user's own pip configuration.

PYTHON ?= python3
TORCH ?= 2.13.0

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq

.PHONY: help run test test-long bench clean

help:
	@echo 'make run        install into .venv and run the demonstration (options: ARGS="--help")'
	@echo 'make test       lint, check formatting and types, and run the tests: two to five minutes on two cores'
	@echo 'make test-long  run the tests that take minutes'
	@echo 'make bench      run the benchmark (ARGS=TRACE)'
	@echo 'make clean      remove .venv and all caches'
	@echo
	@echo 'Another interpreter: make run PYTHON=python3.12'

run: .venv/.installed
	$(BIN)/kvcache run $(ARGS)

test: .venv/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -q -n auto

test-long: .venv/.installed-dev
	$(BIN)/pytest -q -n auto -m long

bench: .venv/.installed-dev
	$(BIN)/python benchmarks/manager.py $(ARGS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps below say what is installed, so that a second call goes straight to its work.

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Python 3.11 or newer is needed, and "$(PYTHON)" is not it: name another, as in'; \
	  echo '  make $(MAKECMDGOALS) PYTHON=python3.12'; exit 1; }
	@echo 'Creating .venv'
	@$(PYTHON) -m venv .venv || { echo 'On Debian and Ubuntu: apt install python3-venv'; exit 1; }
	@touch $@

# A build without CUDA is a tenth of the size, but only some indexes have it; elsewhere the published build serves.
.venv/.installed-torch: .venv/.created
	@echo 'Installing PyTorch $(TORCH): once, about 200 MB and a minute for the CPU build'
	@$(PIP) 'torch==$(TORCH)+cpu' 2>/dev/null || { \
	  echo 'No CPU build in the index: installing the published one, which may be several GB and take minutes'; \
	  $(PIP) 'torch==$(TORCH)'; }
	@touch $@

.venv/.installed: pyproject.toml .venv/.installed-torch
	@echo 'Installing kvcache: a few seconds'
	@$(PIP) --editable '.[cli,hash,torch]'
	@touch $@

.venv/.installed-dev: pyproject.toml .venv/.installed
	@echo 'Installing the tools for tests: half a minute'
	@$(PIP) --editable '.[dev]'
	@touch $@
