# make demo    from nothing to a trained, sampled GPT in a few minutes, on the GPU or the CPU
# make test    the test suite          make lint    ruff and mypy
# make test-long                       what is too much for every change: damage, kills, damaged files;
#                                      LONG=tests/train runs those of one folder
# make fuzz ROUNDS=5                  property tests with fresh random examples
# make catalogues                      what people read, extracted and compiled for translation
# make gpu-test PYTHON=...             tests marked gpu with a given interpreter, nothing installed
# Needs Python >= 3.11 and a package index; everything goes into .venv.

VENV := .venv
BIN := $(VENV)/bin
# The first of these that runs and is new enough; `make PYTHON=/path/to/python` overrules it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
# Two cores run two workers; each test process computes with one thread.
WORKERS ?= auto

.PHONY: demo test test-long fuzz lint format golden frozen catalogues picture gpu-test clean
.DEFAULT_GOAL := demo

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python >= 3.11 found"; \
		echo "hint: install one, or name it: make demo PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment"; \
		echo "hint: on Debian and Ubuntu: apt install python3-venv"; exit 1; }

$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing; torch is the large part: with CUDA about 3 GB to download'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,gpt2-offline,dev]'
	@touch $@ $(VENV)/.train

# --fresh: every demo starts over; the run before is kept beside it.
demo: $(VENV)/.train
	$(BIN)/onecard prepare stdlib
	$(BIN)/onecard train config/demo.py --fresh
	$(BIN)/onecard sample --out_dir=out-demo --num_samples=3 --max_new_tokens=300 --top_p=0.9 \
		--start='def __init__(self'
	@echo; echo 'Go on by yourself: . $(BIN)/activate && onecard --help'

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS)

# What takes too long for every change: many random damages, kills and damaged files.
LONG ?= tests
test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) -m long $(LONG)

# `make test` tries the same examples every time; this looks for new ones, and stops at the first that fails.
ROUNDS ?= 5
fuzz: $(VENV)/.dev
	@for round in $$(seq $(ROUNDS)); do \
		$(BIN)/python -m pytest -n $(WORKERS) -m hypothesis --hypothesis-profile=fuzz -q || exit 1; done

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# After a change that is meant to move the losses; look at the difference before committing it.
golden: $(VENV)/.dev
	ONECARD_RECORD_GOLDEN=1 $(BIN)/python -m pytest tests/train/test_golden.py

# After a change that is meant to move what onecard answers or writes (tests/frozen/README.md); look at the difference.
frozen: $(VENV)/.dev
	ONECARD_RECORD_FROZEN=1 $(BIN)/python -m pytest tests/frozen

# After a change of what `_()` says. Sentences without a translation are named; they go into the .po files, and
# make catalogues once more compiles them.
catalogues: $(VENV)/.dev
	$(BIN)/python tools/catalogues.py

# The picture in the README, drawn from what plan says.
picture: $(VENV)/.dev
	COLUMNS=80 ONECARD_LANG=en $(BIN)/python tools/terminal_picture.py docs/plan.svg \
		onecard plan config/train_fineweb.py --gpu "RTX 4070"
	ONECARD_LANG=en $(BIN)/python tools/report_pictures.py docs

# By name, not by marker alone: collecting the other files would import what a GPU machine may lack.
gpu-test:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu $(wildcard tests/*/test_*_gpu.py)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
