# On a machine with only Python (3.11 or newer) and make, `make train` and `make test` do all the set-up they need.

# The supported Pythons that run here, by their names or among pyenv's versions. The newest gets the newest JAX.
PYTHONS := $(shell for v in 3.11 3.12 3.13; do \
    for p in python$$v "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$v.*/bin/python$$v; do \
      "$$p" -c 'import ensurepip' 2>/dev/null && echo "$$p" && break; done; done)
PYTHON ?= $(or $(lastword $(PYTHONS)),python3)
OLDEST := $(filter %python3.11,$(PYTHONS))
VENV ?= .venv
WORKERS ?= 2
ARGS ?=

# A machine with an NVIDIA driver gets the CUDA libraries; any other gets the compiler alone, for `jfsdp plan`. There
# JAX's CUDA plugin would look for a driver and complain: NO_GPU, a line that each start of .venv's Python runs, tells it.
ifneq ($(wildcard /dev/nvidiactl),)
EXTRAS ?= dev,cuda12
else
EXTRAS ?= dev,plan
endif
NO_GPU := import glob, os; any(map(glob.glob, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel*", "/dev/vfio/*"))) or os.environ.setdefault("JAX_PLATFORMS", "cpu")

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := jfsdp models scripts tests examples docs/conf.py docs/make_options.py

# What compiles nothing, or next to nothing: tables, parsing, refusals, bytes by theory, data, files, rules of the house.
QUICK := tests/layout $(addprefix tests/test_,house.py arguments.py options_page.py troubleshooting.py) \
  $(addprefix tests/plan/test_,collectives.py hardware.py hlo.py theory.py timeline.py) tests/engine/test_schedule.py \
  $(addprefix tests/trainer/test_,data_chat.py data_corpus.py data_messages.py data_packing.py data_tokenizer.py options.py) \
  $(addprefix tests/checkpoint/foreign/test_,mapping.py safetensors.py)
# Steps that equal one device, in every program, strategy, storage form and mesh.
PARITY := $(addprefix tests/engine/test_,parity.py manual_parity.py pipeline_parity.py) tests/train/test_storage.py \
  tests/test_compat.py

.DEFAULT_GOAL := help
.PHONY: help install train finetune test gpu quick oldest lint format proofs docs dist clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) EXTRAS=$(EXTRAS) WORKERS=$(WORKERS) ARGS=\"...\""

install: $(STAMP) ## Make .venv with everything that the other targets need

$(STAMP): pyproject.toml models/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jfsdp needs Python 3.11 or newer, and $(PYTHON) is older; use make PYTHON=python3.13"; exit 1; }
	@echo "Installing jfsdp with its extras $(EXTRAS) in $(VENV): some minutes, up to 8 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]' -e ./models
	@echo '$(NO_GPU)' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/no_gpu.pth"
	@touch $@

train: install ## Train a tiny Llama on the standard library's source; ARGS="--steps 100" for more
	$(BIN)/python scripts/train.py --recipe stdlib $(ARGS)

finetune: $(VENV)/.peft ## Fine-tune what `make train` trained, with adapters; read them again in PEFT
	$(BIN)/python scripts/finetune.py $(ARGS)

$(VENV)/.peft: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[train,peft]' -e ./models
	@touch $@

test: install $(if $(ARGS),,lint) ## Lint, check types, run the tests; with ARGS only these tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

gpu: install ## Prove and measure on this machine's GPUs in 8 minutes; writes gpu-proof.md and gpu-proof.json
	$(BIN)/python scripts/gpu_proof.py $(ARGS)

quick: install ## What two minutes can show without compiling: layouts, options, data, files, bytes by theory
	$(BIN)/python -m pytest -n $(WORKERS) $(QUICK) $(ARGS)

oldest: ## What quick shows, and parity, on Python 3.11: it gets the oldest JAX that is served
ifneq ($(OLDEST),)
	@$(MAKE) --no-print-directory install PYTHON=$(OLDEST) VENV=.venv-3.11 EXTRAS=$(subst dev,test,$(EXTRAS))
	.venv-3.11/bin/python -m pytest -n $(WORKERS) --dist loadfile $(QUICK) $(PARITY) $(ARGS)
else
	@echo "make oldest: there is no Python 3.11 with ensurepip here, so the oldest JAX was not tried"
endif

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

dist: install ## Build wheels and sdists in dist/, and try the wheels in empty environments
	rm -rf dist build && $(BIN)/python -m pip install --quiet build
	for of in . ./models; do $(BIN)/python -m build --quiet --outdir dist $$of || exit 1; done
	scripts/try_wheels dist $(PYTHONS)

clean: ## Remove builds and caches; .venv stays
	rm -rf build dist *.egg-info models/build models/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(wildcard $(SOURCES)) -name __pycache__ -type d -prune -exec rm -rf {} +
