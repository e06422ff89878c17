# `make demo` and `make test` set themselves up in .venv; PYTHON picks the interpreter (3.11 or newer), VENV the folder,
# SELECT the tests by their markers.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SELECT ?= not parity

.PHONY: demo test parity lint clean

demo: $(VENV)/.installed
	$(BIN)/python -m mla_jax.generate "def fibonacci(n):"

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "$(SELECT)" -n auto --dist loadgroup

# compares with transformers and llama.cpp in the same run; the first time it builds llama.cpp, which takes some minutes
parity: $(VENV)/.installed-dev,parity $(VENV)/.installed-llama.cpp
	$(BIN)/python -m pytest -m parity -n 2

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

# built from the source distribution, which holds llama.cpp's converter as well
LLAMA = 0.3.36
LLAMA_FLAGS = -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF \
	-DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF -DGGML_OPENMP=OFF
$(VENV)/.installed-llama.cpp: $(VENV)/bin/python
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest .llama.cpp llama-cpp-python==$(LLAMA)
	tar -xzf .llama.cpp/llama_cpp_python-$(LLAMA).tar.gz -C .llama.cpp --strip-components=3 $(addprefix llama_cpp_python-$(LLAMA)/vendor/llama.cpp/,conversion gguf-py convert_hf_to_gguf.py)
	CMAKE_ARGS="$(LLAMA_FLAGS)" $(BIN)/python -m pip install --quiet .llama.cpp/llama_cpp_python-$(LLAMA).tar.gz
	touch $@

clean:
	rm -rf $(VENV) .llama.cpp
