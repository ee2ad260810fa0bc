# `make demo` and `make test` set up what they need in .venv and run; nothing else has to be installed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench slow clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,dev]'
	touch $@

demo: $(STAMP)
	mkdir -p demo-out
	$(BIN)/meshweave plan gpt3 --cluster tpu-v4-pod:256 --out demo-out/plan.json
	$(BIN)/meshweave run demo-out/plan.json --layer ff1 --pass forward --ranks 4 \
		--algorithm meshslice,collective \
		--trace demo-out/trace.json --svg demo-out/timeline.svg

test: $(STAMP)
	$(BIN)/python -m pytest -q

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

slow: $(STAMP)
	$(BIN)/python -m pytest -q -m slow

bench: $(STAMP)
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/executor_overhead.py

clean:
	rm -rf $(VENV) demo-out build dist
