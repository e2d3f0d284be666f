# Habits of this project. Needs Python 3.11, pip, git and make; everything else comes from PyPI into .venv.
#   make demo       train a small network on real images with two processes
#   make test       lint, types, import contracts, size report, and tests of everything that are not marked slow
#   make test T=tests/unit/engine   all tests of a directory, a file or (T="-k bfloat16 tests/unit") a name, slow or not
#   make test-all   the rest: the documentation site, which a test looks at in a browser; tests that are marked slow (but not nightly), those of reigen.mxnet, .tensorflow, .keras, .jax, .ray, .spark and .dask, and the next ones
#   RETRY=1         with the targets above: up to three tests that fail are run once more, one at a time
#   make test-mxnet the tests of reigen.mxnet, with the real MXNet and its old NumPy in an environment of their own
#   make test-frameworks  the tests of reigen.tensorflow, reigen.keras and reigen.jax, with all of them in one environment
#   make test-engines     the tests of reigen.ray, reigen.spark, reigen.dask and of YARN, in the same environment (Spark needs Java)
#   make test-integrations  the tests with Lightning, Hugging Face's libraries, TensorBoard and notebooks, of the examples that need more than torch, and their pages' programs
#   make lint       everything that reads the code without running it
#   make nightly-tests    tests that are marked nightly: further variations, with every framework, of what the others show
#   make nightly-elastic  a million schedules of faults for elastic jobs, simulated; goes on where it was interrupted
#   make nightly-faults   an hour of kills, stops and cuts of all roles of elastic jobs, on this host and on three stand-in ones
#   make environments  what tests and documentation need; not with -j: each builds the same source tree
#   make docs       the documentation site, in build/site: open build/site/index.html, or `python -m http.server -d build/site`
#   make bench      Reigen and its peers, alternately, in one run; tables, and JSON and pictures in build/benchmarks; BENCH_OPTIONS="--rounds 2"
#   make bench-all  all files of docs/data: those, bench-network's, frameworks, parameter servers; root, about an hour, not with -j
#   make bench-network   the same over several hosts (root; stand-in machines made of namespaces); BENCH_OPTIONS="loopback --rounds 2"
#   make clean      removes builds and caches, and leaves the environments

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
MXNET_VENV := .venv-mxnet
FRAMEWORKS_VENV := .venv-frameworks
INTEGRATIONS_VENV := .venv-integrations
DOCS_VENV := .venv-docs
BIN := $(VENV)/bin
NP ?= 2
# Tests and benchmarks start thousands of processes that import the same modules: without compiled ones a job of two ranks
# takes 1.3 s of the processors, with them 0.7.
unexport PYTHONDONTWRITEBYTECODE
# Two processors were busy for 62 % of the time with two tests at once: three. A file's tests share their processes, so they stay
# together. The files that take longest come first, unit tests last: they are short, so that all workers end at about the same time.
TEST_JOBS ?= 3
# The slow ones, of servers that start and of ranks that are killed, kept them busy for 70 % with three.
SLOW_TEST_JOBS ?= 4
PARALLEL := -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
# $(call pytest,PYTHON,ARGUMENTS). With RETRY, tests that failed (exit code 1, and no other) may pass a second time.
NUM_FAILED := import json; print(len(json.load(open(".pytest_cache/v/cache/lastfailed"))))
pytest = @rm -f .pytest_cache/v/cache/lastfailed; $(1) -m pytest $(PARALLEL) $(2) || { \
	[ $$? -eq 1 ] && [ -n "$(RETRY)" ] && [ `$(1) -c '$(NUM_FAILED)'` -le 3 ] && \
	echo "The tests that failed are run once more, one at a time:" >&2 && \
	$(1) -m pytest --last-failed --last-failed-no-failures none; }
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
STAMP_PARTS := pyproject.toml constraints.txt src/reigen/_version.py

