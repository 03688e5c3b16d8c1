"""docs/results.md shows what the files of docs/results hold, and no question's text is among them."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "docs" / "results").glob("*.json"), key=lambda file: file.stem)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"results_{name}", ROOT / f"tests/scripts/results/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return script("tables")


def test_every_table_is_that_of_its_file(tables):
    shown = []
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.filled(page) == text
        shown += [found[2] for found in tables.MARK.findall(text) if found[1] == "results"]
    assert sorted(shown) == [file.stem for file in FILES]


def test_the_readmes_tables_are_those_of_the_files(tables):
    page = tables.README.read_text(encoding="utf-8")
    assert tables.filled_readme() == page
    assert [found[1] for found in tables.ON_README.findall(page)] == ["first screen", "further settings"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_says_where_its_figures_are_from_and_holds_no_texts(file):
    found = json.loads(file.read_text(encoding="utf-8"))
    assert file.stem == f"{found['comparison']}.{found['machine']}"
    for name in ("processor", "instruction_set", "threads", "model", "source", "commit", "date", "command"):
        assert found[name], name
    assert all(len(digest) == 12 for digest in found.get("prompts", {}).values())
    assert "Explain" not in file.read_text(encoding="utf-8")


def test_every_table_names_its_command_and_links_to_its_file(tables):
    pages = {page: page.read_text(encoding="utf-8") for page in tables.PAGES}
    for file in FILES:
        found = json.loads(file.read_text(encoding="utf-8"))
        [(page, text)] = [(page, text) for page, text in pages.items() if f"<!-- results: {file.stem} -->" in text]
        assert f"{tables.link(found, page)}; `{found['command']}`" in text
        assert (page.parent / tables.link(found, page).partition("(")[2].removesuffix(")")).resolve() == file.resolve()


@pytest.fixture
def run(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tests/scripts/results"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return script("run")


def test_the_command_of_a_file_has_its_arguments_without_folders(run, monkeypatch):
    monkeypatch.setenv("SELFSPEC_ISA", "avx2")
    words = "--prompts /a/questions.jsonl --only questions,code --machine m --threads 2 --llama-python /b/bin/python"
    given = run.arguments().parse_args([*words.split(), "--source", "40 of Spec-Bench", "--minutes", "5"])
    assert run.command(given, "questions") == (
        "SELFSPEC_ISA=avx2 python tests/scripts/results/run.py --prompts questions.jsonl --source '40 of Spec-Bench'"
        " --limit 40 --only questions --rounds 1 --threads 2 --machine m --llama-python PYTHON"
    )
    shown = run.command(given, "questions").split(" ", 3)[3]
    again = run.arguments().parse_args(shlex.split(shown))
    assert run.command(again, "questions").endswith(shown)


def test_what_is_slower_than_plain_decoding_is_listed(tables, run, tmp_path, monkeypatch):
    def of(whole, **tasks):
        return {"ratio_of_means": whole, "by_task": tasks, "after_first_by_task": {"256": 0.9, "1024": 1.2}}

    about = {"machine": "m", "commit": "abc", "date": "2026-01-01"}
    names = ("plain", "transformers", "selfspec", "no search")
    files = {
        "code": {"float32": {"0.8": dict(zip(names, (of(1, code=1), *[of(0.7, code=0.7)] * 2, of(1.1)), strict=True))}},
        "documents": {"bfloat16": {"0": {"drafts alone": of(1.1, **{"256": 0.99})}}},
        "questions": {"float32": {"0": {"no search": of(1.2, mt=0.98, qa=0.997), "lookup alone": of(1.2, mt=1.1)}}},
    }
    for name, results in files.items():
        (tmp_path / f"{name}.m.json").write_text(json.dumps({**about, "comparison": name, "results": results}))
    rows = [{"size": size, "ratio": ratio, "method": "adaptive"} for size, ratio in ((4, 1.3), (8, 0.97))]
    (tmp_path / "batches.m.json").write_text(json.dumps({**about, "comparison": "batches", "rows": rows}))
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    listed = [[cell.strip() for cell in line.split("|")[2:-1]] for line in tables.losses(tables.PAGE).splitlines()[2:]]
    assert listed == [
        ["8 together", "selfspec", "0.97", ""],
        ["float32, at 0.8", "selfspec", "0.70", ""],
        ["bfloat16, greedy", "drafts alone", "1.10", "256 tokens, after the first one: 0.90"],
        ["float32, greedy", "no search", "1.20", "mt 0.98"],
    ]
    assert {name for name in (*run.OURS, *run.PEERS) if not name.startswith(tables.NOT_OURS)} == {*run.OURS} - {"plain"}
    assert {one.name for one in run.COMPARISONS} | {*run.SCRIPTS} == {*tables.RENDERED}


def test_a_changed_figure_is_noticed(tables, tmp_path, monkeypatch):
    file = next(file for file in FILES if file.stem.startswith("questions."))
    page, copied = tmp_path / "page.md", tmp_path / "results" / file.name
    copied.parent.mkdir()
    copied.write_bytes(file.read_bytes())
    monkeypatch.setattr(tables, "FOLDER", copied.parent)
    text = f"<!-- results: {file.stem} -->\n{tables.rendered(file.stem, page)}<!-- end -->"
    page.write_text(text, encoding="utf-8")
    assert tables.filled(page) == text
    found = json.loads(file.read_text(encoding="utf-8"))
    methods = found["results"]["float32"]["0"]
    methods[max(methods)]["ratio_of_means"] += 1
    copied.write_text(json.dumps(found), encoding="utf-8")
    assert tables.filled(page) != text


def test_costs_of_passes_are_the_least_of_passes_by_turns_in_plain_steps():
    asked = []

    def seconds(context, rows=1, path=None):
        asked.append((context, rows, path))
        disturbed = 5.0 if len(asked) % 7 == 0 else 0.0
        return disturbed + context * {None: 1.0, "a": 0.25, "b": 0.2}[path] * (1.5 if rows == 8 else 1.0)

    found = script("costs").costs(seconds, [10, 40], {"int8": "a", "int4": "b"}, sweeps=3)
    assert found == {str(n): {"plain": n, "v8": 1.5, "int8": 0.25, "int4": 0.2} for n in (10, 40)}
    assert asked[:5] == [(10, 1, None), (10, 8, None), (10, 1, "a"), (10, 1, "b"), (10, 1, None)]


def test_costs_by_context_are_a_table_where_the_file_has_them(tables):
    found = json.loads(next(file for file in FILES if file.stem.startswith("documents.")).read_text(encoding="utf-8"))
    found.pop("costs", None)
    without = tables.lengths(found)
    by_context = {"256": {"plain": 0.0137, "v8": 1.27, "int8": 0.25, "int4": 0.2}}
    with_costs = tables.lengths({**found, "costs": {"float32": by_context}})
    assert with_costs.startswith(without)
    head, _, row = with_costs.removeprefix(without).strip().splitlines()
    assert head == "|  | tokens in the cache | plain step, ms | v(8) | c, int8 | c, int4 |"
    assert row == "| float32 | 256 | 13.7 | 1.27 | 0.25 | 0.20 |"
