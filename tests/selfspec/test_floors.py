"""Imports go downward only: the table of floors, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = {
    "selfspec.errors": 0,
    "selfspec.files": 0,
    "selfspec.skip": 0,
    "selfspec.stats": 0,
    "selfspec.events": 0,
    "selfspec.markup": 0,
    "selfspec.schema": 0,
    "selfspec.costs": 0,
    "selfspec.acceptance": 0,
    "selfspec.profile": 0,
    "selfspec.published": 0,
    "selfspec.builtin": 0,
    "selfspec.controllers": 1,
    "selfspec.families": 1,
    "selfspec.dispatch": 1,
    "selfspec.linears": 1,
    "selfspec.scratch": 1,
    "selfspec.masks": 1,
    "selfspec.layout": 1,
    "selfspec.machine": 1,
    "selfspec.cache": 1,
    "selfspec.runtime": 1,
    "selfspec.sampling": 1,
    "selfspec.drafts": 1,
    "selfspec.verify": 1,
    "selfspec.widen": 1,
    "selfspec.drafters": 2,
    "selfspec.decode": 3,
    "selfspec.audit": 4,
    "selfspec.costing": 4,
    "selfspec.loading": 4,
    "selfspec.guided": 4,
    "selfspec.options": 4,
    "selfspec.prompts": 4,
    "selfspec.stream": 4,
    "selfspec.text": 4,
    "selfspec.shipped": 4,
    "selfspec.api": 4,
    "selfspec.bench": 4,
    "selfspec.benchmark": 4,
    "selfspec.figures": 4,
    "selfspec.frames": 4,
    "selfspec.plots": 4,
    "selfspec.reading": 4,
    "selfspec.report": 4,
    "selfspec.search": 5,
    "selfspec.cli": 6,
}


def modules():
    """Every module of ours with its dotted name."""
    for path in sorted([*ROOT.glob("selfspec/**/*.py"), *ROOT.glob("search/*.py")]):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        parts = ["selfspec", *parts] if parts[0] == "search" else parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name != "selfspec":
            yield name, path


def floor(name):
    return next(
        (FLOORS[key] for key in sorted(FLOORS, key=len, reverse=True) if f"{name}.".startswith(f"{key}.")), None
    )


def imports(path, name):
    """Modules of ours that a file imports, type checking and lazy ones included."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("selfspec"))
        elif isinstance(node, ast.ImportFrom):
            base = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module or ""
            if base.startswith("selfspec"):
                yield from (f"{base}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_go_downward(name, path):
    mine = floor(name)
    assert mine is not None, f"{name} has no floor"
    for imported in imports(path, name):
        theirs = floor(imported)
        if theirs is not None:
            assert theirs <= mine, f"{name} (floor {mine}) imports {imported} (floor {theirs})"


@pytest.mark.parametrize(
    "name", [name for name, level in FLOORS.items() if level == 0] + ["selfspec", "selfspec.cli.app"]
)
def test_no_torch_at_import(name):
    code = f"import {name}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_package_is_in_the_wheel():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    named = {tool["package-dir"].get(name, name.replace(".", "/")) for name in tool["packages"]}
    tree = {path.parent.relative_to(ROOT) for top in ("selfspec", "search") for path in (ROOT / top).rglob("*.py")}
    assert {str(folder) for folder in tree} == named - {"profiles"}


def test_no_file_is_longer_than_a_sitting():
    assert {name: n for name, path in modules() if (n := len(path.read_text().splitlines())) > 340} == {}
