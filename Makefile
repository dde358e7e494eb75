# Each target does all the set-up on a fresh machine with Python 3.11 or newer; a second run reuses it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CUDA library takes a minute to build; without a device there is nothing to run it on.
TORCHREC_KT_CUDA ?= $(if $(wildcard /dev/nvidia0),AUTO,OFF)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo demo-distributed test check benchmark clean

demo: $(VENV)/.ready
	$(BIN)/python -m examples.movielens.train

demo-distributed: $(VENV)/.ready
	$(BIN)/torchrun --standalone --nproc_per_node 2 examples/train_distributed.py

# Files in parallel; what a file sets up once, such as processes or a compiled library, stays its own.
test: check
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# Measures this machine and writes the report that the README shows: 15 to 20 minutes, nothing else running.
benchmark: $(VENV)/.ready
	$(BIN)/python -m torchrec_kt.benchmark --json docs/benchmark/cpu.json --report docs/benchmark --readme README.md

# The package goes in last and editable: a change of the sources needs no new set-up.
$(VENV)/.ready: $(wildcard requirements/*.txt) pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements/cpu.txt -r requirements/dev.txt
	$(PIP) install --no-deps -r requirements/cpu-no-deps.txt
	TORCHREC_KT_CUDA=$(TORCHREC_KT_CUDA) $(PIP) install --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
