# On a fresh machine, `make demo` and `make test` work right away: every target sets up .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NEWEST := .venv-newest

.PHONY: setup demo test test-gpu lint clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "morecl needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

demo: setup
	$(BIN)/morecl run digits-5t --method more     --out runs/demo/more     --overwrite
	$(BIN)/morecl run digits-5t --method morerp   --out runs/demo/morerp   --overwrite
	$(BIN)/morecl run digits-5t --method ncm      --out runs/demo/ncm      --overwrite
	$(BIN)/morecl run digits-5t --method finetune --out runs/demo/finetune --overwrite
	$(BIN)/morecl report runs/demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Only the tests that need a CUDA GPU; fails without one.
test-gpu: setup
	$(BIN)/python -m pytest -m gpu

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

.PHONY: docs serve-docs build test-newest

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

serve-docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Wheel and sdist in dist/.
build: setup
	rm -rf dist
	$(BIN)/python -m build --outdir dist

# The wheel in an empty environment with the newest version of every dependency, not the pinned ones.
test-newest: build
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check "$$(ls dist/*.whl)[dev]"
	$(NEWEST)/bin/python -m pip list
	$(NEWEST)/bin/morecl --version
	$(NEWEST)/bin/python -m pytest -n 2 tests/contract/test_methods.py tests/unit/test_checkpoint.py tests/unit/data tests/unit/report

clean:
	rm -rf $(VENV) $(NEWEST) runs build dist site .pytest_cache .mypy_cache .ruff_cache
