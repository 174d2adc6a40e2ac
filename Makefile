# `make help` lists the targets. Each makes the virtual environment that it needs.
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu in the environment spares them torch's CUDA libraries.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2 --dist worksteal
INTEGRATION_ARGS ?= -n 2 --dist worksteal
SERVERS_VENV ?= .venv-servers
FRAMEWORKS_ARGS ?=
WHEEL_VENV ?= .venv-wheel
FRAMEWORKS_VENV ?= .venv-frameworks
DOCS_VENV ?= .venv-docs
TERRAFORM_VENV ?= .venv-terraform
NEWEST_VENV ?= .venv-newest
OLDEST_VENV ?= .venv-oldest
PYTHONS ?= 3.10 3.12 3.13
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SERVERS_INSTALLED := $(SERVERS_VENV)/.installed
AZURITE := $(SERVERS_VENV)/node_modules/.bin/azurite-blob
FRAMEWORKS_INSTALLED := $(FRAMEWORKS_VENV)/.installed
DOCS_INSTALLED := $(DOCS_VENV)/.installed
TERRAFORM_INSTALLED := $(TERRAFORM_VENV)/.installed

export AWS_EC2_METADATA_DISABLED := true

.PHONY: help demo test kit coverage test-gpu faults mutants house servers integration soak exhaustive frameworks frameworks-installed package newest oldest pythons pythons-installed docs terraform lint format types imports bench clean

help: ## Show what there is.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(INSTALLED) ## Train, kill, resume, reshard: the main job, on an embedded store. DEMO_ARGS="--uri s3://…" for yours.
	$(BIN)/python -m examples.demo $(DEMO_ARGS)

test: $(INSTALLED) ## Run the tests, but for those of the lanes below. Takes minutes.
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not faults and not slow"

KIT := tests/benchmarks tests/docs tests/examples tests/mutants tests/terraform tests/testing
kit: $(INSTALLED) ## Test the documents, examples, benchmarks, Terraform modules and the test kit itself.
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not faults" $(KIT)

coverage: $(INSTALLED) ## Run the same tests and the slow ones with coverage, of branches and of every rank.
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not faults" --places local,s3 --cov --cov-report=term:skip-covered --cov-fail-under=90

faults: $(INSTALLED) ## Run what takes longer: kill ranks, flip bits, interleave calls, stall stores.
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "faults or slow"

mutants: $(INSTALLED) ## Apply each deliberate defect of tests/mutants to a copy, and expect the tests to catch it.
	$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

house: $(INSTALLED) ## Print how large the code base is, beside the bars that it should keep.
	$(BIN)/python -m tests.house

# A machine with a GPU may have no network, and a torch that fits its driver: what is there is used, and nothing
# installed. It takes torch, awscrt, fsspec, msgspec, numpy and xxhash, and pytest, pytest-timeout, hypothesis,
# safetensors.
GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) $(PYTHON))

test-gpu: export PYTHONPATH := $(CURDIR)/src:$(CURDIR):$(PYTHONPATH)
test-gpu: ## Run the GPU's tests and benchmarks where there is one, with GPU_PYTHON; installs nothing.
	$(GPU_PYTHON) -m pytest tests/gpu -m gpu
	$(GPU_PYTHON) -m benchmarks.gpu $(BENCH_ARGS) || [ $$? = 2 ]

