# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PROFILE ?= build/demo-profile.yaml
PROMPT ?= def read_header(self, stream):\n    """Read the header of the stream

.PHONY: demo test proof speed notebooks clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.installed
	mkdir -p $(dir $(PROFILE))
	$(BIN)/selfspec search --threads 1 --keep-best --out $(PROFILE)
	printf '$(PROMPT)' | $(BIN)/selfspec generate --threads 1 --profile $(PROFILE) --compare

test: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal --nbmake --durations 30

proof: $(VENV)/.installed
	$(BIN)/python tests/scripts/proof.py --out tests/scripts/proof.json

speed: $(VENV)/.installed
	$(BIN)/selfspec bench --threads 1
	$(BIN)/selfspec bench --threads 1 --widen 8

notebooks: $(VENV)/.installed
	$(BIN)/jupyter execute --inplace --timeout=-1 notebooks/*.ipynb

clean:
	rm -rf $(VENV) .wheel-venv build dist *.egg-info
