# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
EXTRAS ?= cpu,test
RUN ?= results/quickstart
WORKERS ?= 2
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))
VERSION := import sys; print(sys.version_info[:2])
# The lock is of the CPU environment that CI tests; GPU builds of the same versions need other libraries.
LOCK := $(if $(findstring cpu,$(EXTRAS)),-c requirements.lock)
PACKAGES := pipelinerl conf tests benchmarks assets

.PHONY: install quickstart test test-fast test-slow gpu-check check format docs redis browser clean version lock
.DELETE_ON_ERROR:

install: version
	@$(MAKE) --no-print-directory $(VENV)/.installed

# Asked every time: the environment may be there, and of a Python that cannot run it.
version:
	@test -n "$(PYTHON)" || { echo "no python3.11 found: install Python 3.11 with its venv module, or set PYTHON=…"; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "$(PYTHON) is $$($(PYTHON) -V): Python 3.11 or 3.12 is needed; set PYTHON=…"; exit 1; }
	@if [ -e $(VENV) ] && [ "$$($(PY) -c '$(VERSION)' 2>/dev/null)" != "$$($(PYTHON) -c '$(VERSION)')" ]; then \
	  echo "$(VENV) is of another Python: building it anew"; rm -rf $(VENV); fi

# The CPU build of vLLM asks for torchvision, torchaudio and torchcodec. Where only their CUDA builds are to be had they
# cannot load beside CPU torch and break the import of transformers' models; text models need none of the three.
$(VENV)/.installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q $(LOCK) -e '.[$(EXTRAS)]'
	$(PY) -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# Writes down what is installed: remove .venv and requirements.lock's pins of what is to move, install, lock, test.
lock: install
	$(PY) -m pip list --format=freeze --exclude pip --exclude pipelinerl | sed 's/+.*//; s/_/-/g' | tr A-Z a-z | LC_ALL=C sort > requirements.lock

quickstart: install
	$(PY) -m pipelinerl.launch --config-name=quickstart output_dir=$(RUN)

# `make check` runs these, and pytest does not repeat them.
SHAPE := $(addprefix tests/contract/test_,imports.py structure.py metrics.py duplicates.py)
# One thread per worker, because threads of two workers that wait for each other take the cores from the tests.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest $(addprefix --ignore=,$(SHAPE)) \
  -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25

test: install redis browser check
	$(PYTEST)

# Minutes: no server, no run.
test-fast: install
	$(PYTEST) tests/unit tests/contract tests/numerics

test-slow: install redis
	$(PYTEST) -m slow -p tests.slow_results

# For a machine with a GPU and EXTRAS=gpu,test. Neither CI nor any run of this project's authors has had one yet.
gpu-check: install
	$(PY) -m benchmarks.gpu_check --out results/gpu_check.json

check: install
	$(PY) -m ruff check $(PACKAGES)
	$(PY) -m ruff format --check $(PACKAGES)
	$(PY) -m mypy
	$(PY) -m pytest -q $(SHAPE)
	$(PY) -m pipelinerl.config.docs --check
	$(PY) -m pipelinerl.observability.catalogue --check

format: install
	$(PY) -m ruff check --fix $(PACKAGES)
	$(PY) -m ruff format $(PACKAGES)
	$(PY) -m pipelinerl.config.docs
	$(PY) -m pipelinerl.observability.catalogue

# The site, in site/. A broken link or reference is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -q

# The tests of `streams=redis` talk to a real server.
redis:
	@command -v redis-server >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  echo "installing redis-server with apt-get, which the tests of streams=redis need" && apt-get -qq update && apt-get -qq install -y redis-server >/dev/null; } || { \
	  echo "redis-server is missing: install it (Debian: sudo apt-get install redis-server) and run make again"; exit 1; }

# The report's tests look at it in a real browser. Without one they are skipped.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  echo "installing chromium with apt-get, for the tests of the report" && apt-get -qq update && \
	  apt-get -qq install -y --no-install-recommends chromium >/dev/null; } || \
	  echo "no Chromium: the report's browser tests are skipped (Debian: sudo apt-get install chromium)"

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
