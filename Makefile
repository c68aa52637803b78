# What a person runs first. `make` alone lists the targets.

PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null && echo "$$name" && exit; done; echo python3)
BIN := .venv/bin
WORKERS ?= 2
PACKAGES := -p arriero.schemas -p arriero.transports -p arriero.producer -p arriero.workers -p arriero.ops

.DEFAULT_GOAL := help
.PHONY: help setup dev demo demo-kafka test test-real lint contract chaos bench clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: ## Make .venv with everything a stack needs (once about five minutes, then a second)
	@$(PYTHON) ops/setup/setup.py

dev: ## The same, with what tests and checks need
	@$(PYTHON) ops/setup/setup.py --dev
	@mkdir -p .cache/src && ln -sfn ../.. .cache/src/arriero

demo: setup ## Watch prompts go through the queue and stream back
	@$(BIN)/arriero demo

demo-kafka: setup ## The same over a real Apache Kafka and a real Redis
	@$(BIN)/arriero demo --testbed

test: dev ## Run the tests; those on a real Kafka and Redis where Java, Maven and redis-server are here
	@$(BIN)/python -c "from arriero.ops.testbed import missing; print(missing() and f'left out: {missing()}' or 'with a real Kafka and Redis')"
	@$(BIN)/python -c "from arriero.ops.testbed import missing; raise SystemExit(missing() is not None)" \
		&& $(BIN)/python -m arriero.ops.testbed --fetch || true
	@$(BIN)/arriero models fetch > /dev/null
	$(BIN)/python -m pytest -n $(WORKERS)

test-real: dev ## Run the tests, and fail where Kafka or Redis are missing
	$(BIN)/python -m arriero.ops.testbed --fetch
	@$(BIN)/arriero models fetch > /dev/null
	ARRIERO_DEMAND_REAL=1 $(BIN)/python -m pytest -n $(WORKERS)

lint: dev ## Style, types, compose file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml

contract: dev ## Write the JSON contract anew
	$(BIN)/python -m arriero.schemas.contract

chaos: dev ## The long form of the chaos suite: 1,000 kills on each pair, about an hour; it goes on where it was
	$(BIN)/arriero chaos run --pair embedded --kills 1000 --results docs/reliability.jsonl
	$(BIN)/arriero chaos run --pair real --kills 1000 --results docs/reliability.jsonl
	$(BIN)/arriero chaos report docs/reliability.jsonl --into docs/reliability.md

bench: setup ## Measure the engine, then the fleet against it
	$(BIN)/arriero bench engine
	$(BIN)/arriero bench fleet

clean: ## Remove what was built here (not the cache of models and jars)
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
