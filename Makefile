# Two commands matter: `make demo` and `make test`. Both do all set-up first.
PY := .venv/bin/python
# The demo pair, reduced to stay below 20 minutes on two cores.
BENCH := --concurrency 1,8 --requests 8 --max-new-tokens 48 --server-args "--max-total-tokens 16384" --out runs/bench
N ?= 3000
SEED ?= 0
# Processes that share the tests, a file at a time in the order of tests/conftest.py; 0 runs them all in one.
WORKERS ?= 2

.PHONY: demo test check bench soak setup ledger
.DEFAULT_GOAL := help

help:
	@echo "make demo   set up, then serve the demo pair and show what the relay changes"
	@echo "make test   set up, then run all tests (real servers on the CPU platform)"
	@echo "make check  set up, then lint, types and unit tests"
	@echo "make bench  set up, then measure the demo pair: sweep, cost of a round, report in runs/bench"
	@echo "make soak   set up, then N=3000 different requests of SEED=0, greedy ones checked"

setup:
	@scripts/setup.sh

demo: setup
	@$(PY) -m sglang_dflow.cli demo

test: setup
	$(PY) -m pytest tests -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/unit -q -n $(WORKERS) # threads beside another busy process took ten times as long

ledger: setup
	$(PY) -m sglang_dflow.hooks.ledger

bench: setup
	$(PY) -m sglang_dflow.cli bench serving $(BENCH) --repeats 3
	$(PY) -m sglang_dflow.cli bench cost $(BENCH)
	$(PY) -m sglang_dflow.cli bench report runs/bench

soak: setup
	@$(PY) -m sglang_dflow.cli soak --requests $(N) --seed $(SEED)
