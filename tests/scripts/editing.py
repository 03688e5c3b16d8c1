"""Prompts of an editing task: functions of Python's library, each to be written again with one name replaced.

    python tests/scripts/editing.py --out editing.jsonl
    selfspec bench --model smollm2-135m --prompts editing.jsonl --chat \\
        --methods plain,profile,path,lookup,hf,hf-prompt-lookup --temperature 0 --rounds 1 --max-new-tokens 256
"""

from __future__ import annotations

import argparse
import ast
import bisect
import calendar
import colorsys
import fnmatch
import fractions
import heapq
import inspect
import json
import shlex
import statistics
import string
import textwrap
import textwrap as wrapping
from collections import Counter
from pathlib import Path
from types import ModuleType

MODULES = (bisect, calendar, colorsys, fnmatch, fractions, heapq, shlex, statistics, string, wrapping)
LINES = range(10, 26)


def functions(module: ModuleType) -> list[str]:
    """The module's own functions of a few lines, without their docstrings."""
    found = []
    for _, function in sorted(inspect.getmembers(module, inspect.isfunction)):
        if function.__module__ != module.__name__:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        body = tree.body[0]
        assert isinstance(body, ast.FunctionDef)
        if ast.get_docstring(body):
            body.body = body.body[1:] or [ast.Pass()]
        text = ast.unparse(body)
        if len(text.splitlines()) in LINES:
            found.append(text)
    return found


def name_in(code: str) -> str:
    """The local name that is used most."""
    names = Counter(n.id for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name) and len(n.id) < 12)
    names += Counter(n.arg for n in ast.walk(ast.parse(code)) if isinstance(n, ast.arg))
    return names.most_common(1)[0][0]


def prompts() -> list[str]:
    """The prompts: each asks for a function with one name replaced."""
    found = []
    for module in MODULES:
        for code in functions(module)[:3]:
            asked = f"Write this Python code again, with the name `{name_in(code)}` replaced by `renamed`."
            asked += " Change nothing else."
            found.append(f"{asked}\n\n```python\n{code}\n```")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = [{"task": "editing", "prompt": prompt} for prompt in prompts()]
    given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts: {given.out}")


if __name__ == "__main__":
    main()
