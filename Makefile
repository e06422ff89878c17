# `make demo` and `make test` set themselves up in .venv; PYTHON picks the interpreter (3.11 or newer), VENV the folder.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test parity lint clean

demo: $(VENV)/.installed
	$(BIN)/python -m mla_jax.generate "def fibonacci(n):"

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not parity" -n auto

# compares with transformers in the same run; needs Python 3.11 or newer with torch 2.13
parity: $(VENV)/.installed-dev,parity
	$(BIN)/python -m pytest -m parity

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-%: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	touch $@

clean:
	rm -rf $(VENV)
