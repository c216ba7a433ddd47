PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
TORCH := $(shell sed -n 's/^\(torch==.*\)$$/\1/p' constraints.txt)

# One stamp a layer of the environment: a layer is installed again only when what it is made from
# changes. torch comes first and alone, so that nothing else decides which build of it is taken.
TORCH_STAMP := $(VENV)/.torch
RUNTIME_STAMP := $(VENV)/.runtime
TEST_STAMP := $(VENV)/.test
DOCS_STAMP := $(VENV)/.docs

# The libraries that engram is compared with have a virtualenv of their own.
PEERS := .venv-peers
PEERS_PIP := $(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet
PEERS_STAMP := $(PEERS)/.peers
PEERS_NEED := accelerate transformers termcolor pyyaml pretty_midi pyDeprecate more-itertools dask distributed \
	zarr cvxpy

.DELETE_ON_ERROR:
.PHONY: help demo test docs lint format typecheck unit golden fuzz bench-speed bench-lds bench-faithfulness constraints clean distclean

help:
	@echo "make demo         install engram and run its demonstration"
	@echo "make test         install everything, then lint, typecheck and unit"
	@echo "make docs         build the pages and the reference into build/docs/index.html"
	@echo "make lint         ruff: rules and formatting"
	@echo "make format       ruff: apply the formatting and the safe fixes"
	@echo "make typecheck    mypy, strict, over src"
	@echo "make unit         pytest, doctests included"
	@echo "make fuzz         damage saved folders in many ways; ENGRAM_FUZZ=20000 for a night"
	@echo "make golden       tell which golden results changed, and store them anew"
	@echo "make bench-speed  engram and its peers in plain epochs, with memory, into docs/results"
	@echo "make bench-lds    linear datamodeling scores of engram and its peers"
	@echo "make bench-faithfulness  estimates of engram and its peers against true refits"
	@echo "make constraints  write constraints.txt anew from a fresh virtualenv"
	@echo "make clean        remove caches and outputs; distclean removes the virtualenv too"

demo: $(RUNTIME_STAMP)
	$(BIN)/engram demo

test: lint typecheck unit

# A warning is an error: a name in the reference that is gone, a page that nothing leads to.
docs: $(DOCS_STAMP)
	$(BIN)/python -m docs.figures.import_graph > build/import-graph.txt
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
	@echo "build/docs/index.html"

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(TEST_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(TEST_STAMP)
	$(BIN)/mypy

# One thread a process: two workers that each take every core are slower than one.
unit: $(TEST_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

# Damaged folders, other ones each time; the tests take a few of them, always the same.
ENGRAM_FUZZ ?= 2000
fuzz: $(TEST_STAMP)
	OMP_NUM_THREADS=1 ENGRAM_FUZZ=$(ENGRAM_FUZZ) $(BIN)/pytest -n 2 tests/core/storage/test_fuzz.py

golden: $(TEST_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.golden

# Inputs are random. benchmarks.pass_cost, memory and kfac_peers have engram alone, at full size.
bench-speed: $(PEERS_STAMP)
	OMP_NUM_THREADS=1 TQDM_DISABLE=1 $(PEERS)/bin/python -W ignore -m benchmarks.speed

bench-lds: $(PEERS_STAMP)
	OMP_NUM_THREADS=1 TQDM_DISABLE=1 $(PEERS)/bin/python -W ignore -m benchmarks.lds

# ENGRAM_DATA names a folder with fmnist.npz, usps.npz and text/; settings without data are told so.
bench-faithfulness: $(PEERS_STAMP)
	OMP_NUM_THREADS=1 TQDM_DISABLE=1 $(PEERS)/bin/python -W ignore -m benchmarks.faithfulness

$(TORCH_STAMP): constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)" -c constraints.txt
	touch $@

$(RUNTIME_STAMP): $(TORCH_STAMP) pyproject.toml
	$(PIP) -c constraints.txt -e .
	touch $@

$(TEST_STAMP): $(RUNTIME_STAMP) requirements-peers.txt
	$(PIP) -c constraints.txt -e '.[test]'
	$(PIP) --no-deps -r requirements-peers.txt
	touch $@

$(DOCS_STAMP): $(RUNTIME_STAMP)
	$(PIP) -c constraints.txt -e '.[docs,gp,statsmodels]'
	mkdir -p build
	touch $@

# Each library by itself: one that cannot be installed must not keep the others out of the table.
$(PEERS_STAMP): constraints.txt pyproject.toml requirements-peers.txt requirements-bench.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS_PIP) "$(TORCH)" -c constraints.txt
	$(PEERS_PIP) -c constraints.txt -e .
	for need in $(PEERS_NEED); do $(PEERS_PIP) -c constraints.txt $$need || true; done
	sed '/^#/d' requirements-peers.txt requirements-bench.txt \
		| while read -r peer; do $(PEERS_PIP) --no-deps "$$peer" || true; done
	touch $@

# The old pin of torch is kept; a local label such as +cpu names a build, not a version.
constraints:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet "$(TORCH)"
	build/lock/bin/python -m pip install --quiet "$(TORCH)" '.[test,docs]'
	build/lock/bin/python -m pip freeze --all --exclude pip --exclude engram \
		| sed 's/+[a-z0-9.]*$$//' > build/lock/constraints.txt
	mv build/lock/constraints.txt constraints.txt
	rm -rf build/lock

clean:
	rm -rf build dist run runs report.html training.html
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(PEERS)
