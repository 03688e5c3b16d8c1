"""The notebooks as they stand: read with their outputs, small when tested, and without logic of their own."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"


@pytest.fixture(params=sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def cells(request):
    return json.loads(request.param.read_text())["cells"]


def decodes(cells):
    """Whether a notebook runs a model, and does not only show what was measured."""
    return any("selfspec.load(" in "".join(cell["source"]) for cell in cells)


def test_all_of_them_are_here():
    names = {"speedup_vs_skipped_layers", "controllers", "search", "sources"}
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == names


def test_every_cell_was_run_in_order_and_none_failed(cells):
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not [o for cell in code for o in cell["outputs"] if o["output_type"] == "error" or o.get("name") == "stderr"]


def test_each_plot_is_followed_by_what_it_shows(cells):
    plots = [
        i for i, cell in enumerate(cells) if any("image/png" in o.get("data", {}) for o in cell.get("outputs", []))
    ]
    assert len(plots) >= (4 if decodes(cells) else 2)
    for i in plots:
        assert cells[i + 1]["cell_type"] == "markdown"
        assert 2 <= "".join(cells[i + 1]["source"]).replace("\n", " ").count(". ") + 1 <= 5


def test_budgets_are_parameters_that_tests_make_small(cells):
    if not decodes(cells):
        return
    first = next(cell for cell in cells if cell["cell_type"] == "code")
    names = {n.id for n in ast.walk(ast.parse("".join(first["source"]))) if isinstance(n, ast.Name)}
    assert {"MODEL", "DATA", "PROMPTS", "NEW_TOKENS"} <= names
    assert set(first["metadata"]["nbmake"]["mock"]) <= names


def test_they_hold_no_logic(cells):
    for cell in cells:
        if cell["cell_type"] == "code":
            source = "".join(line for line in cell["source"] if not line.startswith("%"))
            assert not [
                n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.While))
            ]
