# `make serve` and `make test` need only Python 3.11 or newer with venv.
VENV ?= .venv
PYTHON ?=
ARGS ?=
FUZZ ?= 50
JOBS ?= 2
BIN := $(VENV)/bin
BENCHMARKS := $(filter-out $(addprefix benchmarks/,soak.py against.py load_tools.py watched.py),$(wildcard benchmarks/[a-z]*.py))

export PYTHON
unexport PYTHONDONTWRITEBYTECODE  # the tests start hundreds of processes, and each would compile all that it imports

.PHONY: help setup setup-test setup-docs setup-dev serve test test-all fuzz chaos soak bench docs proto lint format types wheel clean

help:
	@echo "make serve [ARGS='--model PATH --port 8000 ...']   set up the environment and serve a model"
	@echo "make test | test-all [ARGS='-k name'] [JOBS=2]     run the tests (test-all: also the slow ones)"
	@echo "make fuzz [FUZZ=50]                                run the tests' state machines with FUZZ times as many steps"
	@echo "make chaos                                         kill and stop every role under load, and print a table"
	@echo "make soak [ARGS='--minutes 20']                    measure each process's resident memory under load"
	@echo "make docs                                          build the documentation site into build/site"
	@echo "make bench                                         run the benchmarks in benchmarks/"
	@echo "make lint | format | types | proto | wheel | clean  for developers"

setup:
	@tools/setup_venv.sh $(VENV)

setup-test:
	@tools/setup_venv.sh $(VENV) test

setup-docs:
	@tools/setup_venv.sh $(VENV) docs
	@tools/pkgview.sh

setup-dev:
	@tools/setup_venv.sh $(VENV) dev
	@tools/pkgview.sh

serve: setup
	@exec $(BIN)/alignedserve serve $(ARGS)

test: setup-test
	@exec $(BIN)/python -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder -m "not slow" $(ARGS)

test-all: FUZZ = 3
test-all: setup-test  # the chaos tests run alone, because they limit pauses, and whatever the others said; 5: ARGS chose no test
	@export ALIGNEDSERVE_FUZZ=$(FUZZ); rc=0; \
	  $(BIN)/python -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder --ignore tests/chaos $(ARGS) || rc=$$?; \
	  $(BIN)/python -m pytest tests/chaos $(ARGS) || { chaos=$$?; [ $$chaos = 5 ] || rc=$$chaos; }; \
	  [ $$rc = 0 ] || [ $$rc = 5 ]

fuzz: setup-test
	@ALIGNEDSERVE_FUZZ=$(FUZZ) exec $(BIN)/python -m pytest -k machine --timeout 0 $(ARGS) tests/unit

chaos: setup-test
	@exec $(BIN)/python -m pytest -s -m slow tests/chaos $(ARGS)

soak: setup-test
	@exec $(BIN)/python benchmarks/soak.py $(ARGS)

bench: setup-test
	@for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python "$$file" $(ARGS) || exit 1; done

docs: setup-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the site is in build/site; '$(BIN)/mkdocs serve' shows it and rebuilds it when pages change"

proto:
	tools/protoc.sh

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup-dev
	$(BIN)/mypy

wheel: setup-dev
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation -w dist . ./distributions/client

clean:
	rm -rf build dist *.egg-info src/*.egg-info .pkgview .pytest_cache .mypy_cache .ruff_cache
