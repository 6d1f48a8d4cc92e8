# Two commands matter: `make demo` and `make test`. Both do all set-up first.
PY := .venv/bin/python

.PHONY: demo test check bench setup ledger
.DEFAULT_GOAL := help

help:
	@echo "make demo   set up, then serve the demo pair and show what the relay changes"
	@echo "make test   set up, then run all tests (real servers on the CPU platform)"
	@echo "make check  set up, then lint, types and unit tests"
	@echo "make bench  set up, then measure the demo pair"

setup:
	@scripts/setup.sh

demo: setup
	@$(PY) -m sglang_dflow.cli demo

test: setup
	$(PY) -m pytest tests

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest tests/unit -q

ledger: setup
	$(PY) -m sglang_dflow.hooks.ledger

bench: setup
	$(PY) -m benchmarks.demo_pair
