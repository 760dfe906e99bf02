# Every target sets up .venv by itself: a bare machine needs Python 3.10+, make and a package index.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: conformance test fixtures faults isa lint clean

conformance: $(VENV)/.base
	$(BIN)/mxgate run --tier smoke --out .mxgate/conformance

test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist loadfile -q

faults: $(VENV)/.base
	$(BIN)/mxgate faults --seeds 20

# The committed machine code of the FlyDSL kernels, after a change of their source.
isa: $(VENV)/.test
	$(BIN)/python -m mxgate.kernels.flydsl.compile

fixtures: $(VENV)/.base
	$(BIN)/mxgate fixtures generate

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(VENV)/typing $(BIN)/mypy --explicit-package-bases -p mxgate

clean:
	rm -rf $(VENV) .mxgate build *.egg-info

# A stamp a level: the default install is small, torch comes with the tests, the linters last.
$(VENV)/.base: pyproject.toml
	@echo "setting up $(VENV) (numpy, ml_dtypes, safetensors, rich) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "mxgate needs Python 3.10 or newer; set PYTHON=/path/to/python" >&2; exit 2; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.base
	@echo "adding torch and the test tools ..."
	@$(PIP) -e '.[torch,triton,flydsl,test]'
	@touch $@

# mypy does not follow an editable install's import hook, so it gets the namespace as links.
$(VENV)/.lint: $(VENV)/.test
	@$(PIP) -e '.[lint]'
	@mkdir -p $(VENV)/typing/mxgate
	@for p in oracle kernels conformance fixtures; do ln -sfn ../../../$$p $(VENV)/typing/mxgate/$$p; done
	@ln -sfn ../../../fixtures/capture $(VENV)/typing/mxgate/capture
	@touch $@
