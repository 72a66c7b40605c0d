# `make demo` and `make test` need Python >= 3.11 and make; all else is installed into .venv.
VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin/python
STAMP := $(VENV)/installed-test

.PHONY: demo test test-slow check format notebooks benchmark clean

demo: $(VENV)/installed
	$(RUN) notebooks/run.py weigh_the_planets

test: $(STAMP)
	$(RUN) -m pytest -q -m "not slow" -n 2

test-slow: $(STAMP)
	$(RUN) -m pytest -q -m slow -n 2

check: $(STAMP)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m basedpyright --level error --pythonpath $(RUN)

format: $(STAMP)
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

notebooks: $(STAMP)
	$(RUN) notebooks/build.py weigh_the_planets bounded_memory implicit_nodes

benchmark: $(STAMP)
	$(RUN) -m pip install --quiet --editable ".[bench]"
	$(RUN) benchmarks/pullback.py
	$(RUN) benchmarks/checkpointing.py
	$(RUN) benchmarks/solvers.py

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(None if sys.version_info >= (3, 11) else 'tapeless needs Python >= 3.11')"
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable .
	touch $@

$(STAMP): $(VENV)/installed
	$(RUN) -m pip install --quiet --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) out build dist *.egg-info
