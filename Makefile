# Short names for the scripts. `make` alone lists them.
.DEFAULT_GOAL := help
.PHONY: help run demo curriculum trainers up down test certify ci check lint tasks bench bench-quick bench-nodes soak clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## a gateway with environments as local processes: no Docker, no Redis
	scripts/install run
	@scripts/bubblewrap >/dev/null || echo "environments with sandboxes (os, coding) will not be offered" >&2
	.venv/bin/gateway serve $(ARGS)

demo: ## install everything and play a first episode with the official clients
	scripts/install demo
	.venv/bin/python examples/demo.py $(ARGS)

curriculum: ## compare three curricula with a small learner; make curriculum ARGS="--environment game"
	scripts/install bench
	.venv/bin/python examples/curriculum.py $(ARGS)

trainers: ## trainers learn on the gateway, about five minutes; make trainers ARGS=--record updates docs/trainers.md
	scripts/install bench
	scripts/install
	scripts/docker-engine
	@scripts/redis >/dev/null
	scripts/base-image
	scripts/build-images base math
	scripts/trainers --all
	.venv/bin/python -m tests.trainers $(ARGS)

up: ## the gateway on Docker: chooses base images, makes keys, builds, starts
	scripts/docker-engine
	scripts/base-image
	project=$$(scripts/compose-project --own) && IMAGE_TAG=$$project scripts/build-images
	@scripts/keys >/dev/null
	docker compose up --detach --wait --wait-timeout 120
	@echo "the gateway is at http://$$(docker compose port gateway 8080)"
	@scripts/keys

down: ## stop the stack of `make up` and its workers; data and .env stay
	scripts/down

test: ## all tests; make test ARGS="tests/unit -k lease" runs some
	scripts/test $(ARGS)

certify: ## right, wrong and constant answers of all bundled tasks; writes docs/certified.md
	scripts/install
	.venv/bin/python -m tests.answers.certify $(ARGS)

ci: ## what CI runs, in a fresh clone in a temporary folder
	scripts/ci

check: ## format, lint, types, imports, versions; changes nothing
	scripts/check

lint: ## format the code and apply automatic fixes
	scripts/lint

tasks: ## regenerate the task files of the math environment
	scripts/install
	.venv/bin/python scripts/make-math-tasks $(ARGS)

bench: ## the benchmarks
	scripts/install bench
	scripts/openenv-clients --server
	@scripts/redis >/dev/null
	scripts/bench-peers --chp
	.venv/bin/python -m bench.run $(ARGS)

bench-quick: ## the benchmarks in about three minutes
	@$(MAKE) --no-print-directory bench ARGS="--quick $(ARGS)"

bench-nodes: ## one, two and three machines of scripts/swarm-lab, about five minutes; needs root
	scripts/install bench
	scripts/docker-engine
	@scripts/redis >/dev/null
	scripts/base-image
	scripts/build-images base gateway
	.venv/bin/python -m bench.run --only nodes --output bench/results/nodes.json $(ARGS)

MINUTES ?= 20

soak: ## two replicas under load for MINUTES (20) while things break; needs an engine and Redis
	scripts/install bench
	scripts/docker-engine
	@scripts/redis >/dev/null
	scripts/base-image
	scripts/build-images base
	.venv/bin/python -m bench.soak --minutes $(MINUTES) $(ARGS)

clean: ## remove the venv, caches and builds of this checkout, and images that newer builds replaced
	rm -rf .venv .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -prune -exec rm -rf {} +
	-docker image prune --force --filter label=org.opencontainers.image.vendor=env-gateway
