# From a fresh clone: `make demo` or `make test`.
PYTHON ?= python3.11
EXTRA ?= cpu
BIN := .venv/bin

.PHONY: demo quick check test mutation faults soak clean

demo: .venv/installed
	$(BIN)/rollforward run demo

# The tests that need no Ray, no vLLM and no servers; tests/conftest.py says which.
quick: .venv/installed
	$(BIN)/python -m pytest -n 2 -m quick

test: check
	$(BIN)/python -m pytest -n 3 --durations=25
	$(BIN)/python tests/mutation/run.py

# Plants twenty bugs into a copy of the library, one at a time; the tests must catch each.
mutation: .venv/installed
	$(BIN)/python tests/mutation/run.py

# Kills every part of a run at every point of a step, then 30 parts at random; writes the table in docs/reliability.md.
faults: .venv/installed
	$(BIN)/python tests/faults/matrix.py --write docs/reliability.md
	$(BIN)/python tests/faults/matrix.py --random 30

# Trains the tiny model for 2,000 steps; fails if a process, its files or the step time grow.
soak: .venv/installed
	$(BIN)/python -m benchmarks.soak

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.venv/installed: pyproject.toml $(wildcard requirements/*.lock)
	$(PYTHON) -m venv .venv
	$(BIN)/python install.py $(EXTRA)
	touch $@

clean:
	rm -rf .venv
