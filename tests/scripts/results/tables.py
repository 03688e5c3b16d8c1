"""The tables of docs/results.md, docs/notes/results-elsewhere.md and the README, from the JSON files of docs/results.

    python tests/scripts/results/tables.py            # writes them; a test fails where they differ

A table stands between `<!-- results: COMPARISON.MACHINE -->` and `<!-- end -->`, that of the same file by task after
`<!-- by task: COMPARISON.MACHINE -->`, and that of all losses, with the commands of its files, after
`<!-- where it loses -->`. The README's tables stand after `<!-- first screen -->` and `<!-- further settings -->`.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FOLDER, PAGE, README = ROOT / "docs" / "results", ROOT / "docs" / "results.md", ROOT / "README.md"
PAGES = (PAGE, ROOT / "docs" / "notes" / "results-elsewhere.md")
MARK = re.compile(r"(<!-- (results|by task): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
LOSSES = re.compile(r"(<!-- where it loses -->\n).*?(<!-- end -->)", re.DOTALL)
ON_README = re.compile(r"(<!-- (first screen|further settings) -->\n).*?(<!-- end -->)", re.DOTALL)
SHOWN = {  # the machine whose figures the README has; its methods, and what it calls them
    "no search": "selfspec without a search",
    "selfspec": "**selfspec, searched profile**",
    "plain": "selfspec, plain",
    "transformers": "`transformers`' generate",
    "llama.cpp, float32": "llama.cpp, float32",
    "llama.cpp, 8 bits": "llama.cpp, 8-bit file: another text",
    "openvino-genai, 4 bits": "openvino-genai, 4-bit file: another text",
    "plain, the 4-bit file": "selfspec, 4-bit file kept as it is, plain",
}
MACHINE = "epyc-zen4"
NOT_OURS = ("plain", "transformers", "llama.cpp", "openvino-genai")  # how the names of other methods begin


def table(rows: list[list[str]]) -> str:
    """A Markdown table, its first row the head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def ratio(values: list[float] | None) -> str:
    """A median with its 95% interval."""
    return "-" if values is None else "{:.2f} ({:.2f} to {:.2f})".format(*values)


def condition(found: dict[str, Any], page: Path) -> str:
    """Where, when and how the figures were measured, and a link to their file."""
    where = f"{found['machine']}: {found['processor']}, {found['instruction_set']}, {found['threads']} threads"
    what = f"{found['model']}; {found['source']}, up to {found['new_tokens']} tokens each"
    if "results" in found:
        methods = [of for some in found["results"].values() for one in some.values() for of in one.values()]
        what += f"; rounds: {max(of['rounds'] for of in methods)}"
    return f"*{where}; {what}; {found['date']}, commit {found['commit']}; {link(found, page)}; `{found['command']}`.*"


def link(found: dict[str, Any], page: Path) -> str:
    """A link from a page of docs to the JSON file."""
    file = f"{found['comparison']}.{found['machine']}.json"
    return f"[{file}]({'' if page.parent == FOLDER.parent else '../'}{FOLDER.name}/{file})"


def setting(dtype: str, temperature: str) -> str:
    """A dtype and a temperature, in words."""
    how = "greedy" if temperature == "0" else f"at {temperature}"
    return f"{'float32, held in 16 bits' if dtype == 'held' else dtype}, {how}"


def grouped(head: list[str], groups: list[tuple[str, list[list[str]]]]) -> str:
    """A table of several groups of rows; the first row of a group begins with its name."""
    named = [[name if i == 0 else "", *row] for name, rows in groups for i, row in enumerate(rows)]
    return table([head, *named])


def by_setting(found: dict[str, Any], head: list[str], row: Callable[[dict[str, Any]], list[str]]) -> str:
    """A table of a file with a row for each setting and method: what `row` makes of it, and of how many texts equal."""

    def same(of: dict[str, Any]) -> str:
        return "-" if of["same_text"] is None else f"{of['same_text']} of {of['prompts']}"

    groups = [
        (name, [[method, *row(of), same(of)] for method, of in methods.items()]) for name, methods in settings(found)
    ]
    return grouped(["", "method", *head, "same text"], groups)


def settings(found: dict[str, Any]) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """The settings of a file, in words, and what was measured in each, by method."""
    return [
        (setting(dtype, temperature), methods)
        for dtype, temperatures in found["results"].items()
        for temperature, methods in temperatures.items()
    ]


