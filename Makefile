# Each target sets up what it needs: only Python >= 3.11 and make have to be there. A stock Mac's python3 is 3.9.
ifndef PYTHON
PYTHON := $(shell for name in python3 python3.14 python3.13 python3.12 python3.11 /opt/homebrew/bin/python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done || echo python3)
endif
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# One more than two cores: the tests wait for other processes for a fifth of their time.
PROCESSES ?= 3
MINUTES ?= 60
PYTEST := $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal --durations 20 --durations-min 1

.DEFAULT_GOAL := help
.PHONY: help mac-check install serve desktop app quick test test-all landing soak agents peers check advisories format bench campaign screenshots icons dist formula lock clean

help: ## Show what each target does
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

$(VENV)/installed: requirements.lock pyproject.toml
	@$(PYTHON) tools/python.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Paceline into $(VENV) (once)…"
	@$(PIP) install --require-hashes -r requirements.lock
	@$(PIP) install --no-deps --editable .
	@touch $@

$(VENV)/installed-dev: requirements-dev.lock $(VENV)/installed
	@echo "Installing the development tools into $(VENV) (once)…"
	@awk '/^[a-z]/ { is_own = /^uv==/ } is_own' $< | $(PIP) install --require-hashes -r /dev/stdin
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r $<
	@touch $@

$(VENV)/published: tests/published.py $(VENV)/installed-dev
	@$(BIN)/python -m tests.published
	@touch $@

$(VENV)/published-npm: tests/clients/javascript/package-lock.json $(VENV)/published
	@$(BIN)/python -m tests.published npm
	@touch $@

$(VENV)/clients/installed: tests/clients/requirements.lock $(VENV)/installed-dev
	@echo "Installing the clients that the tests run beside Paceline (once)…"
	@$(PYTHON) -m venv $(VENV)/clients
	@$(BIN)/uv pip install --quiet --python $(VENV)/clients/bin/python --require-hashes -r $<
	@touch $@

mac-check: $(VENV)/installed-dev ## Measure what only a Mac can say, in 40 minutes at most (MODEL=folder)
	@$(BIN)/python -m bench.mac_check $(if $(MODEL),--model $(MODEL)) $(ARGS)

peers: $(VENV)/installed-dev ## Install the servers that `make bench` compares with, besides mlx-lm's (a GB or more)
	@for peer in rapid-mlx==0.16.10 mlx-dspark==0.20.3; do \
		$(PYTHON) -m venv $(VENV)/peers/$${peer%%==*} && \
		$(BIN)/uv pip install --quiet --python $(VENV)/peers/$${peer%%==*}/bin/python $$peer 'mlx[cpu]' || exit; \
	done

$(VENV)/agents/installed: tests/agents/package-lock.json $(VENV)/clients/installed
	@$(BIN)/python -m tests.agents.installed
	@touch $@

$(VENV)/installed-desktop: requirements-desktop.lock $(VENV)/installed
	@echo "Installing what the menu bar needs into $(VENV) (once)…"
	@$(PIP) install --require-hashes -r requirements-desktop.lock
	@touch $@

install: $(VENV)/installed ## Install Paceline into .venv, after an update too

serve: $(VENV)/installed ## Start Paceline with the embedded models
	@$(BIN)/paceline serve $(ARGS)

desktop: $(VENV)/installed-desktop ## Install what the menu bar needs

app: desktop ## Install Paceline.app: the server in the menu bar, by a double click (macOS)
	@$(BIN)/paceline app install $(ARGS)

test: $(VENV)/published ## Run the test suite: ten minutes, and nothing but Python (PROCESSES=3)
	@$(PYTEST) -m "not system and not soak and not agents" $(ARGS)

QUICK = architecture core models scheduler store text api benchmark tools \
  worker/test_book.py supervision/test_client.py worker/test_loop.py worker/test_text_thread.py \
  engine/test_pool.py engine/test_pool_orders.py engine/test_prefix_index.py

quick: $(VENV)/published ## Run what only computes and is fast: two minutes, between two edits
	@$(PYTEST) -m "not system and not soak and not agents" $(addprefix tests/,$(QUICK)) $(ARGS)

test-all: $(VENV)/published-npm $(VENV)/clients/installed ## Run the suite with what needs chromium, npm or a screen of X11
	@$(PYTEST) -m "not soak and not agents" $(ARGS)

landing: $(VENV)/published-npm ## Run the share of the soak that runs before each merge: four minutes
	@$(PYTEST) -m "soak and landing" $(ARGS)

soak: $(VENV)/published-npm ## Run the long random tests: an hour of schedules and simulations, then attacks
	@$(PYTEST) -m soak $(ARGS)
	@# Alone: it measures silences.
	@$(BIN)/python -m campaign --minutes 5

agents: $(VENV)/agents/installed ## Let coding agents edit a file each (Linux on x64; fetches 1 GB once)
	@$(PYTEST) -m agents tests/agents $(ARGS)

check: $(VENV)/installed-dev ## Check format, lint, types, import contracts and the sizes of packages
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/sizes.py

advisories: $(VENV)/installed-dev ## Warn of known vulnerabilities in the locked packages
	@$(BIN)/python tools/advisories.py requirements.lock requirements-dev.lock

format: $(VENV)/installed-dev ## Format the code and apply safe lint fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/installed-dev ## Measure speed against mlx-lm, paired in one run
	@$(BIN)/python -m bench.comparison $(ARGS)

campaign: $(VENV)/installed-dev ## Attack a running server by turns: make campaign MINUTES=60
	@$(BIN)/python -m campaign --minutes $(MINUTES) $(ARGS)

screenshots: $(VENV)/installed-dev ## Photograph every page into docs/screenshots (needs chromium)
	@$(BIN)/python -m tests.browser.screenshots

icons: $(VENV)/installed-dev ## Draw the icons of app and menu bar (needs chromium)
	@$(BIN)/python -m tests.browser.icons

LOCK := uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --no-emit-index-url --quiet pyproject.toml

dist: $(VENV)/installed-dev ## Build wheel and sdist into dist/
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation

formula: $(VENV)/installed-dev ## Write dist/paceline.rb for Homebrew: make formula URL=… HOMEPAGE=… (after `make dist`)
	@$(BIN)/python tools/release.py formula dist/*.whl --url "$(URL)" --homepage "$(HOMEPAGE)" >dist/paceline.rb

lock: ## Rewrite the lock files (needs uv)
	$(LOCK) -o requirements.lock
	$(LOCK) -c requirements.lock --extra desktop -o requirements-desktop.lock
	$(LOCK) -c requirements-desktop.lock --group dev -o requirements-dev.lock
	$(LOCK:pyproject.toml=tests/clients/requirements.in) -o tests/clients/requirements.lock

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
