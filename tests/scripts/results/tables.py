"""The tables of docs/results.md, from the JSON files of docs/results.

    python tests/scripts/results/tables.py            # writes them; a test fails where they differ

A table stands between `<!-- results: COMPARISON.MACHINE -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FOLDER, PAGE = ROOT / "docs" / "results", ROOT / "docs" / "results.md"
MARK = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(rows: list[list[str]]) -> str:
    """A Markdown table, its first row the head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def ratio(values: list[float] | None) -> str:
    """A median with its 95% interval."""
    return "-" if values is None else "{:.2f} ({:.2f} to {:.2f})".format(*values)


def condition(found: dict[str, Any]) -> str:
    """Where, when and how the figures were measured."""
    where = f"{found['machine']}: {found['processor']}, {found['instruction_set']}, {found['threads']} threads"
    rounds = max(
        of["rounds"] for some in found["results"].values() for methods in some.values() for of in methods.values()
    )
    what = f"{found['model']}; {found['source']}, up to {found['new_tokens']} tokens each; rounds: {rounds}"
    return f"*{where}; {what}; {found['date']}, commit {found['commit']}; `{found['command']}`.*"


def setting(dtype: str, temperature: str) -> str:
    """A dtype and a temperature, in words."""
    how = "greedy" if temperature == "0" else f"at {temperature}"
    return f"{'float32, held in 16 bits' if dtype == 'held' else dtype}, {how}"


def whole(found: dict[str, Any]) -> str:
    """Of each setting and method: speed, ratios to plain decoding, the first token, equal texts; then the tasks."""
    parts = []
    for dtype, temperatures in found["results"].items():
        for temperature, methods in temperatures.items():
            head = ["method", "tokens/s", "/ plain, means", "median (95%)", "first token, ms", "/ plain after it"]
            rows = [[setting(dtype, temperature) if i == 0 else of for i, of in enumerate(head)]]
            rows[0] += ["same text"] if temperature == "0" else []
            for name, of in methods.items():
                rows.append(
                    [name, f"{of['tokens_per_second']:.1f}", f"{of['ratio_of_means']:.2f}", ratio(of["median"])]
                )
                rows[-1] += [f"{of['first_ms']:.0f}", ratio(of["after_first"])]
                rows[-1] += [f"{of['same_text']} of {of['prompts']}"] if temperature == "0" else []
            parts.append(table(rows))
            names = list(next(iter(methods.values()))["by_task"])
            if len(names) > 1:
                tasks = [["by task, / plain, means", *names]]
                tasks += [
                    [name, *(f"{of['by_task'][task]:.2f}" for task in names)]
                    for name, of in methods.items()
                    if name != "plain"
                ]
                parts.append(table(tasks))
    return "\n\n".join(parts)


def lengths(found: dict[str, Any]) -> str:
    """Of each setting and method, by the tokens of the prompt: the first token, and the ratio after it."""
    parts = []
    for dtype, temperatures in found["results"].items():
        for temperature, methods in temperatures.items():
            names = list(next(iter(methods.values()))["by_task"])
            rows = [[setting(dtype, temperature), *(f"{name} tokens: first, s" for name in names)]]
            rows[0] += [f"{name}: / plain after it" for name in names]
            for method, of in methods.items():
                rows.append([method, *(f"{of['first_ms_by_task'][name] / 1e3:.2f}" for name in names)])
                rows[-1] += [f"{of['after_first_by_task'][name]:.2f}" for name in names]
            parts.append(table(rows))
    return "\n\n".join(parts)


RENDERED = {"questions": whole, "editing": whole, "builtin": whole, "documents": lengths}


def rendered(name: str) -> str:
    """The table of a file of docs/results, with its conditions."""
    found = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return f"\n{RENDERED[found['comparison']](found)}\n\n{condition(found)}\n\n"


def filled(page: str) -> str:
    """The page with every table made anew."""
    return MARK.sub(lambda found: found[1] + rendered(found[2]) + found[3], page)


def write() -> None:
    """Make every table of the page anew."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
