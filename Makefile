# make demo    a mixture streamed: a table, pictures and an animation        (about a minute)
# make test    the test suite without what is slow
# make slow    the rest of it: slow tests, and the code of the documentation's pages
# make check   both in one run, in which tests of a file share what they compile
# make spark   tests of the Spark adapter: needs Java
# make lint    format, lint, types, import layers
# make docs    the documentation, into site/; whether its numbers are those of docs/results/, and its search finds things
# make bench   speed against blackjax and NumPyro, wide tables, first answers, into bench-output/
#
# Each command sets up what it needs in .venv by itself: with uv where it is installed, else with
# python3 -m venv and pip. PYTHON=python3.12 picks another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(shell command -v uv 2>/dev/null)

# Files under .stamps say that a set of packages is installed for this pyproject.toml.
ifdef UV
make_venv = $(UV) venv --quiet --allow-existing --python $(PYTHON) $(VENV)
install = $(UV) pip install --quiet --python $(BIN)/python
else
make_venv = $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
install = $(BIN)/python -m pip install --quiet --no-compile
endif

# Modules are compiled when they are first imported, and kept for the processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test slow check spark lint docs bench clean

demo: .stamps/demo
	$(BIN)/python -m paper.demo --out demo-output

# Files in the order of tests/conftest.py, which knows the long ones; xdist would begin with those of most tests.
test: .stamps/test
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow and not docs and not spark"

slow: .stamps/test
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "(slow or docs) and not spark"

check: .stamps/test
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not spark"

spark: .stamps/test .stamps/spark
	$(BIN)/python -m pytest tests/adapters/test_spark.py # also what needs PySpark alone

lint: .stamps/test .stamps/lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .stamps/test .stamps/docs
	$(BIN)/python docs/check_numbers.py
	$(BIN)/python -m benchmarks.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/check_search.py site

bench: .stamps/bench
	$(BIN)/python -m benchmarks --out bench-output

clean:
	rm -rf $(VENV) .stamps site demo-output bench-output

.stamps/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "opvi needs Python 3.11 or later; $(PYTHON) is older. Try: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Setting up $(VENV) (once) ..."
	@$(make_venv)
	@mkdir -p .stamps && touch $@

# What the tests need. Modules are compiled on all cores, not by pip on one: of large packages that tests import, which
# are less than half of what is installed. Lint, pages and Spark install theirs beside the tests.
imported = _pytest arviz blackjax equinox flax hypothesis jax jaxlib matplotlib narwhals numpy numpyro optax pandas polars \
  rich river scipy sklearn xarray
.stamps/ci: .stamps/test
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/' $(addprefix $(VENV)/lib/*/site-packages/,$(imported)) src \
	  > /dev/null || true
	@touch $@

.stamps/demo: .stamps/venv pyproject.toml
	@$(install) --editable '.[plots,cli]'
	@touch $@

.stamps/test: .stamps/venv pyproject.toml
	@$(install) --editable '.[plots,cli,serve,nats,kafka,postgresql,sklearn,river,numpyro,arviz]' --group test
	@touch $@

# An extra without opvi itself, which tests may be using meanwhile: CI installs these beside them.
extra = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"])
.stamps/spark .stamps/docs: .stamps/%: .stamps/venv pyproject.toml
	@$(install) $$($(BIN)/python -c '$(call extra,$*)')
	@touch $@

.stamps/lint: .stamps/venv pyproject.toml
	@$(install) --group lint
	@touch $@

.stamps/bench: .stamps/venv pyproject.toml
	@$(install) --editable '.[cli,sklearn]' --group bench
	@touch $@
