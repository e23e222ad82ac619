PYTHON ?= python3
export PIP_DISABLE_PIP_VERSION_CHECK := 1

VENV := .venv
BIN := $(VENV)/bin
# The library with its command; and that with everything that tests, lint and benchmarks need.
LIBRARY := $(VENV)/.library-installed
STAMP := $(VENV)/.installed
# `make TORCH=2.15.0 VENV=...` takes another one than the pinned, in an environment of its own.
TORCH := 2.13.0
CONSTRAINTS := $(VENV)/constraints.txt
# Releases of the other dependencies; tools/versions.py gives the lowest that are supported.
PINS ?= constraints.txt
# Much of a test is waiting, for processes to start and for deadlines to pass.
WORKERS ?= 2

.DEFAULT_GOAL := test
.PHONY: demo test suite test-slow test-versions test-frameworks lint docs bench clean

$(CONSTRAINTS): $(PINS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' $(PINS) > $@

$(LIBRARY): pyproject.toml $(CONSTRAINTS)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) torch==$(TORCH)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[cli]'
	touch $@

$(STAMP): $(LIBRARY)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[dev,cli]'
	$(if $(FRAMEWORK),$(BIN)/python -m pip install -q -e '.[$(FRAMEWORK)]')
	$(BIN)/python tests/support/fetch_torchft.py
	touch $@

demo: $(LIBRARY)
	$(BIN)/python -m torchrelay.demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src/torchrelay

# Hundreds of processes start in the tests: each would compile the package again where the
# environment forbids Python to keep what it compiled.
test suite test-slow demo: export PYTHONDONTWRITEBYTECODE =

test: lint suite

suite: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(OPTIONS)

test-slow: $(STAMP)
	TEST_ROUNDS=all $(BIN)/python -m pytest -m "slow or rounds"

# The tests with other releases of Python and torch, hours; the result is a table in docs/install.md.
test-versions:
	$(PYTHON) -m tools.versions --remove

# The tests of frameworks that bring a torch or a ray of their own, in environments of their own.
FRAMEWORKS := ray torchtitan vllm verl
test-frameworks:
	for name in $(FRAMEWORKS); do \
	    $(MAKE) suite VENV=build/frameworks/$$name FRAMEWORK=$$name OPTIONS=tests/integrations/test_$$name.py || exit 1; \
	done

# The site, in build/site. Generated pages and figures are written again first.
docs: pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Every figure of this machine again, about an hour; `make pages` then writes them into the docs.
# Those of a GPU are in benchmarks/gpu.
bench: $(STAMP)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks --only checkpoint
	for name in tcp checkpoint.limits checkpoint.retention checkpoint.mirror resharding endpoint keeper frameworks \
	    scale links healing seeds weights.reshard weights.links weights.training; do \
	    $(BIN)/python -m benchmarks.$$name || exit 1; \
	done

.PHONY: pages package

# The generated documentation: reference, figures, module pages, index, section map.
pages: $(STAMP)
	$(BIN)/python -m tools.docs.reference
	$(BIN)/python -m benchmarks.figures
	$(BIN)/python -m tools.docs

# Wheel and source archive, in dist.
package: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
