# One environment, made when first needed and brought up to date when its settings change.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BENCH_ARGS ?=
SECONDS ?= 600
SEED ?= 0

BIN := $(VENV)/bin
MADE := $(VENV)/.made-by-$(subst /,-,$(PYTHON))
SETTINGS := $(MADE) pyproject.toml constraints.txt
# The constraints pin torch: no install may bring another one.
INSTALL := $(BIN)/python -m pip install -c constraints.txt --editable
# What pytest returns where PYTEST_ARGS picks no test of a folder.
NONE_PICKED := 5
# Ranks and tests share the cores; threads of their own would fight for them.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test check format examples bench fuzz compiler gpu-check clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed-dev compiler ## make the environment for all other targets

demo: $(VENV)/.installed compiler ## train a small GPT with two pipeline ranks on this machine
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_gpt.py

# Tests of several processes have limits of time: no more than two files of them run at once.
# torch is stricter where this is set; what it then refuses should be seen here.
test: export CI ?= true
test: $(VENV)/.installed-test compiler ## run the tests (PYTEST_ARGS="-k text" picks some)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal \
	  --ignore tests/distributed $(PYTEST_ARGS) || test $$? = $(NONE_PICKED)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile tests/distributed \
	  $(PYTEST_ARGS) || test $$? = $(NONE_PICKED)

check: $(VENV)/.installed-dev ## lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tools/typing_tree.py
	MYPYPATH=.typing $(BIN)/mypy -p fxpipe

format: $(VENV)/.installed-dev ## bring the code into the format that check asks for
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/python tools/update_tables.py

examples: $(VENV)/.installed compiler ## run the examples that need one process
	set -e; for example in $(filter-out examples/train_gpt.py, $(wildcard examples/*.py)); do \
	  echo "$$example"; $(BIN)/python $$example; done

fuzz: $(VENV)/.installed-test ## run random models beside eager (SECONDS=600, SEED=0)
	$(BIN)/python -m tests.fuzz.run --seconds $(SECONDS) --seed $(SEED) --jobs $$(nproc)

bench: $(VENV)/.installed-test compiler ## run the benchmarks (BENCH_ARGS="--preset small")
	mkdir -p build
	$(BIN)/python benchmarks/suite.py --preset medium small deep --json build/bench.json \
	  --picture build/bench.png $(BENCH_ARGS)
	set -e; for name in host_cost step_cost pairs simulated_against_measured simulator; do \
	  echo "$$name"; $(BIN)/python benchmarks/$$name.py; done

gpu-check: $(VENV)/.installed ## check on a GPU what needs one, in six minutes (gpu-check.json)
	$(BIN)/python tools/gpu_check.py --json gpu-check.json

clean: ## remove the environment and what the tools leave behind
	rm -rf $(VENV) .typing .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info

$(MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "$(PYTHON) is Python " \
	  + sys.version.split()[0] + ", expected 3.10 or newer; name one: make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# fxpipe does without numpy, but torch says at every start that it misses it.
$(VENV)/.installed: $(SETTINGS)
	$(INSTALL) . numpy
	@touch $@

$(VENV)/.installed-test: $(SETTINGS)
	$(INSTALL) '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(SETTINGS)
	$(INSTALL) '.[test,dev]'
	@touch $@ $(VENV)/.installed-test $(VENV)/.installed

# torch's compiler writes C++ for the CPU, which is built against the headers of Python.
compiler: $(MADE)
	@$(BIN)/python tools/check_compiler.py
