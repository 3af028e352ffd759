# One virtual environment, .venv, made from the hashed locks. Every target can be the first on a fresh clone.
#   PYTHON=python3.12   interpreter the environment is made with (3.11 or newer)
#   ARGS='-k tamper'    extra arguments for pytest in `test`, `docs`, or for `bench` and `oracle`

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
# The project itself is built with the locked hatchling, so nothing is fetched that the lock does not name.
PIP := PIP_ROOT_USER_ACTION=ignore $(BIN)/python -m pip --disable-pip-version-check -q
INSTALL_PROJECT := $(PIP) install --no-deps --no-build-isolation -e .
# An interpreter that is not configured by the machine it happens to run on: locks come out the same everywhere.
COMPILE := env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null CUSTOM_COMPILE_COMMAND="make lock" \
	$(BIN)/python -m piptools compile -q --generate-hashes --strip-extras --allow-unsafe --no-header \
	--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options \
	--build-deps-for editable

# Modules whose lines and branches are all covered by tests (`make test-all` fails otherwise).
CORE := errors.py,result.py,continuation.py,records.py,credit.py,canonical.py,item_fields.py,tool_calls.py,atoms.py,fingerprint.py,interchange.py,lineage.py,terminal.py,pipeline.py
CORE_PACKAGES := selection/*,reconstruction/*,tokens/*
comma := ,
CORE_FILES := $(subst $(comma),$(comma)src/gristmill/,src/gristmill/$(CORE),$(CORE_PACKAGES))

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- environment -----------------------------------------------------------------------------------------------------

.PHONY: setup setup-dev
setup: .venv/.stamp-runtime ## install gristmill into .venv from the runtime lock
setup-dev: .venv/.stamp-dev ## the same, with everything the checks need

.venv/.stamp-venv:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "error: no interpreter called '$(PYTHON)'" >&2; \
	  echo "hint: install Python 3.11 or newer, or name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 3; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Gristmill needs Python 3.11 or newer; '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1)" >&2; \
	  echo "hint: name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 3; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' cannot make virtual environments: its venv or ensurepip module is missing" >&2; \
	  echo "hint: install it (Debian, Ubuntu: the python3-venv package), or name another PYTHON" >&2; exit 3; }
	"$(PYTHON)" -m venv --clear .venv
	@touch $@

.venv/.stamp-runtime: .venv/.stamp-venv requirements.lock pyproject.toml
	$(PIP) install --require-hashes -r requirements.lock
	$(INSTALL_PROJECT)
	@touch $@

# The development lock contains the runtime lock, so one environment serves both.
.venv/.stamp-dev: .venv/.stamp-venv requirements.lock requirements-dev.lock pyproject.toml
	$(PIP) install --require-hashes -r requirements-dev.lock
	$(INSTALL_PROJECT)
	@touch .venv/.stamp-runtime $@

# ---- use -------------------------------------------------------------------------------------------------------------

.PHONY: demo bench
demo: setup ## the main job: an agent captured live, and recorded rollouts
	@$(BIN)/gristmill demo

bench: setup ## benchmarks: medians and ratios to a floor measured in the same run
	@$(BIN)/python -m bench $(ARGS)

# ---- checks ----------------------------------------------------------------------------------------------------------

.PHONY: test test-all lint type imports docs oracle e2e-vllm e2e-harness e2e-trainers e2e-templates load
test: setup-dev ## the quick tests: no slow, no end-to-end ones
	$(BIN)/python -m pytest -m "not slow and not e2e" $(ARGS)

test-all: lint type imports ## every check: lint, types, imports, all tests with docs, coverage
	$(BIN)/python -m pytest --cov --cov-report=
	$(BIN)/python -m coverage report --include='$(CORE_FILES)' --fail-under=100

lint: setup-dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup-dev ## basedpyright, strict, on src
	$(BIN)/basedpyright --pythonpath $(BIN)/python

imports: setup-dev ## import-linter: layers and the pure core
	$(BIN)/lint-imports --no-logo

docs: setup-dev ## run the documentation's snippets, check that generated reference is current
	$(BIN)/python -m pytest tests/docs $(ARGS)

oracle: setup-dev ## long property run against the brute-force oracle
	$(BIN)/python -m tests.properties.long_run $(ARGS)

# Slow and heavy: each sets up what it needs below ~/.cache/gristmill-e2e, once.
e2e-vllm: setup-dev ## a real vLLM on CPU behind the gateway: ids of rows are the engine's
	bash tests/e2e/vllm.sh $(ARGS)

e2e-harness: setup-dev ## real harnesses through the gateway, offline
	bash tests/e2e/harness.sh $(ARGS)

e2e-trainers: ## rows against the real classes of the trainers, an environment each
	bash tests/e2e/trainers.sh $(ARGS)

e2e-templates: setup-dev ## token-in continuation on every chat template that packages carry
	bash tests/e2e/templates.sh $(ARGS)

load: setup-dev ## 1,000 rollouts while the gateway is killed and restarted
	$(BIN)/python -m tests.gateway.load $(ARGS)

# ---- upkeep ----------------------------------------------------------------------------------------------------------

.PHONY: lock clean
lock: setup-dev ## re-make both lock files (LOCK=--upgrade for newer releases)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "error: locks are made with the oldest supported Python, 3.11; .venv has $$($(BIN)/python -V)" >&2; \
	  echo "hint: make clean, then make lock PYTHON=python3.11" >&2; exit 3; }
	$(COMPILE) $(LOCK) --extra gateway --extra engine --extra postgres --extra archive -o requirements.lock pyproject.toml
	$(COMPILE) $(LOCK) --extra gateway --extra engine --extra postgres --extra archive --extra dev -c requirements.lock -o requirements-dev.lock pyproject.toml

clean: ## remove the environment and everything the tools left
	rm -rf .venv build dist htmlcov .coverage .coverage.* .hypothesis .pytest_cache .ruff_cache .import_linter_cache
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
