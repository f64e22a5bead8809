# What people type; the logic is in the rlhf command. A second time everything that is there is used again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: demo test lint up down clean

demo: $(STAMP)  ## the whole pipeline on the embedded data, from nothing to the report
	$(BIN)/rlhf run --recipe recipes/demo.yaml

test: $(STAMP)  ## the whole test suite
	$(BIN)/python -m pytest

lint: $(STAMP)  ## style, types, and which package may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

up down: $(STAMP)  ## the Prefect and MLflow servers with their pages
	$(BIN)/rlhf $@

clean:  ## remove what runs made; data sources, the environment and the DVC remote stay
	rm -rf data/prepared data/tokenizer data/inputs models metrics plots evaluation report runs checkpoints .dvc/tmp

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@
