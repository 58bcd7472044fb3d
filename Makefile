# Every target makes .venv, or adds to it what it lacks; another PYTHON has an environment of its own.
# Versions come from the lock of its version, requirements-3.11.lock and so on.
PYTHON ?= python3
VERSIONS := 3.11 3.12 3.13
version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(call version,$(PYTHON)))
BIN := $(VENV)/bin
VERSION := $(call version,$(firstword $(wildcard $(BIN)/python) $(PYTHON)))
# A Python newer than all locks takes the newest.
LOCK := $(firstword $(wildcard requirements-$(VERSION).lock) $(lastword $(VERSIONS:%=requirements-%.lock)))

.DEFAULT_GOAL := help
.PHONY: help train test parity stores fuzz mutate soak lint lock house bench bench-gpu docs docs-serve docs-release
.NOTPARALLEL:

help: ## this list
	@echo "make TARGET [VARIABLE=value ...]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 13

train: $(VENV)/.has-train $(DEVICE:%=$(VENV)/.jax-%) ## train a recipe: the default one, or RECIPE=name; ARGS="path.to.field=value ..."; DEVICE=cuda12 for a GPU
	@$(BIN)/weft train $(RECIPE) $(ARGS)

# Each process takes whole files as long as both have some, so what the tests of a file share is made once.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/.has-dev ## run the tests and the examples in docstrings, without parity; ARGS="tests/config -x" for some of them
	@$(PYTEST) $(if $(findstring tests/parity,$(ARGS)),,--ignore=tests/parity) $(ARGS)

parity: $(VENV)/.has-dev ## compare with Flax and transformers: the same programs on both; ARGS="-k conv" for some of them
	@$(PYTEST) tests/parity $(ARGS)

STORES := $(VENV)-stores

stores: $(STORES)/.has-stores ## test copies of checkpoints in object stores, with servers of S3 and Google Cloud Storage on this machine
	@WEFT_TEST_STORES="s3 gs" $(STORES)/bin/python -m pytest tests/trainer/checkpointer/test_stores.py -k "s3 or gs" $(ARGS)

fuzz: $(VENV)/.has-dev ## search for defects with random cases; MINUTES=30 for each fuzzer, SEED=0, ONLY="name ..."
	@$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),5) --seed $(or $(SEED),0) $(ONLY)

mutate: $(VENV)/.has-dev ## change single expressions in changed files and run their tests; BASE=commit, FILES="...", COUNT=30, SEED=0
	@$(BIN)/python -m tests.mutate --base $(or $(BASE),origin/main) --count $(or $(COUNT),30) \
		--seed $(or $(SEED),0) $(FILES)

soak: $(VENV)/.has-dev ## kill a training process 60 times, or KILLS=n, shrink and grow a run, and stop, freeze and hang several
	@WEFT_SOAK_KILLS=$(or $(KILLS),60) $(BIN)/python -m pytest -q tests/trainer/test_kills.py tests/faults \
		tests/config/test_effects.py tests/launch/test_shrinking.py tests/trainer/checkpointer/test_memory.py

lint: $(VENV)/.has-dev ## check format, style, types, layers, English and line ends
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check --output-format concise .
	@$(BIN)/ruff check --preview --select PLW1514 --output-format concise . # unspecified-encoding
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python -m tests.house.english
	@! git grep -lI "$$(printf '\r')" || { echo "these files have CR line ends" >&2; exit 1; }

house: $(VENV)/.has-dev ## measure the code base: call depth, imports, types, sizes
	@$(BIN)/python -m tests.house

bench: $(VENV)/.has-bench ## measure against raw JAX and other libraries; ONLY="name ..." for some questions
	@$(BIN)/python -m benchmarks $(ONLY)

bench-gpu: $(VENV)/.has-bench $(VENV)/.jax-$(or $(DEVICE),cuda12) ## measure training and attention on a GPU; ONLY="name ..." for some questions
	@$(BIN)/python -m benchmarks --gpu $(ONLY)

docs: $(VENV)/.has-docs ## build the documentation into site/, and check its links; REPOSITORY=https://... to link to
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@$(BIN)/python docs/check.py site

docs-serve: $(VENV)/.has-docs ## show the documentation at http://127.0.0.1:8000 and follow its changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

docs-release: docs ## add the documentation of this version to those in the git branch `documentation`; RELEASE=0.2 to name it
	@PATH="$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --branch documentation --update-aliases \
		$(or $(RELEASE),$(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' weft/__init__.py)) latest
	@PATH="$(BIN):$$PATH" $(BIN)/mike set-default --branch documentation latest

lock: ## resolve each version's lock again with uv; ARGS=--upgrade for the newest of everything
	@for version in $(VERSIONS); do \
		lock=requirements-$$version.lock; \
		uv pip compile --quiet --python-version $$version --all-extras --no-annotate $(ARGS) \
			pyproject.toml -o $$lock && \
		grep -vE '^(cuda|nvidia|triton)' $$lock >$$lock.new && mv $$lock.new $$lock || exit 1; \
	done
	@uv pip compile --quiet --universal --python-version $(firstword $(VERSIONS)) --group stores --no-annotate $(ARGS) \
		-o requirements-stores.lock

# A stamp per set of extras: recreated when these, the lock or the package's own dependencies change.
EXTRAS_train := train,examples
EXTRAS_dev := train,text,stores,parquet,hf,tfds,mlflow,optuna,eval,wandb,launch,dev,parity,clients,bench,examples
EXTRAS_bench := train,text,bench
EXTRAS_docs := train,text,examples,docs

$(VENV)/.has-%: Makefile $(LOCK) pyproject.toml | $(BIN)/python
	@echo "Installing weft-jax[$(EXTRAS_$*)] into $(VENV); the first time takes a few minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(LOCK) --editable '.[$(EXTRAS_$*)]'
	@touch $@

# An environment that has its own packages before those of the other. pip installs what both lack.
$(STORES)/.has-stores: Makefile requirements-stores.lock $(VENV)/.has-dev
	@echo "Installing object stores, and servers of these, into $(STORES)."
	@$(BIN)/python -m venv $(STORES)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>"$$($(STORES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/other.pth"
	@$(STORES)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-stores.lock
	@touch $@

# JAX for an accelerator: jax[cuda12], jax[cuda13] or jax[tpu].
$(VENV)/.jax-%: $(LOCK) | $(BIN)/python
	@echo "Installing jax[$*] into $(VENV); it is large."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(LOCK) 'jax[$*]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Weft needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
