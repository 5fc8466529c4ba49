# SPDX-License-Identifier: Apache-2.0
PYTHON ?= python3
BIN := .venv/bin
CXX_FILES = $(shell find native tests/native tests/fuzz examples -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.cu')
SHELL_FILES := .ci/run $(wildcard ci/*.sh)

.PHONY: help train test build lint format wheel clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

train: .venv/python-found build .venv/installed ## train the default byte model on the text in the package (about a minute)
	@$(BIN)/python -m mojolearn train

test: .venv/python-found build .venv/installed-test ## run all tests
	@$(PYTHON) native/build.py --probe
	@$(BIN)/python -m pytest

build: ## build the native library
	@$(PYTHON) native/build.py

lint: .venv/installed-lint ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	@! LC_ALL=C.UTF-8 grep -nE '^.{121}' $(CXX_FILES) || { echo "lines of more than 120 columns" >&2; exit 1; }
	$(CC) -x c -std=c99 -pedantic -Wall -Wextra -Werror -fsyntax-only native/include/mojolearn.h
	$(CXX) -x c++ -std=c++17 -pedantic -Wall -Wextra -Werror -fsyntax-only native/include/mojolearn.h
	$(if $(shell command -v shellcheck),shellcheck $(SHELL_FILES))

format: .venv/installed-lint ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_FILES)

wheel: .venv/installed-wheel ## build the source distribution, and from it the wheel, into dist
	rm -rf dist
	$(BIN)/python -m build

clean: ## remove everything that make has made
	rm -rf .venv build dist python/mojolearn/_lib python/*.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# The environment, and stamps for what is installed in it: .venv/installed is the package, .venv/installed-X adds the extra X.
.venv/python-found:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1 || true); Python 3.10 or newer is needed: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { \
	  rm -rf .venv; echo "no virtual environment (on Debian or Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@touch $@

.venv/installed: .venv/python-found pyproject.toml setup.py
	@echo "  PIP mojolearn"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/installed-%: .venv/python-found pyproject.toml setup.py
	@echo "  PIP mojolearn[$*]"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@
