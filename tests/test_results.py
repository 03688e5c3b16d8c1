"""docs/results.md shows what the files of docs/results hold, and no question's text is among them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "docs" / "results").glob("*.json"), key=lambda file: file.stem)


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_tables", ROOT / "tests/scripts/results/tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_is_that_of_its_file(tables):
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(page) == page
    assert sorted(found[1] for found in tables.MARK.findall(page)) == [file.stem for file in FILES]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_says_where_its_figures_are_from_and_holds_no_texts(file):
    found = json.loads(file.read_text(encoding="utf-8"))
    assert file.stem == f"{found['comparison']}.{found['machine']}"
    for name in ("processor", "instruction_set", "threads", "model", "source", "commit", "date", "command"):
        assert found[name], name
    assert all(len(digest) == 12 for digest in found.get("prompts", {}).values())
    assert "Explain" not in file.read_text(encoding="utf-8")


def test_a_changed_figure_is_noticed(tables, tmp_path, monkeypatch):
    file = next(file for file in FILES if file.stem.startswith("questions."))
    found = json.loads(file.read_text(encoding="utf-8"))
    methods = found["results"]["float32"]["0"]
    methods[max(methods)]["ratio_of_means"] += 1
    (tmp_path / file.name).write_text(json.dumps(found), encoding="utf-8")
    page = f"<!-- results: {file.stem} -->\n{tables.rendered(file.stem)}<!-- end -->"
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    assert tables.filled(page) != page
