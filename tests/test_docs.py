"""The README and docs/: their examples run, their links and anchors lead somewhere, their options are the commands'.

Every block marked `bash` or `python` is run, in order, in a folder of its own for each file, by bash and by Python, on
the built-in model. Those marked `no-run=REASON` are not, for one of the reasons in `NOT_RUN`.
"""

from __future__ import annotations

import ast
import importlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import option_tables
import pytest
import typer

from selfspec.cli.app import app
from selfspec.profile import parse_profile

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [path for path in DOCS if path.name not in ("CONTRIBUTING.md", "extending.md")]  # the latter has its own test
NOT_RUN = {
    "hub": "needs a model or prompts of the hub",
    "package": "needs a model that is installed apart",
    "gpus": "needs several GPUs",
    "database": "needs a database server",
    "server": "needs a server that runs",
    "minutes": "takes minutes, or is what runs these tests",
    "processes": "is started as several processes",
}
BUDGETS = {  # added to a command's own options, so that the last word is theirs
    "search": "--trials 2 --num-prompts 2 --max-new-tokens 8",
    "generate": "--max-new-tokens 8",
    "audit": "--num-prompts 1 --max-new-tokens 8",
    "bench": "--num-prompts 1 --max-new-tokens 8 --rounds 1 --methods plain,guarded --temperature 0",
    "compare": "--num-prompts 2 --max-new-tokens 12 --patience 2",
    "report": "--num-prompts 1 --max-new-tokens 8",
    "profile pick": "--max-draft-cost 100",  # what a draft step costs is the machine's
}
CONSTANTS = {  # of measuring, which need not be exact here: once, of few rounds, however doubtful that is
    "selfspec.measure.cost_fitting.DOUBTFUL": -1,
    "selfspec.measure.cost_fitting.DISTURBED_FACTOR": 0,
    "selfspec.measure.cost_sweeps.LONG": 0,
    "selfspec.models.layout._BUDGET": 0,
    "selfspec.search.finalists.FINALISTS": 1,
}
README_LINES = 250


@dataclass(frozen=True)
class Block:
    """A fenced block: the line it begins at, its language, what else is said of it, and what it holds."""

    line: int
    language: str
    said: str
    text: str


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a file."""
    found, opened, lines = [], None, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if opened is None and (fence := re.match(r"```(\w*) ?(.*)", line.strip())):
            opened = (number, fence[1], fence[2])
        elif opened is not None and line.strip() == "```":
            found.append(Block(*opened, "\n".join(lines) + "\n"))
            opened, lines = None, []
        elif opened is not None:
            lines.append(line)
    assert opened is None, f"{path.name}:{opened} has no end"
    return found


def prose(path: Path) -> str:
    """A file without its fenced blocks and inline code."""
    text = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(path: Path) -> list[str]:
    """The anchors that GitHub gives a file's headings."""
    text = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        again = sum(anchor == other or other.startswith(f"{anchor}-") for other in found)
        found.append(f"{anchor}-{again}" if anchor in found else anchor)
    return found


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def pages():
    """The README, and the pages of docs/, which are left to `make test-all`."""
    for path in RUN:
        marks = [] if path.parent == ROOT else [pytest.mark.long("examples of the docs")]
        yield pytest.param(path, marks=marks, id=named(path))


@pytest.mark.parametrize("path", pages())
def test_examples_run(path, warm, tmp_path):
    for folder in ("selfspec/basics", "selfspec/builtin", "tests/scripts"):  # what examples read, enough of it
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "model"))
    for block in blocks(path):
        if block.language in ("bash", "python") and not block.said:
            script = tmp_path / ("block.sh" if block.language == "bash" else "block.py")
            script.write_text(block.text)
            done = warm.run(script, tmp_path, budgets=BUDGETS, constants=CONSTANTS)
            assert done.returncode == 0, f"{named(path)}:{block.line}\n{block.text}\n{done.stdout}"
        elif block.language == "yaml" and block.said == "profile":
            parse_profile(block.text, source=f"{named(path)}:{block.line}")


@pytest.mark.parametrize("path", DOCS, ids=named)
def test_every_block_says_what_it_is(path):
    known = {"bash", "python", *(f"{language} no-run={why}" for language in ("bash", "python") for why in NOT_RUN)}
    known |= {"yaml", "yaml profile", "text"}
    assert [
        f"{b.line}: {b.language} {b.said}" for b in blocks(path) if f"{b.language} {b.said}".strip() not in known
    ] == []


def test_the_reasons_for_not_running_are_told():
    told = (ROOT / "docs/README.md").read_text()
    assert [why for why in NOT_RUN.values() if why not in told] == []


@pytest.mark.parametrize("path", DOCS, ids=named)
def test_links_lead_somewhere(path):
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if not link.startswith(("http://", "https://")):
            file, _, anchor = link.partition("#")
            target = path if not file else (path.parent / file).resolve()
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append(link)
    assert dead == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("path", [p for p in DOCS if p.parent != ROOT and p.name != "README.md"], ids=named)
def test_every_page_is_found_from_the_index(path):
    assert f"]({path.relative_to(ROOT / 'docs')})" in (ROOT / "docs/README.md").read_text()


def test_examples_import_only_what_is_stable():
    """The table of docs/python.md says what is; each name of it can be imported from a module of its row."""
    table = (ROOT / "docs/python.md").read_text().partition("| from | what |")[2].partition("\n\n")[0]
    stable = set()
    for _, modules, names, _ in re.findall(r"^(\|)(.*)\|(.*)(\|)$", table, flags=re.MULTILINE)[1:]:
        listed = [importlib.import_module(module) for module in re.findall(r"`([\w.]+)`", modules)]
        for name in re.findall(r"`(\w+)`", names):
            homes = [module.__name__ for module in listed if hasattr(module, name)]
            assert homes, name
            stable |= {(home, name) for home in homes}
    used = set()
    for path in DOCS:
        for block in blocks(path):
            if block.language == "python":
                for node in ast.walk(ast.parse(block.text)):
                    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("selfspec"):
                        used |= {(node.module, name.name) for name in node.names}
    assert len(used) > 20
    assert used - stable == set()


def test_options_are_the_commands_own():
    """The tables of the command line's page; `python tests/helpers/option_tables.py --write` makes them anew."""
    text = option_tables.PAGE.read_text()
    assert option_tables.filled(text) == text
    assert {name for _, name in re.findall(r"(<!-- options ([\w ]+) -->)", text)} >= {*option_commands()}


def option_commands():
    """Every command with options, as it is named on the command line."""
    top = typer.main.get_command(app)
    for name, command in top.commands.items():
        inner = {f"{name} {sub}": one for sub, one in command.commands.items()} if hasattr(command, "commands") else {}
        yield from (full for full, one in (inner or {name: command}).items() if one.params)
