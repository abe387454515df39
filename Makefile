# `make run` and `make test` need Python 3.11 or newer and nothing else; everything is installed into .venv.
# Which index pip uses is up to the user's own pip configuration. GNU make 3.81, which macOS has, is enough.

PYTHON ?= python3
TORCH ?= 2.13.0

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq

.PHONY: help run docs test lint types test-core test-tensors test-vllm test-sglang test-realtime test-long bench gpu clean

help:
	@echo 'make run        install into .venv and run the demonstration (options: ARGS="--help")'
	@echo 'make test       lint, check formatting and types, and run the tests: five to six minutes on two cores'
	@echo 'make test-long  run the tests that take minutes, and check types as on macOS: more than an hour on two cores'
	@echo 'make bench      run the benchmark (ARGS=TRACE)'
	@echo 'make gpu        on a machine with an NVIDIA GPU: tests, bytes, a minute of random copies, and a table of how fast'
	@echo 'make docs       build the documentation as a site in build/docs'
	@echo 'make clean      remove .venv and all caches'
	@echo
	@echo 'Another interpreter: make run PYTHON=python3.12'

run: .venv/.installed
	$(BIN)/kvcache run $(ARGS)

# Where nothing compiled is kept, all of it is compiled again for each worker, and for each process of a test.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q
QUICK := -m 'not long and not realtime'

# All side by side, and then what wants the machine for itself.
test: .venv/.installed-dev
	@$(MAKE) --no-print-directory -k -j 4 lint types test-core test-tensors
	@$(MAKE) --no-print-directory test-realtime

lint: .venv/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/.installed-dev
	$(BIN)/mypy

# The core needs no torch, so its workers need not load it.
test-core: .venv/.installed-dev
	$(PYTEST) -n auto --dist loadscope $(QUICK) --ignore=tests/tensors --ignore=tests/vllm --ignore=tests/sglang

test-tensors: .venv/.installed-dev
	$(PYTEST) -n 2 --dist loadscope $(QUICK) tests/tensors

# A whole vLLM runs in them, which takes minutes: .ci/run installs it.
test-vllm: .venv/.installed-dev
	$(PYTEST) -n 2 --dist loadscope $(QUICK) tests/vllm

# SGLang's scheduler runs in them, where SGLANG_VENV names an environment with it.
test-sglang: .venv/.installed-dev
	$(PYTEST) -n 2 --dist loadscope $(QUICK) tests/sglang

test-realtime: .venv/.installed-dev
	$(PYTEST) -m 'realtime and not long' --ignore=tests/tensors --ignore=tests/vllm --ignore=tests/sglang

# Types as macOS has them: with a cache of its own, since the usual one would be thrown away each time.
test-long: .venv/.installed-dev
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin
	$(PYTEST) -n auto --dist worksteal -m long

docs: .venv/.installed-dev
	@rm -rf build/pages && mkdir -p build && cp -R docs build/pages
	@$(BIN)/python -m sphinx -q -W --keep-going -b html build/pages build/docs
	@echo 'build/docs/index.html'

bench: .venv/.installed-dev
	$(BIN)/python benchmarks/manager.py $(ARGS)

# With PyTorch's CUDA build in the place of the CPU's. What has failed stops it, and the table is written last.
gpu: .venv/.installed-dev
	@$(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || \
	  $(PIP) --force-reinstall 'torch==$(TORCH)'
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else f"PyTorch {torch.__version__} finds no GPU")'
	$(BIN)/kvcache doctor
	$(PYTEST) $(QUICK) tests/tensors
	$(BIN)/kvcache run
	PYTHONPATH=. $(BIN)/python benchmarks/copies.py --device cuda --mib 1024 --endure 60 --out benchmarks/results/copies.md

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps below say what is installed, so that a second call goes straight to its work.

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Python 3.11 or newer is needed, and "$(PYTHON)" is not it: name another, as in'; \
	  echo '  make $(MAKECMDGOALS) PYTHON=python3.12'; \
	  test "$$(uname)" != Darwin || echo 'On macOS: brew install python@3.13, or the installer of python.org'; \
	  exit 1; }
	@echo 'Creating .venv'
	@$(PYTHON) -m venv .venv || { echo 'On Debian and Ubuntu: apt install python3-venv'; exit 1; }
	@touch $@

# A build without CUDA is a tenth of the size, but only some indexes have it; elsewhere the published build serves.
# For macOS there is only one, and without it .venv goes again, so that the next call can be with another Python.
.venv/.installed-torch: .venv/.created
	@echo 'Installing PyTorch $(TORCH): once, about 200 MB and a minute for the CPU build'
	@if test "$$(uname)" = Darwin; then \
	  $(PIP) 'torch==$(TORCH)' || { \
	    echo 'If there is none for this machine: PyTorch $(TORCH) has builds for macOS 14 and newer on Apple silicon,'; \
	    $(BIN)/python -c 'import platform as p; print("for Python 3.11 to 3.14; this is", p.python_version(), "on", p.platform())'; \
	    echo 'With another Python: make $(MAKECMDGOALS) PYTHON=python3.13'; rm -rf .venv; exit 1; }; \
	else \
	  $(PIP) 'torch==$(TORCH)+cpu' 2>/dev/null || { \
	    echo "pip's index has no CPU build: downloading the CUDA build, about 3 GB, which may take minutes. To avoid that:"; \
	    echo '  make $(MAKECMDGOALS) PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu'; \
	    $(PIP) 'torch==$(TORCH)'; }; \
	fi
	@touch $@

.venv/.installed: pyproject.toml .venv/.installed-torch
	@echo 'Installing kvcache: a few seconds'
	@$(PIP) --editable '.[cli,hash,torch,zstd]'
	@touch $@

.venv/.installed-dev: pyproject.toml .venv/.installed
	@echo 'Installing the tools for tests: half a minute'
	@$(PIP) --editable '.[dev]'
	@touch $@