$(SERVERS_INSTALLED): tests/integration/requirements.txt
	$(PYTHON) -m venv $(SERVERS_VENV)
	$(SERVERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

servers: $(SERVERS_INSTALLED) ## Install the servers that `make integration` and `make soak` run (Ceph's as root).
	tests/integration/install.sh
	test -x $(AZURITE) || npm install --silent --no-audit --no-fund --prefix $(SERVERS_VENV) azurite@3.35.0

integration: export CLOUDCKPT_SERVERS_VENV := $(abspath $(SERVERS_VENV))
integration: $(INSTALLED) servers ## Run the tests on real servers, which it installs.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt adlfs==2026.8.0
	$(BIN)/python -m pytest tests/integration tests/e2e tests/convert tests/cli -m "not faults" --places s3,rgw,fake-gcs $(INTEGRATION_ARGS)

soak: export CLOUDCKPT_SERVERS_VENV := $(abspath $(SERVERS_VENV))
soak: $(INSTALLED) servers ## Run several jobs at once for minutes behind a proxy that answers nonsense. CLOUDCKPT_SOAK_S says how long.
	$(BIN)/python -m pytest tests/soak -s -p no:logging

exhaustive: export CLOUDCKPT_EXHAUSTIVE := 1
exhaustive: export CLOUDCKPT_HYPOTHESIS := thorough
exhaustive: export CLOUDCKPT_KILLS := all
exhaustive: export CLOUDCKPT_SCHEDULES ?= 20000
exhaustive: export CLOUDCKPT_SERVERS_VENV := $(abspath $(SERVERS_VENV))
exhaustive: $(INSTALLED) servers ## Every interleaving, kill and schedule that the other targets sample; takes hours.
	$(BIN)/python -m pytest tests/commit tests/publication tests/simulated tests/e2e/test_crash.py --timeout 7200 $(INTEGRATION_ARGS)
	$(BIN)/python -m pytest -m hypothesis $(PYTEST_ARGS)

$(FRAMEWORKS_INSTALLED): tests/frameworks/requirements.txt tests/frameworks/without_requirements.txt tests/frameworks/constraints.txt pyproject.toml
	$(PYTHON) -m venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $< -e '.[s3,gcs,zstd,testing]'
	$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python -r tests/frameworks/without_requirements.txt
	touch $@

# For those who install beside something else.
frameworks-installed: $(FRAMEWORKS_INSTALLED)

frameworks: export CLOUDCKPT_SERVERS_VENV := $(abspath $(SERVERS_VENV))
frameworks: $(FRAMEWORKS_INSTALLED) servers ## Run the integrations with the real packages, which it installs.
	$(FRAMEWORKS_VENV)/bin/python -m pytest tests/frameworks --confcutdir tests/frameworks --override-ini filterwarnings=default --timeout 900 $(FRAMEWORKS_ARGS)

package: ## Build the sdist and the wheel, and test and type-check what is installed from it, with no checkout in sight.
	rm -rf dist $(WHEEL_VENV)
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/package/requirements.txt
	$(WHEEL_VENV)/bin/python -m build --outdir dist .
	$(WHEEL_VENV)/bin/python -m twine check --strict dist/*
	$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(ls $(CURDIR)/dist/*.whl)[all,testing]"
	$(WHEEL_VENV)/bin/python -m pytest tests/package --confcutdir tests/package --timeout 300

# Not held to constraints.txt: these two look for what other versions break, before a user finds it.
newest: ## Run the tests with the newest torch, and the newest of all else.
	rm -rf $(NEWEST_VENV)
	$(PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e '.[dev]'
	$(NEWEST_VENV)/bin/python -m pytest $(PYTEST_ARGS) -m "not faults"

oldest: ## Run the tests with the oldest torch that pyproject.toml allows, and the oldest of all else that it names.
	rm -rf $(OLDEST_VENV)
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(PYTHON) tests/docs/oldest.py > $(OLDEST_VENV)/constraints.txt
	$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLDEST_VENV)/constraints.txt -e '.[dev]'
	$(OLDEST_VENV)/bin/python -m pytest $(PYTEST_ARGS) -m "not faults" --override-ini filterwarnings=default

# Of the modules that depend most on the interpreter: threads, the end of a process, buffers, types. Plans and tensors are
# torch's matter, and the same on each version.
QUICK := tests/background tests/format tests/io tests/pipeline $(wildcard tests/test_*.py)
QUICK_VENV := .venv-python

# Not made where the version is not on this machine, or has no such torch.
$(QUICK_VENV)%/.installed: pyproject.toml constraints.txt
	@python=python$*; \
	$$python -c '' 2>/dev/null || python=$$(ls "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$*.*/bin/$$python 2>/dev/null | tail -1); \
	if ! "$$python" -m venv $(@D) 2>/dev/null; then \
		echo "== Python $*: skipped, it is not on this machine"; \
	elif ! $(@D)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep ^torch== constraints.txt)" -e '.[dev]'; then \
		echo "== Python $*: skipped, its packages cannot be had"; \
	else \
		touch $@; \
	fi

# For those who install beside something else.
pythons-installed: $(PYTHONS:%=$(QUICK_VENV)%/.installed)

pythons: pythons-installed ## Run quick tests on the other versions of Python that PYTHONS names, each where it and its torch can be had.
	@for version in $(PYTHONS); do \
		[ -e $(QUICK_VENV)$$version/.installed ] || continue; \
		echo "== Python $$version"; \
		$(QUICK_VENV)$$version/bin/python -m pytest $(PYTEST_ARGS) -m "not faults and not slow and not multirank" $(QUICK) || exit 1; \
	done

$(DOCS_INSTALLED): docs/_site/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS_INSTALLED) ## Build the documentation's site in site/, where a broken link is an error.
	$(DOCS_VENV)/bin/mkdocs build --strict

$(TERRAFORM_INSTALLED): tests/terraform/requirements.txt
	$(PYTHON) -m venv $(TERRAFORM_VENV)
	$(TERRAFORM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

terraform: $(TERRAFORM_INSTALLED) ## Scan the Terraform modules for what is unsafe, and check their format where Terraform is installed.
	$(TERRAFORM_VENV)/bin/python tests/terraform/scan.py

lint: $(INSTALLED) types imports ## Check style, types and the direction of imports.
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/lint-imports

format: $(INSTALLED) ## Format the code.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(INSTALLED) ## Measure saves and loads beside the rivals, which it installs, in minutes. BENCH_ARGS="--help" says what else.
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean: ## Remove what the other targets made.
	rm -rf $(VENV) $(SERVERS_VENV) $(WHEEL_VENV) $(FRAMEWORKS_VENV) $(DOCS_VENV) $(TERRAFORM_VENV) $(NEWEST_VENV) $(OLDEST_VENV) $(QUICK_VENV)* build dist site .benchenv-*
	rm -rf .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find benchmarks docs examples src terraform tests -name __pycache__ -prune -exec rm -rf {} +
