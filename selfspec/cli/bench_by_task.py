"""Tables of `selfspec bench` by task, with Spec-Bench's figures and our own, and the line on identical texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

LEAST = 2  # mean prompts per task below which no figures by task are shown
WIDEST = 23  # columns of a task's name, so that a table fits 80 columns


def by_task_tables(at: Mapping[str, Any]) -> list[Table]:
    """Return a table per method except plain decoding: a row per task and one for all tasks, within 80 columns."""
    methods = {name: m["by_task"] for name, m in at["methods"].items() if name != "plain" and _shown(m)}
    return [_table(f"{name}, temperature {at['temperature']:g}", found) for name, found in methods.items()]


def by_task_notes(at: Mapping[str, Any]) -> list[str]:
    """Return notes that explain the columns; empty without tables."""
    if not by_task_tables(at):
        return []
    return [
        "tok/s (mean over prompts), tok/pass and / plain (of tok/s): as in Spec-Bench",
        "median: of the prompts' own ratios to plain, with a 95% bootstrap interval",
    ]


def texts_line(at: Mapping[str, Any]) -> list[str]:
    """Return a line on which methods produced plain decoding's texts; empty for sampled texts."""
    told = [f"{name} {_same(m['same_text'])}" for name, m in at["methods"].items() if m["same_text"] is not None]
    return [f"texts the same as plain's, by token ids: {'; '.join(told)}"] if told else []


def _shown(method: Mapping[str, Any]) -> bool:
    """Return whether a method has enough prompts for figures by task."""
    if "by_task" not in method:
        return False
    tasks = method["by_task"]["tasks"]
    return bool(method["by_task"]["overall"]["prompts"] >= LEAST * len(tasks))


def _table(title: str, found: Mapping[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("task", no_wrap=True, max_width=WIDEST)
    for name in ("n", "tok/s", "tok/pass", "/ plain", "median", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in (*found["tasks"], {"task": "overall", **found["overall"]}):
        ratio, same = row["ratio"]["plain"], row["same_text"]
        table.add_row(
            row["task"],
            str(row["prompts"]),
            f"{row['mean_tokens_per_second']:.4g}",
            f"{row['mean_accepted_tokens']:.2f}",
            f"{row['speedup']['plain']:.2f}",
            f"{ratio['median']:.2f} {ratio['low']:.2f}-{ratio['high']:.2f}",
            "-" if same is None else str(same["same"]),
        )
    return table


def _same(verdicts: Mapping[str, int]) -> str:
    others = [f"{verdicts['near_ties']} near-ties"] if verdicts["near_ties"] else []
    others += [f"{verdicts['bugs']} BUGS, please report"] if verdicts["bugs"] else []
    told = f" ({', '.join(others)})" if others else ""
    return f"{verdicts['same']} of {sum(verdicts.values())}{told}"
