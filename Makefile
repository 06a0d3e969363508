# Everything sets itself up: on a machine with Python >= 3.10, `make demo` and `make test` need nothing before them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUNS := $(VENV)/.runs
# Hundreds of processes start: without bytecode files each would compile our modules again, and torch's idle threads spin.
TESTS := -m pytest --numprocesses 5 --fork-workers --reruns 1 --rerun-show-tracebacks -raR
TESTS_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1
ANY_TORCH := tests/unit tests/trainer tests/integration -m 'not slow and not same_everywhere'
TORCH ?= 2.15.0

.PHONY: help install demo test compat compat-install check format snapshots safety-table framework-table screenshots bench gpu soak clean

help:
	@echo "make install      .venv with ddpwatch, torchrun, the development tools and the frameworks that the tests watch"
	@echo "make demo         train on two Gloo ranks and watch it here (without a terminal: record and report)"
	@echo "make test         run the tests"
	@echo "make compat       run those that depend on torch or Python with others: TORCH=2.15.0 PYTHON=python3.13"
	@echo "make check        lint, formatting, types, import contracts"
	@echo "make format       rewrite the code as the formatter wants it"
	@echo "make snapshots    accept the dashboard's new look into the tests"
	@echo "make safety-table write the lists in tests/integration/safety_cases.md from what its tests see"
	@echo "make framework-table write the table in docs/frameworks.md from what its tests see"
	@echo "make screenshots  make the screenshots of the README and the guide, from a real and a made-up run"
	@echo "make bench        run the benchmarks and write their tables into benchmarks/RESULTS.md (half an hour)"
	@echo "make gpu          run the benchmarks that need a GPU; without one, on a simulated one as far as that goes"
	@echo "make soak         50 minutes of jobs, viewers and nodes that come, go and are killed: nothing may break or be left"

install: $(STAMP)

$(RUNS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("ddpwatch needs Python 3.10 or newer: make PYTHON=python3.11 …")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "hint: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[torch]'
	@touch $@

$(STAMP): $(RUNS)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[torch]' --group dev
	@touch $@

demo: $(RUNS)
	$(BIN)/python demo/main_job.py

test: install
	$(TESTS_ENV) $(BIN)/python $(TESTS)

compat:
	@$(TESTS_ENV) .ci/compat $(TORCH) $(PYTHON) $(TESTS) $(ANY_TORCH)

compat-install:
	@.ci/compat $(TORCH) $(PYTHON)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

snapshots: install
	$(BIN)/python -m pytest tests/tui --snapshot-update

safety-table: install
	$(BIN)/python -m pytest tests/integration/test_safety.py --write-table

framework-table: install
	$(BIN)/python -m pytest tests/integration/test_unmodified.py --write-table

screenshots: install
	$(BIN)/python docs/make_screenshots.py tests/data/written-by-0.1.mcap
	$(BIN)/python docs/make_screenshots.py --synthetic 16 --name synthetic --views
	$(BIN)/python docs/make_screenshots.py --scenes

bench: install
	$(BIN)/python -m benchmarks

gpu: install
	$(BIN)/python -m benchmarks.gpu

soak: install
	$(BIN)/python -m tests.soak.soak
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -s tests/soak tests/integration/test_death.py \
	    tests/integration/test_each_raises.py tests/unit

clean:
	rm -rf $(VENV) .venv-torch-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
