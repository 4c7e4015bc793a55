# `make demo` and `make test` need nothing but Python 3.12, a C++ compiler and make: each sets up .venv first, and again
# only when the requirements or the sources of the compiled module have changed.

VENV ?= .venv
PYTHON ?=
RUN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
CPP_FILES = $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/cpp/*.h' 'tests/cpp/*.cpp')
MODULE_SOURCES := pyproject.toml setup.py CMakeLists.txt $(shell find csrc -type f)

.PHONY: help setup demo test lint format sanitize docs wheel clean
.DELETE_ON_ERROR:

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.python:
	python="$(PYTHON)"; python="$${python:-$$(scripts/find_python.sh)}" && "$$python" -m venv $(VENV)
	touch $@

$(VENV)/.requirements: $(VENV)/.python $(addprefix requirements/,build.txt test.txt constraints.txt bridge.txt)
	$(PIP) install --quiet -r requirements/build.txt -r requirements/test.txt
	$(PIP) install --quiet --no-deps -r requirements/bridge.txt
	touch $@

$(VENV)/.ray: $(VENV)/.requirements requirements/ray.txt
	$(PIP) install --quiet -r requirements/ray.txt
	touch $@

$(VENV)/.built: $(VENV)/.requirements $(MODULE_SOURCES)
	$(PIP) install --quiet --no-build-isolation --no-deps --editable .
	touch $@

$(VENV)/.lint: $(VENV)/.requirements requirements/lint.txt
	$(PIP) install --quiet -r requirements/lint.txt
	touch $@

setup: $(VENV)/.built ## .venv with everything, and the compiled module

demo: $(VENV)/.built ## small models imported, checked, planned, trained (with a GPU), their FP32 copies found stale and repaired
	$(RUN) -m megasetup demo

test: $(VENV)/.built $(VENV)/.ray ## the tests; those marked gpu are skipped where there is no GPU
	$(RUN) -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.lint ## ruff, mypy, clang-format
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)

format: $(VENV)/.lint ## rewrite the sources the way lint wants them
	$(RUN) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP_FILES)

sanitize: $(VENV)/.requirements ## the CPU half under AddressSanitizer and ThreadSanitizer
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/sanitize.sh

docs: $(VENV)/.built ## the page of config keys, from the schema
	$(RUN) -m megasetup.config.reference docs/config.md

wheel: $(VENV)/.requirements ## a wheel in dist/
	$(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

clean: ## remove everything that was built, .venv included
	rm -rf $(VENV) build dist demo-output *.egg-info megasetup/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
