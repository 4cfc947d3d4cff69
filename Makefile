# Start with `make demo` or `make test`; both set up .venv themselves.
PYTHON ?= python3
JAX ?= jax
CASES ?= 1000
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check

.PHONY: help setup demo test test-newest test-gpu test-gpu-compile test-tpu coverage lint docs fuzz bench report clean

help:
	@echo "make demo    train a small model on 8 virtual devices, and compare striped with contiguous layouts"
	@echo "make test    lint, check types, run all tests          (PYTHON=python3.12, JAX=jax==0.11.2 choose versions)"
	@echo "make test-newest    the same in .venv-newest, with the newest JAX  (PYTHON=python3.12)"
	@echo "make coverage    run all tests, print line and branch coverage, write build/coverage/html"
	@echo "make test-gpu    run the tests that need an NVIDIA GPU  (JAX='jax[cuda13]')"
	@echo "make test-gpu-compile    compile for eight H200s, without a GPU   (downloads JAX's compiler for GPUs, 0.7 GB)"
	@echo "make test-tpu    compile for TPU pods, without a TPU    (installs the extra 'tpu')"
	@echo "make docs    build the documentation as a site: build/site/index.html"
	@echo "make fuzz    check random cases against the float64 reference  (CASES=10000)"
	@echo "make bench   measure layouts and other libraries on this CPU   (installs the extra 'peers', with torch)"
	@echo "make report  draw the recorded results: report.html, docs/results.md and its figures"
	@echo "make setup   only create $(VENV) and install           (make clean removes it)"

setup: $(VENV)/ready-to-test

# Rebuilt if the dependencies, the interpreter or the version of JAX change.
WANTED := $(shell $(PYTHON) -c "import sys; print(sys.version.split()[0])") $(JAX)
ifneq ($(WANTED),$(shell cat $(VENV)/wanted 2>/dev/null))
.PHONY: $(VENV)/ready
endif

$(VENV)/ready: pyproject.toml benchmarks/pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	    { echo "striped_attention needs Python 3.11 or newer, but $(PYTHON) is $(firstword $(WANTED))." \
	           "Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test ! -e $(VENV) || test -e $(VENV)/wanted || \
	    { echo "$(VENV) exists but was not made by make, which would clear it." \
	           "Remove it, or choose another folder: make $(MAKECMDGOALS) VENV=.venv-striped"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@echo "$(WANTED)" > $(VENV)/wanted
	$(PIP) "$(JAX)" -e ".[train]"
	@touch $@

# Further requirements of tests, including torch and transformers.
$(VENV)/ready-to-test: $(VENV)/ready
	$(PIP) "$(JAX)" -e ".[test,lint]" -e benchmarks
	@touch $@

demo: $(VENV)/ready
	$(RUN) examples/train_demo.py

test: setup lint
	$(RUN) -m pytest

# Python 3.12 and newer support a newer JAX than 3.11. A separate venv leaves .venv unchanged.
test-newest:
	$(MAKE) test VENV=.venv-newest

test-gpu: setup
	JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false $(RUN) -m pytest -n 0 tests/test_gpu.py \
	    --results benchmarks/results/gpu_tests.json

# JAX's compiler for GPUs is in a separate folder: in the venv, JAX would look for a GPU at every start.
build/cuda/ready: $(VENV)/ready
	rm -rf build/cuda
	version=$$($(RUN) -c "import jax; print(jax.__version__)") && $(PIP) --no-deps --target build/cuda \
	    jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version "nvidia-cuda-nvcc>=13,<14" "nvidia-nvvm>=13,<14"
	@touch $@

test-gpu-compile: setup build/cuda/ready
	PYTHONPATH=build/cuda $(RUN) -m pytest tests/test_gpu_compile.py

test-tpu: setup
	$(PIP) "$(JAX)" -e ".[tpu]" -e benchmarks
	$(RUN) -m pytest tests/test_tpu.py

coverage: setup
	rm -rf build/coverage
	mkdir -p build/coverage
	$(RUN) -m coverage run -m pytest
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage html --quiet
	$(RUN) -m coverage json --quiet
	$(RUN) -m tests.coverage_totals

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Installs the extra 'docs' the first time; building needs no network.
$(VENV)/ready-for-docs: $(VENV)/ready
	$(PIP) "$(JAX)" -e ".[docs]"
	@touch $@

docs: $(VENV)/ready-for-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

fuzz: setup
	$(RUN) -m tests.fuzz --cases $(CASES)

bench: setup
	$(PIP) -e ".[peers]" -e benchmarks
	$(VENV)/bin/striped bench peers --output benchmarks/results/peers.json
	$(VENV)/bin/striped bench layouts --output benchmarks/results/layouts.json

report: setup
	$(VENV)/bin/striped report --output report.html --figures docs/figures
	$(RUN) benchmarks/results_page.py

clean:
	rm -rf $(VENV) build dist *.egg-info
