# make demo    install into .venv and run the main job on a small model that it trains itself
# make test    install with what developers need and run the tests
# make check   all that CI runs: tests, lint, types, floors, the built wheel, the examples
# make long    the tests that take about half a minute each; `make check` runs them too
# make slow    the tests that take minutes each
# make faults  all tests that inject faults, slow ones too, with the table of faults (docs/reliability.md)
# make matrix  every pass on every awkward model, as a table (docs/failure-kinds.md)
# make clean   remove what these made
#
# Needs Python 3.11 or later with its venv module, and make. PYTHON=python3.12 takes another interpreter, VENV=DIR another place.

PYTHON = python3
VENV = .venv

# On the machines where this is developed, torch==2.13.0 is the CPU build. From PyPI the same version brings CUDA libraries of
# several GB: TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the CPU build from there.
TORCH_INDEX =

BIN = $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt

.DELETE_ON_ERROR:
.PHONY: demo test long check quality lint types floors wheel examples slow faults matrix pins clean

demo: $(VENV)/.installed-demo
	$(BIN)/autotune demo --out demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m "not slow and not long"

long: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m "long and not slow"

slow: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m slow

faults: $(VENV)/.installed
	$(BIN)/python -m pytest -q tests/faults

check: test long quality

quality: lint types floors wheel examples

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy -p autotune

floors: $(VENV)/.installed
	$(BIN)/lint-imports

wheel: $(VENV)/.installed
	$(BIN)/python tests/wheel_smoke.py

examples: $(VENV)/.installed
	@set -e; for example in examples/*.py; do echo "$$example"; timeout 300 $(BIN)/python "$$example"; done

matrix: $(VENV)/.installed
	$(BIN)/python benchmarks/comparisons/pass_matrix.py

# Write constraints.txt anew from what is installed: after an upgrade that passed `make check`.
pins: $(VENV)/.installed
	$(BIN)/python tests/pins.py > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) demo build dist passtune.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# torch goes first and alone: whatever needs it afterwards is content with the build that is there.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: Python 3.11 or later is needed; got $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	    { echo "make: $(PYTHON) can't make a virtual environment. On Debian: apt install python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV): some 2 GB, a few minutes the first time"
	@$(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.installed-demo: $(VENV)/.torch pyproject.toml
	@$(PIP_INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@$(PIP_INSTALL) --editable '.[dev,demo]'
	@touch $@ $(VENV)/.installed-demo
