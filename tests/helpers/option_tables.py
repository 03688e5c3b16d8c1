"""The tables of options in docs/command-line.md, made from the commands' own options.

    python tests/helpers/option_tables.py --write

What stands between `<!-- options NAME -->` and `<!-- end -->` is replaced by the options of the command NAME, in the
order and the groups of its help; options of many commands stand in the blocks `shared`, `Prompts` and `Device`.
Without --write, the exit code is 1 if the page differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import typer

from selfspec.cli.app import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "command-line.md"
BLOCK = re.compile(r"(<!-- options ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHARED = ("revision", "quiet", "verbose", "help_all")
PANELS = ("Prompts", "Device")  # groups that stand once, as those of `generate` and `search`


def filled(text: str) -> str:
    """Return the page with every block made anew."""
    return BLOCK.sub(lambda block: f"{block[1]}{_tables(block[2])}\n{block[3]}", text)


def _tables(name: str) -> str:
    if name in PANELS:
        return _table([param for param in _params("serve" if name == "Device" else "search") if _panel(param) == name])
    if name == "shared":
        return _table([param for param in _params("search") if param.name in SHARED])
    groups: dict[str, list[Any]] = {}
    for param in _params(name):
        if param.name not in SHARED and _panel(param) not in PANELS:
            groups.setdefault(_panel(param), []).append(param)
    return "\n\n".join(f"{group}:\n\n{_table(params)}" if group else _table(params) for group, params in groups.items())


def _params(name: str) -> list[Any]:
    command = typer.main.get_command(app)
    for word in name.split():
        command = command.commands[word]
    return sorted(command.params, key=lambda param: bool(_panel(param)))  # stable: the common ones first


def _panel(param: Any) -> str:
    return getattr(param, "rich_help_panel", None) or ""


def _table(params: list[Any]) -> str:
    return "\n".join(["| option | what it does |", "|---|---|", *map(_row, params)])


def _row(param: Any) -> str:
    names = [param.metavar or param.name.upper()] if param.param_type_name == "argument" else param.opts
    names = [*names, *param.secondary_opts]
    named = ", ".join(f"`{name}`" for name in sorted(names, key=lambda name: not name.startswith("--")))
    plain = param.default is None or isinstance(param.default, bool) or not param.show_default
    default = "" if plain else f"; default: `{param.default}`"
    text = re.sub(r"(?<!\.)\.$", "", re.sub(r"\s+", " ", param.help or "")).replace("|", "\\|")
    return f"| {named} | {text}{default}{'; rare' if getattr(param, 'hidden', False) else ''} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page")
    page = filled(PAGE.read_text("utf-8"))
    if parser.parse_args().write:
        PAGE.write_text(page, "utf-8")
    elif page != PAGE.read_text("utf-8"):
        sys.exit(f"{PAGE.name} is stale; run: python tests/helpers/option_tables.py --write")
