# What people type; the logic is in the rlhf command. A second time everything that is there is used again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
DEVICE ?= cpu
TORCH_INDEX ?=
BASE ?=
# On two cores: half of their time tests wait, for processes, servers and pages.
TEST_PROCESSES ?= 4
SEED ?= 1
MUTANTS ?= 400
TESTED_TOGETHER := --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
COMMIT := $(shell git rev-parse HEAD 2>/dev/null)

.PHONY: demo docs lock test test-all test-containers mutate gpu-report lint up down images up-docker clean

demo: $(STAMP)  ## the whole pipeline on the embedded data, from nothing to the report
	$(BIN)/rlhf run --recipe recipes/demo.yaml

test: $(STAMP)  ## the test suite, without what is marked slow
	$(BIN)/python -m pytest $(TESTED_TOGETHER)

test-all: $(STAMP)  ## with what is marked slow and 200 examples a property; then the containers, where there is a Docker engine
	$(BIN)/python -m pytest -m "not containers" --hypothesis-profile thorough $(TESTED_TOGETHER)
	$(BIN)/python -m pytest -m containers tests/containers

test-containers: $(STAMP)  ## builds the images and runs the stack; needs a Docker engine
	$(BIN)/python -m pytest -m containers tests/containers

mutate: $(STAMP)  ## changes the pure cores on purpose and counts what the tests notice; SEED= draws others
	$(BIN)/python benchmarks/mutation_score.py --seed $(SEED) --mutants $(MUTANTS) --processes 2

gpu-report: $(STAMP)  ## every stage and method on this machine's GPU, and speed at real sizes: 8 minutes at a time
	$(BIN)/python -m benchmarks.gpu_report

lint: $(STAMP)  ## style, types, which package may import which, and the images' recipes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile tests/containers/store.Dockerfile

up down: $(STAMP)  ## the Prefect and MLflow servers with their pages
	$(BIN)/rlhf $@

BUILD := docker build --file docker/Dockerfile --build-arg COMMIT=$(COMMIT) $(if $(BASE),--build-arg BASE=$(BASE))
images:  ## the three images; DEVICE=cuda for GPUs, TORCH_INDEX= for an index of CPU builds, BASE= for another Python image
	$(BUILD) --target orchestrator --tag rlhf-orchestrator:latest .
	$(BUILD) --target train --build-arg DEVICE=$(DEVICE) --build-arg TORCH_INDEX=$(TORCH_INDEX) --tag rlhf-train:latest .
	$(BUILD) --target retrain --build-arg DEVICE=$(DEVICE) --build-arg TORCH_INDEX=$(TORCH_INDEX) --tag rlhf-retrain:latest .

up-docker: $(STAMP) images  ## servers, store and workers in containers: docker/compose.yaml
	$(BIN)/rlhf up --docker

docs:  ## docs/params.md, from the schema
	$(BIN)/python -m config.document

lock: $(STAMP)  ## requirements.lock and requirements-cuda.lock from constraints.txt; needs a package index
	$(BIN)/python docker/lock.py

clean:  ## remove what runs made; data sources, the environment and the DVC remote stay
	rm -rf data/prepared data/tokenizer data/inputs models metrics plots evaluation report runs checkpoints .dvc/tmp

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@
