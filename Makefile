# Two commands on a fresh machine:  make demo  and  make test.  Both set up .venv by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: setup demo test test-gpu lint clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "morecl needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/morecl run digits-5t --method more     --out runs/demo/more     --overwrite
	$(BIN)/morecl run digits-5t --method ncm      --out runs/demo/ncm      --overwrite
	$(BIN)/morecl run digits-5t --method finetune --out runs/demo/finetune --overwrite
	$(BIN)/morecl report runs/demo

test: setup
	$(BIN)/python -m pytest -n 2

# Only the tests that need a CUDA GPU; fails without one.
test-gpu: setup
	$(BIN)/python -m pytest -m gpu

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache
