# Everything a fresh machine needs is Python >= 3.11 and make.
GIVEN := $(if $(filter undefined,$(origin PYTHON)),,$(PYTHON))
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN ?=
ROUNDINGS ?=
PART ?=
DEVICE ?= cuda
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS)

# Tests start many processes, which would all compile the same modules if Python may not keep what it compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test test-steady test-slow test-cluster test-roundings test-lowest mutants lint fmt docs wheel release-check bench gpu-check clean

run: $(VENV)/.installed  ## the default experiment; RUN="algorithm=fedprox rounds=5" changes it
	$(BIN)/python -m rayfed.run $(RUN)

test: $(VENV)/.tested  ## all tests that are not slow, in three processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow"

test-steady: $(VENV)/.tested  ## slow tests of CI: methods in every way, cells of the papers, placement, recovery, two nodes; PART=2/3 runs a third
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m "slow and steady" $(if $(PART),--part $(PART))

test-roundings: $(VENV)/.tested  ## numeric tests under roundings of other processors; ROUNDINGS="oldest 2-threads" runs two
	$(BIN)/python -m tests.roundings $(ROUNDINGS)

test-cluster: $(VENV)/.tested  ## runs on several hosts made of namespaces; needs root, and about 15 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/cluster

test-lowest:  ## the tests with the lowest versions that pyproject.toml allows, in their own environment
	$(MAKE) test VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt

mutants: $(VENV)/.tested  ## changes of single lines of the methods, each of which their tests must notice; minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants.kill

test-slow: $(VENV)/.tested  ## all slow tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

lint: $(VENV)/.tested  ## style, types, import directions, and how much must be read to understand one thing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.rings

fmt: $(VENV)/.tested  ## formats the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.tested  ## the documentation site, into site/, without network; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheel: $(VENV)/.tested  ## wheel and source archive, into dist/
	$(BIN)/python -m hatchling build

release-check: lint wheel docs  ## all that a release needs besides the tests: wheel, site, notebooks, tutorial, README
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or not slow" tests/test_wheel.py tests/test_site.py \
		tests/test_notebook.py tests/test_tutorial.py tests/test_readme.py tests/test_deploy.py

bench: $(VENV)/.tested  ## the overhead of the engine and the memory of shared weights
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/engine_overhead.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/shared_weights.py

# An interpreter that is named, PYTHON=..., is used as it is: where no registry can be reached.
gpu-check: $(if $(GIVEN),,$(VENV)/.installed)  ## this machine's GPU: results, speed, memory; DEVICE=cpu rehearses
	PYTHONPATH=. OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1) $(or $(GIVEN),$(BIN)/python) benchmarks/gpu_check.py \
		--device $(DEVICE)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(PIP) -e .
	touch $@

$(VENV)/.tested: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(PIP) -e ".[test]"
	touch $(VENV)/.installed $@

clean:  ## removes the virtual environment and the caches of the tools
	rm -rf $(VENV) .venv-lowest build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
