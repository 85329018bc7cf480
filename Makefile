# On a machine with only Python (3.11 or newer) and make, `make train` and `make test` do all the set-up they need.

# The newest supported Python that runs here, by its name or among pyenv's versions: newer ones get a newer JAX.
ifndef PYTHON
PYTHON := $(shell for v in 3.13 3.12 3.11; do \
    for p in python$$v "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$v.*/bin/python$$v; do \
      "$$p" -c 'import ensurepip' 2>/dev/null && echo "$$p" && exit; done; done; echo python3)
endif
VENV ?= .venv
WORKERS ?= 2
ARGS ?=

# A machine with an NVIDIA driver gets the CUDA libraries; any other gets the compiler alone, for `jfsdp plan`, and
# must be told that it has no GPU, since the CUDA plugin would look for one and complain.
ifneq ($(wildcard /dev/nvidiactl),)
EXTRAS ?= dev,cuda12
else
EXTRAS ?= dev,plan
export JAX_PLATFORMS ?= cpu
endif

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := jfsdp models scripts tests examples docs/conf.py docs/make_options.py

QUICK := tests/layout tests/test_house.py tests/test_compat.py tests/train/test_choice.py tests/train/test_reduction.py \
  tests/plan/test_theory.py tests/plan/test_hlo.py tests/engine/test_schedule.py tests/trainer/test_options.py \
  tests/checkpoint/test_store.py tests/engine/test_parity.py::test_xla_equals_one_device_where_it_sends_more \
  tests/engine/test_manual_parity.py::test_the_depth_of_prefetch_changes_no_bit

.DEFAULT_GOAL := help
.PHONY: help install train finetune test quick lint format proofs docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) EXTRAS=$(EXTRAS) WORKERS=$(WORKERS) ARGS=\"...\""

install: $(STAMP) ## Make .venv with everything that the other targets need

$(STAMP): pyproject.toml models/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jfsdp needs Python 3.11 or newer, and $(PYTHON) is older; use make PYTHON=python3.13"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[$(EXTRAS)]' -e ./models
	@touch $@

train: install ## Train a tiny Llama on the standard library's source; ARGS="--steps 100" for more
	$(BIN)/python scripts/train.py --recipe stdlib $(ARGS)

finetune: $(VENV)/.peft ## Fine-tune what `make train` trained, with adapters; read them again in PEFT
	$(BIN)/python scripts/finetune.py $(ARGS)

$(VENV)/.peft: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[train,peft]' -e ./models
	@touch $@

test: install lint ## Lint, check types, run the tests (all that CI does)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

quick: install ## What two minutes can show: layouts, rules of the house, plans on paper, some parity
	$(BIN)/python -m pytest -n $(WORKERS) $(QUICK) $(ARGS)

lint: install ## Lint and check types
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/pyright --pythonpath $(BIN)/python

format: install ## Format, and fix what the linter can
	$(BIN)/ruff check --fix $(wildcard $(SOURCES))
	$(BIN)/ruff format $(wildcard $(SOURCES))

proofs: install ## Run the slow, exhaustive tests
	$(BIN)/python -m pytest -n $(WORKERS) -m proof $(ARGS)

docs: $(VENV)/.docs ## Make the site, build/docs/index.html, to open in a browser; broken links fail
	rm -rf build/docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
	@echo "The site is build/docs/index.html."

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[docs]'
	@touch $@

clean: ## Remove builds and caches; .venv stays
	rm -rf build dist *.egg-info models/build models/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(wildcard $(SOURCES)) -name __pycache__ -type d -prune -exec rm -rf {} +
