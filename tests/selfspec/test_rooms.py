"""The rooms of the house: who may import whom, read from the sources; no circles inside a room."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {  # each with the rooms that it may import
    "basics": "",
    "builtin": "",
    "types": "basics",
    "profile": "basics types",
    "text": "basics builtin",
    "show": "basics types profile",
    "speculation": "basics types",
    "controllers": "basics types",
    "proposers": "basics",
    "models": "basics builtin types",
    "runtime": "basics types models speculation",
    "draft_modules": "basics types models runtime",
    "drafters": "basics types profile speculation controllers proposers models runtime draft_modules",
    "engine": "basics types speculation runtime",
    "llm": "basics types profile show text speculation controllers models proposers runtime drafters engine",
    "integrations": "basics profile speculation models runtime drafters engine llm",
    "lm_eval": "basics builtin models integrations",
    "measure": "basics types profile text speculation controllers models runtime drafters llm",
    "search": "basics types profile text show speculation controllers proposers runtime draft_modules drafters engine "
    "llm measure training",
    "training": "basics types profile speculation models runtime draft_modules drafters engine llm measure text",
    "server": "basics types show text models llm",
    "export": "basics builtin types profile speculation controllers models runtime draft_modules engine llm "
    "integrations search",
    "cli": "basics builtin types profile show text speculation controllers proposers models llm measure search "
    "training export server",
    "__main__": "cli",
}
ALLOWED = {room: set(names.split()) for room, names in ROOMS.items()}
WITHOUT_TORCH = ("basics", "types", "profile", "controllers", "proposers", "show.tables", "show.captions")


def modules():
    """Every module of ours with its dotted name."""
    for path in sorted([*ROOT.glob("selfspec/**/*.py"), *ROOT.glob("search/**/*.py")]):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        parts = ["selfspec", *parts] if parts[0] == "search" else parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())


def imports(name):
    """Modules of ours that one imports, type checking and lazy imports included."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("selfspec"))
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base.split(".")[0] == "selfspec":
                found = (f"{base}.{alias.name}" for alias in node.names)
                yield from (full if full in MODULES else base for full in found)


def room(name):
    return name.split(".")[1] if "." in name else None


def test_the_table_is_without_circles():
    list(TopologicalSorter(ALLOWED).static_order())


def test_every_module_is_in_a_room():
    assert {name for name in MODULES if name != "selfspec" and room(name) not in ALLOWED} == set()


def test_imports_follow_the_table():
    wrong = [
        f"{name} imports {imported}; {room(name)} may import: {ROOMS[room(name)] or 'nothing'}"
        for name in MODULES
        if name != "selfspec"
        for imported in imports(name)
        if room(imported) not in (None, room(name), *ALLOWED[room(name)])
    ]
    assert wrong == []


def test_every_allowed_edge_is_used():
    used = {(room(name), room(imported)) for name in MODULES for imported in imports(name) if name != "selfspec"}
    assert {(a, b) for a, names in ALLOWED.items() for b in names} - used == set()


def test_no_circles_inside_a_room():
    for mine in ALLOWED:
        inside = {name for name in MODULES if room(name) == mine}
        graph = {name: {other for other in imports(name) if other in inside and other != name} for name in inside}
        try:
            list(TopologicalSorter(graph).static_order())
        except CycleError as error:
            pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def test_every_room_says_in_a_line_what_it_is():
    said = {mine: ast.get_docstring(ast.parse(MODULES[f"selfspec.{mine}"].read_text())) for mine in ALLOWED}
    assert [mine for mine, docstring in said.items() if not docstring] == []


def test_no_torch_at_import():
    """One process imports them one after the other, and says after which of them torch was there."""
    rooms = {f"selfspec.{name}" for name in WITHOUT_TORCH}
    names = ["selfspec", *sorted(name for name in MODULES if name in rooms or f"selfspec.{room(name)}" in rooms)]
    code = (
        "import importlib, sys\n"
        f"for name in {[*names, 'selfspec.cli.app']}:\n"
        "    importlib.import_module(name)\n"
        "    if {'torch', 'transformers'} & sys.modules.keys(): sys.exit(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_package_but_the_notebooks_is_in_the_wheel():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    named = {tool["package-dir"].get(name, name.replace(".", "/")) for name in tool["packages"]}
    tree = {path.parent.relative_to(ROOT) for top in ("selfspec", "search") for path in (ROOT / top).rglob("*.py")}
    assert {str(folder) for folder in tree} - {"search/analysis"} == named - {"profiles"}


def test_the_command_line_library_is_known_to_the_command_line_alone():
    knowing = {
        name for name, path in MODULES.items() if re.search(r"^\s*(import|from) typer\b", path.read_text(), re.M)
    }
    assert {room(name) for name in knowing} == {"cli"}


def test_the_picture_of_the_rooms_is_true():
    script = ROOT / "tests" / "scripts" / "rooms_picture.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_map_names_files_that_are_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:selfspec|search|tests)/[\w/.]*)`", text)
    assert len(named) > 40
    assert [name for name in named if not (ROOT / name).exists()] == []