.PHONY: demo docs environments test test-all test-engines test-frameworks test-integrations test-mxnet lint nightly-tests nightly-elastic nightly-faults bench bench-all bench-network clean
.DELETE_ON_ERROR:

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Reigen needs Python 3.11 or later, and $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of packages: a repeated call installs nothing. That of the tests adds to that of the demo.
$(VENV)/.stamp-demo: $(STAMP_PARTS) | $(BIN)/python
	$(PIP_INSTALL) -e '.[torch]' scikit-learn
	@touch $@

$(VENV)/.stamp-dev: $(STAMP_PARTS) | $(BIN)/python
	$(PIP_INSTALL) -e '.[torch,mpi,dev]'
	$(BIN)/python -m compileall -q -j 0 src
	@touch $@ $(VENV)/.stamp-demo

$(VENV)/.stamp-bench: $(VENV)/.stamp-dev
	$(PIP_INSTALL) -e '.[torch,mpi,dev,bench]'
	@touch $@

# In an environment of its own: the generator must not choose versions for anything else.
$(DOCS_VENV)/.stamp: $(STAMP_PARTS)
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[docs]'
	@touch $@

# MXNet needs a NumPy that is older than everybody else's.
$(MXNET_VENV)/.stamp: $(STAMP_PARTS)
	$(PYTHON) -m venv $(MXNET_VENV)
	sed '/^numpy==/d' constraints.txt >$(MXNET_VENV)/constraints.txt
	$(MXNET_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c $(MXNET_VENV)/constraints.txt \
	  -e '.[mxnet]' hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

# TensorFlow, Keras, JAX and PyTorch together; of TensorFlow the build for CPUs, which is half as large. And Ray, Spark, Dask.
$(FRAMEWORKS_VENV)/.stamp: $(STAMP_PARTS)
	$(PYTHON) -m venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt \
	  -e '.[torch,keras,jax,ray,spark-estimators,dask,yarn]' 'ray[train]' tensorflow-cpu tf_keras flax optax scikit-learn hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

# What people train with on top of PyTorch.
$(INTEGRATIONS_VENV)/.stamp: $(STAMP_PARTS)
	$(PYTHON) -m venv $(INTEGRATIONS_VENV)
	$(INTEGRATIONS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt \
	  -e '.[lightning]' transformers accelerate tensorboard torchvision pycocotools nbclient ipykernel scikit-learn hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

environments: $(FRAMEWORKS_VENV)/.stamp $(INTEGRATIONS_VENV)/.stamp $(VENV)/.stamp-dev $(MXNET_VENV)/.stamp $(DOCS_VENV)/.stamp

demo: $(VENV)/.stamp-demo
	$(BIN)/reigen run -np $(NP) $(BIN)/python examples/torch/digits.py

docs: $(DOCS_VENV)/.stamp
	$(DOCS_VENV)/bin/python -m tools.docs
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --quiet --strict

# A folder at a time, for names of modules come again. The libraries of examples are not installed here, or have no types.
check_example_types = MYPYPATH=src $(BIN)/mypy --ignore-missing-imports --allow-untyped-calls --no-warn-return-any --allow-subclassing-any \
	--allow-untyped-decorators --allow-any-generics examples/$(1)/*.py

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check src tests tools $(wildcard examples benchmarks)
	$(BIN)/mypy
	$(foreach folder,torch tensorflow keras jax mxnet,$(call check_example_types,$(folder)) &&) true
	$(BIN)/lint-imports
	$(BIN)/python tools/size_report.py

ifdef T
test: $(VENV)/.stamp-dev
	$(call pytest,$(BIN)/python,$(T))
else
test: lint
	$(call pytest,$(BIN)/python,-m "not slow")
endif

test-all: $(VENV)/.stamp-dev docs test-mxnet test-frameworks test-engines test-integrations
	$(call pytest,$(BIN)/python,-m "slow and not nightly" -n $(SLOW_TEST_JOBS))

FRAMEWORKS_TESTS := tests/tensorflow tests/keras tests/jax $(wildcard tests/examples) tests/docs/test_docs_programs.py

test-mxnet: $(MXNET_VENV)/.stamp
	$(call pytest,$(MXNET_VENV)/bin/python,tests/mxnet tests/docs/test_docs_programs.py)

test-frameworks: $(FRAMEWORKS_VENV)/.stamp
	$(call pytest,$(FRAMEWORKS_VENV)/bin/python,-m "not nightly" $(FRAMEWORKS_TESTS))

test-engines: $(FRAMEWORKS_VENV)/.stamp
	$(call pytest,$(FRAMEWORKS_VENV)/bin/python,-m "not nightly" tests/engines)

test-integrations: $(INTEGRATIONS_VENV)/.stamp
	$(call pytest,$(INTEGRATIONS_VENV)/bin/python,$(wildcard tests/examples) tests/integrations tests/docs/test_docs_programs.py)

nightly-tests: $(VENV)/.stamp-dev $(FRAMEWORKS_VENV)/.stamp
	$(call pytest,$(BIN)/python,-m nightly -n $(SLOW_TEST_JOBS))
	$(call pytest,$(FRAMEWORKS_VENV)/bin/python,-m nightly $(FRAMEWORKS_TESTS) tests/engines)

SCHEDULES ?= 1000000
nightly-elastic: $(VENV)/.stamp-dev
	$(BIN)/python -m tests.unit.cluster.views_nightly --count $(SCHEDULES)

nightly-faults: $(VENV)/.stamp-dev
	REIGEN_TEST_FAULTS=100000 REIGEN_TEST_FAULT_SECONDS=$${SECONDS_EACH:-3600} \
	  $(BIN)/python -m pytest -s -n 0 --timeout=0 -o faulthandler_timeout=0 tests/elastic/test_fault_loop.py tests/network/test_elastic_fault_loop.py

# What is found goes to RESULTS, too, as JSON and as pictures. BENCH_OPTIONS="--rounds 2" is a short run; of bench-network, which has
# other options (python -m benchmarks.network --help), BENCH_OPTIONS="loopback --rounds 2" is one.
RESULTS := build/benchmarks
bench: $(VENV)/.stamp-bench
	@mkdir -p $(RESULTS)
	$(BIN)/reigen bench allreduce --np $(NP) --json $(RESULTS)/allreduce.json $(BENCH_OPTIONS)
	$(BIN)/reigen bench calls --np $(NP) --json $(RESULTS)/calls.json $(BENCH_OPTIONS)
	$(BIN)/reigen bench train-step --np $(NP) --json $(RESULTS)/train-step.json $(BENCH_OPTIONS)
	$(BIN)/reigen bench startup --np $(NP) --json $(RESULTS)/startup.json $(BENCH_OPTIONS)
	$(BIN)/python -m tools.docs.charts $(RESULTS)

# All that docs/data holds, in about an hour. Not with -j, which would run benchmarks side by side.
bench-all: bench bench-network $(FRAMEWORKS_VENV)/.stamp $(MXNET_VENV)/.stamp
	$(FRAMEWORKS_VENV)/bin/reigen bench frameworks --np $(NP) --only sums,import --json $(RESULTS)/sums.json $(BENCH_OPTIONS)
	$(FRAMEWORKS_VENV)/bin/reigen bench frameworks --np $(NP) --only tensorflow,keras,jax --json $(RESULTS)/frameworks.json $(BENCH_OPTIONS)
	$(BIN)/python -m benchmarks.kv --mxnet $(MXNET_VENV)/bin/python --json $(RESULTS)/kv.json
	$(MXNET_VENV)/bin/python -m benchmarks.mxnet_step --json $(RESULTS)/mxnet-step.json
	$(BIN)/python -m benchmarks.ps_vs_ring --json $(RESULTS)/ps_vs_ring.json
	$(BIN)/python -m tools.docs.charts $(RESULTS)

bench-network: $(VENV)/.stamp-bench
	@mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.network --json $(RESULTS)/network.json $(BENCH_OPTIONS)
	$(BIN)/python -m tools.docs.charts $(RESULTS)

clean:
	rm -rf build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
