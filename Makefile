# `make demo` and `make test` set themselves up in .venv; PYTHON picks the interpreter (3.11 or newer), VENV the folder,
# SELECT the tests by their markers, WORKERS the processes. DEEP=1 runs the deep tests, too; COMPILE=users has JAX optimise.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SELECT ?= not parity and not clients
WORKERS ?= auto

.PHONY: demo test deep about-demo about-tests parity clients aiperf ray lint docs clean

demo: about-demo $(VENV)/.installed
	$(BIN)/python -m mla_jax.generate --temperature 0 "def __eq__(self, other):"

test: about-tests $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "$(SELECT)" -n $(WORKERS) --dist loadgroup

# the tests that take long, of which `make test` runs none: of the files that have not passed with these sources, or some FILES of them
deep: $(VENV)/.installed-dev
	$(BIN)/python tests/deep.py "$(SELECT)" 2 $(FILES)

about-demo:
	@test -e $(VENV)/.installed || echo "Once, make demo installs mla-jax into $(VENV), and downloads about 190 MB for that."

# .ci/run writes suite.txt: the tests, and the processor's minutes that they and the installation took where nothing was compiled.
about-tests:
	@test -e $(VENV)/.installed-dev || echo "Once, make test installs mla-jax and test tools into $(VENV), and downloads about 330 MB for that."
	@read tests minutes <tests/suite.txt; cores=$$(getconf _NPROCESSORS_ONLN); \
	echo "Then about $$tests tests run, about $$((1 + minutes / cores)) minutes on $$cores cores; a second run takes half of that."

# compares with transformers and llama.cpp in the same run; the first time it builds llama.cpp, which takes some minutes
parity: $(VENV)/.installed-dev,parity $(VENV)/.installed-llama.cpp
	$(BIN)/python -m pytest -m parity -n 2

# Ray is large: VENV=.venv-ray make ray
ray: $(VENV)/.installed-dev,ray
	$(BIN)/python -m pytest tests/scaling/test_ray.py

# LangChain, litellm and schemathesis against the server; CASES=20000 has schemathesis make so many requests
clients: $(VENV)/.installed-dev,clients
	$(BIN)/python -m pytest -m clients -n 2 --dist loadscope tests/clients

# aiperf measures the server; it needs other versions of packages than the test tools, so it has an environment of its own
AIPERF = $(VENV)-aiperf
aiperf: $(VENV)/.installed-dev $(AIPERF)/bin/aiperf
	PATH="$(abspath $(AIPERF))/bin:$$PATH" $(abspath $(BIN))/python -m pytest tests/serve/test_aiperf.py

$(AIPERF)/bin/aiperf:
	$(PYTHON) -m venv $(AIPERF)
	$(AIPERF)/bin/python -m pip install -qq --disable-pip-version-check aiperf==0.13.0

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

# pip is quiet, so a dot says every two seconds that it is at work. $(1) is what it installs.
define install
	@printf "installing %s into $(VENV) " "$(1)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable "$(1)" & pip=$$!; trap "kill $$pip" INT TERM; \
	while kill -0 $$pip 2>/dev/null; do printf .; sleep 2; done; echo; wait $$pip
	@touch $@
endef

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(call install,.)

$(VENV)/.installed-%: $(VENV)/bin/python pyproject.toml
	$(call install,.[$*])

# Built from the source distribution of its Python package, which holds llama.cpp and its converter. Only the library, with few
# optimizations and without kernels for repacked weights: the models that are compared are tiny.
LLAMA = 0.3.36
LLAMA_FLAGS = -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS_RELEASE=-O1 -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DBUILD_SHARED_LIBS=ON -DGGML_OPENMP=OFF \
	-DGGML_CPU_REPACK=OFF -DGGML_LLAMAFILE=OFF \
	-DLLAMA_CURL=OFF -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF
LLAMA_SOURCE = .llama.cpp/llama_cpp_python-$(LLAMA).tar.gz
.llama.cpp/.built: | $(VENV)/.installed-dev
	$(BIN)/python -m pip download -qq --disable-pip-version-check --no-deps --no-binary :all: --dest .llama.cpp llama-cpp-python==$(LLAMA)
	tar -xzf $(LLAMA_SOURCE) -C .llama.cpp --strip-components=3 llama_cpp_python-$(LLAMA)/vendor/llama.cpp
	$(BIN)/cmake -S .llama.cpp -B .llama.cpp/build $(LLAMA_FLAGS)
	$(BIN)/cmake --build .llama.cpp/build --target llama --parallel
	touch $@

$(VENV)/.installed-llama.cpp: .llama.cpp/.built | $(VENV)/.installed-dev
	CMAKE_ARGS=-DLLAMA_BUILD=OFF $(BIN)/python -m pip install -qq --disable-pip-version-check $(LLAMA_SOURCE)
	install -D --target-directory $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('platlib'))")/llama_cpp/lib .llama.cpp/build/bin/*.so*
	touch $@

clean:
	rm -rf $(VENV) $(AIPERF) .llama.cpp .compiled site
