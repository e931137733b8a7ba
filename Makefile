# A fresh checkout to a running, tested elastic_train:  make run, make test.
#
# Settings, each as NAME=value behind make:
#   PYTHON         the interpreter that makes the environment, 3.11 or newer
#   VENV           where the environment lives
#   ELASTIC_TORCH  the torch to use, decided before anything else could choose one and kept from then on:
#                    torch==2.13.0   from pip's index (the default: the version of constraints.txt);
#                    any requirement, wheel or pip options, for a build of the same version for one's own
#                    accelerator: ELASTIC_TORCH='torch==2.13.0 --index-url https://...';
#                    system          the one that PYTHON already has, as in a vendor's container image.
#                  Read when the environment is made: `make distclean` before changing it.
#   CONFIG, ARGS   what `make run` trains, and further flags: ARGS='--training.steps 50'
#   WORKERS        processes that share the tests out (0: none, which a debugger needs)
#   PYTEST_ARGS    further arguments of pytest: PYTEST_ARGS='tests/unit -k policy'

PYTHON        ?= python3
VENV          ?= .venv
ELASTIC_TORCH ?= $(shell grep '^torch==' constraints.txt)
CONFIG        ?= configs/llama3_debug.toml
ARGS          ?=
WORKERS       ?= 2
PYTEST_ARGS   ?=

BIN       := $(VENV)/bin
TORCH_PIN := $(VENV)/torch-pin.txt
INSTALLED := $(VENV)/installed.stamp

MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help venv run test lint format types imports docs docs-check clean distclean

help:
	@echo "make venv       make $(VENV) and install elastic_train with its tools into it"
	@echo "make run        train $(CONFIG)"
	@echo "make test       lint, types, import layers, docs, then every test"
	@echo "make lint | types | imports | docs-check    one of these checks"
	@echo "make format     apply ruff's formatting and safe fixes"
	@echo "make docs       write the config reference anew"
	@echo "make clean      remove caches and builds; make distclean: $(VENV) too"

venv: $(INSTALLED)

# Each file is written by the last line of its recipe, so a step that failed is done again.
$(TORCH_PIN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "elastic_train needs Python 3.11 or newer, but PYTHON=$(PYTHON) is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name a newer one: make venv PYTHON=/path/to/python3.11" >&2; exit 1; }
ifeq ($(ELASTIC_TORCH),system)
	$(PYTHON) -m venv --system-site-packages $(VENV)
else
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch first, so that nothing else chooses its build: $(ELASTIC_TORCH)"
	$(BIN)/python -m pip install --quiet $(ELASTIC_TORCH)
endif
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@ || { \
	  echo "There is no torch in $(VENV): ELASTIC_TORCH='$(ELASTIC_TORCH)' gives none." >&2; exit 1; }

$(INSTALLED): pyproject.toml constraints.txt | $(TORCH_PIN)
	@echo "installing elastic_train beside $$(cat $(TORCH_PIN)); this takes a minute or two"
	$(BIN)/python -m pip install --quiet -c constraints.txt -c $(TORCH_PIN) -e '.[dev]'
	@touch $@

run: $(INSTALLED)
	$(BIN)/elastic-train run $(CONFIG) $(ARGS)

# pytest comes last: its closing line is the verdict.
test: lint types imports docs-check
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/lint-imports

docs: $(INSTALLED)
	$(BIN)/python -m elastic_train.config.reference

docs-check: $(INSTALLED)
	$(BIN)/python -m elastic_train.config.reference --check

clean:
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find elastic_train tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