def whole(found: dict[str, Any]) -> str:
    """A table of speed, ratios to plain decoding, TTFT and equal texts by setting and method."""

    def row(of: dict[str, Any]) -> list[str]:
        ratios = [f"{of['tokens_per_second']:.1f}", f"{of['ratio_of_means']:.2f}", ratio(of["median"])]
        return [*ratios, f"{of['first_ms']:.0f}", ratio(of["after_first"])]

    return by_setting(found, ["tokens/s", "/ plain, means", "median (95%)", "first token, ms", "/ plain after it"], row)


def by_task(found: dict[str, Any]) -> str:
    """A table of ratios to plain decoding by setting, method and task."""
    tasks = list(next(iter(settings(found)[0][1].values()))["by_task"])
    return grouped(
        ["/ plain, means", "method", *tasks],
        [
            (name, [[method, *(f"{of['by_task'][task]:.2f}" for task in tasks)] for method, of in rest])
            for name, methods in settings(found)
            if (rest := [(method, of) for method, of in methods.items() if method != "plain"])
        ],
    )


def lengths(found: dict[str, Any]) -> str:
    """Tables of TTFT, of the ratio to plain decoding after it, and of costs, by length of the prompt."""
    names = list(next(iter(settings(found)[0][1].values()))["by_task"])

    def row(of: dict[str, Any]) -> list[str]:
        firsts = [f"{of['first_ms_by_task'][name] / 1e3:.2f}" for name in names]
        return [*firsts, *(f"{of['after_first_by_task'][name]:.2f}" for name in names)]

    head = [*(f"{name} tokens: first, s" for name in names), *(f"{name}: / plain after it" for name in names)]
    measured = by_setting(found, head, row)
    return f"{measured}\n\n{costs(found['costs'])}" if found.get("costs") else measured


def costs(by_dtype: dict[str, dict[str, dict[str, float]]]) -> str:
    """A table of a plain step, and in plain steps of verification and draft steps, by tokens in the KV cache."""
    return grouped(
        ["", "tokens in the cache", "plain step, ms", "v(8)", "c, int8", "c, int4"],
        [
            (
                dtype,
                [
                    [context, f"{of['plain'] * 1e3:.1f}", *(f"{of[name]:.2f}" for name in ("v8", "int8", "int4"))]
                    for context, of in by_context.items()
                ],
            )
            for dtype, by_context in by_dtype.items()
        ],
    )


def together(found: dict[str, Any]) -> str:
    """A table of speed, ratio to plain decoding, latency and equal texts by batch size and method."""
    rows = [["together", "method", "tokens/s", "/ plain", "worst and best round", "latency of a text, s", "same text"]]
    plain = {row["size"]: row["each"] for row in found["rows"] if row["method"] == "plain"}
    for row in found["rows"]:
        each = [a / b for a, b in zip(row["each"], plain[row["size"]], strict=True)]
        rows.append([str(row["size"]), "selfspec" if row["method"] == "adaptive" else row["method"]])
        rows[-1] += [f"{row['tokens_per_second']:.1f}", f"{row['ratio']:.2f}", f"{min(each):.2f} to {max(each):.2f}"]
        rows[-1] += [f"{row['latency']:.2f}", f"{row['same']} of {row['prompts']}"]
    return table(rows)


def schemas(found: dict[str, Any]) -> str:
    """A table of speeds with and without drafts, and their ratio, by schema."""
    rows = [["schema", "tokens/s, plain", "tokens/s, drafted", "/ plain", "tokens", "rounds", "same text"]]
    for row in found["rows"]:
        rows.append([row["schema"], f"{row['plain']:.1f}", f"{row['drafted']:.1f}", f"{row['ratio']:.2f}"])
        rows[-1] += [str(row["tokens"]), f"{row['rounds']:.0f}", "yes" if row["same"] else "no"]
    rows.append(["median", "", "", f"{statistics.median(row['ratio'] for row in found['rows']):.2f}", "", "", ""])
    return table(rows)


RENDERED = {
    "questions": whole,
    "held-out": whole,
    "editing": whole,
    "code": whole,
    "documents": lengths,
    "batches": together,
    "guided": schemas,
}


def losses(page: Path) -> str:
    """A table of what is slower than plain decoding: methods of selfspec, in all files, in all or in some part."""
    rows = [["measured", "setting", "method", "/ plain, means", "parts below 1"]]
    for found in every_file():
        where = f"{found['machine']}: {link(found, page)}, commit {found['commit']}, {found['date']}"
        rows += [[where, *row] for row in slower(found)]
    return table(rows)


