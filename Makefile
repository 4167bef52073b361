# One command each; every target sets up what it needs in .venv (see tools/venv).
#
#   make demo     train a small GPT on two processes, save, resume, export, generate
#   make test     everything that must hold before a merge: lint, types, layers, tests
#   make lint     the first three alone
#   make bench    the benchmarks
#
# On a machine without a GPU the CPU build of torch is a tenth of the download:
#   make test PIP_FLAGS="--extra-index-url URL"

PYTHON ?= python3
PIP_FLAGS ?=
# One more than CI's cores: ranks wait for each other, so that two leave a sixth of the time of two cores unused.
PYTEST_FLAGS ?= -n 3
export PYTHON PIP_FLAGS

.PHONY: demo test lint format bench dev

demo:
	@tools/venv base demo
	.venv/bin/python examples/demo.py

test: lint
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest $(PYTEST_FLAGS)

lint: dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright --pythonpath .venv/bin/python
	.venv/bin/lint-imports

format: dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: dev
	.venv/bin/python -m benchmarks all

dev:
	@tools/venv base demo dev