def conditions(page: Path) -> str:
    """The conditions of each file that the table of losses has a row of."""
    return "\n\n".join(condition(found, page) for found in every_file() if slower(found))


def every_file() -> list[dict[str, Any]]:
    """What all files of docs/results hold, in the order of their names."""
    return [json.loads(file.read_text("utf-8")) for file in sorted(FOLDER.glob("*.json"), key=lambda file: file.stem)]


def slower(found: dict[str, Any]) -> list[list[str]]:
    """Setting, method, ratio and slower parts of each method of selfspec that loses, by the figures as shown."""
    rows = []
    for name, methods in settings(found) if "results" in found else []:
        for method, of in methods.items():
            parts, unit = of["by_task"], ""
            if RENDERED[found["comparison"]] is lengths:
                parts, unit = of["after_first_by_task"], " tokens, after the first one:"
            below = [f"{part}{unit} {ratio:.2f}" for part, ratio in parts.items() if loses(ratio)]
            if not method.startswith(NOT_OURS) and (below or loses(of["ratio_of_means"])):
                below = below if len(parts) > 1 else []
                rows.append([name, method, f"{of['ratio_of_means']:.2f}", "; ".join(below)])
    for row in found.get("rows", []):
        if loses(row["ratio"]):
            what = f"{row['size']} together" if "size" in row else row["schema"]
            rows.append([what, "selfspec", f"{row['ratio']:.2f}", ""])
    return rows


def loses(ratio: float) -> bool:
    """Whether a ratio to plain decoding is below 1 as tables show it."""
    return round(ratio, 2) < 1


def rendered(name: str, page: Path, kind: str = "results") -> str:
    """The table of a file of docs/results, or its table by task, with its conditions."""
    found = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    if kind == "by task":
        return f"\n{by_task(found)}\n\n{condition(found, page)}\n\n"
    return f"\n{RENDERED[found['comparison']](found)}\n\n{condition(found, page)}\n\n"


def filled(page: Path) -> str:
    """A page's text with every table made anew."""
    text = MARK.sub(lambda found: found[1] + rendered(found[3], page, found[2]) + found[4], page.read_text("utf-8"))
    return LOSSES.sub(lambda found: f"{found[1]}\n{losses(page)}\n\n{conditions(page)}\n\n{found[2]}", text)


def measured(comparison: str) -> dict[str, Any]:
    """The results of a comparison on the machine of the README."""
    found = json.loads((FOLDER / f"{comparison}.{MACHINE}.json").read_text(encoding="utf-8"))
    return dict(found["results"])


def first_screen() -> str:
    """The README's table of the questions, in float32 and greedily."""
    methods = measured("questions")["float32"]["0"]
    rows = [["", "tokens/s", "/ plain", "median", "/ plain after the first token"]]
    for name, shown in SHOWN.items():
        of = methods[name]
        rows.append([shown, f"{of['tokens_per_second']:.1f}", f"{of['ratio_of_means']:.2f}", ratio(of["median"])])
        rows[-1].append(ratio(of["after_first"]))
    return table(rows)


def further_settings() -> str:
    """The README's table of other dtypes, temperatures and texts, each against plain decoding."""
    rows = [["/ plain", "without a search", "after the first token", "searched profile", "after the first token"]]
    for comparison, what in (("questions", "questions"), ("editing", "edits of code")):
        for dtype, temperatures in measured(comparison).items():
            for temperature, methods in temperatures.items():
                if (comparison, dtype, temperature) != ("questions", "float32", "0"):
                    pairs = [methods.get(name) for name in ("no search", "selfspec")]
                    shown = [
                        [f"{of['ratio_of_means']:.2f}", f"{of['after_first'][0]:.2f}"] if of else ["-", "-"]
                        for of in pairs
                    ]
                    rows.append([f"{what}, {setting(dtype, temperature)}", *shown[0], *shown[1]])
    return table(rows)


ON_FIRST_SCREEN = {"first screen": first_screen, "further settings": further_settings}


def filled_readme() -> str:
    """The README's text with its tables made anew."""
    text = README.read_text(encoding="utf-8")
    return ON_README.sub(lambda found: f"{found[1]}\n{ON_FIRST_SCREEN[found[2]]()}\n\n{found[3]}", text)


def write() -> None:
    """Make every table of the pages and of the README anew."""
    for page in PAGES:
        page.write_text(filled(page), encoding="utf-8")
    README.write_text(filled_readme(), encoding="utf-8")


if __name__ == "__main__":
    write()
