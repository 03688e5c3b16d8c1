"""Tables of `selfspec bench` by task, with Spec-Bench's figures and selfspec's, and the line on identical texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

MIN_PROMPTS_PER_TASK = 2  # figures by task need at least this mean number of prompts per task
MAX_NAME_WIDTH = 23  # columns of a task's name, so that a table fits 80 columns


def by_task_tables(result: Mapping[str, Any]) -> list[Table]:
    """Return a table per method except plain decoding: a row per task and one for all tasks, within 80 columns."""
    methods = {name: m["by_task"] for name, m in result["methods"].items() if name != "plain" and _has_task_figures(m)}
    return [_table(f"{name}, temperature {result['temperature']:g}", by_task) for name, by_task in methods.items()]


def by_task_notes(result: Mapping[str, Any]) -> list[str]:
    """Return lines that explain the columns of the tables; empty if there are no tables."""
    if not by_task_tables(result):
        return []
    return [
        "tok/s (mean over prompts), tok/pass and / plain (of tok/s): as in Spec-Bench",
        "median: over prompts, of the speed over plain decoding's, with a 95% bootstrap interval",
    ]


def texts_line(result: Mapping[str, Any]) -> list[str]:
    """Return one line on how many texts of each method equal plain decoding's; empty for sampled texts."""
    by_method = [
        f"{name} {_format_verdicts(m['same_text'])}"
        for name, m in result["methods"].items()
        if m["same_text"] is not None
    ]
    return [f"texts identical to plain decoding's, by token ids: {'; '.join(by_method)}"] if by_method else []


def _has_task_figures(method: Mapping[str, Any]) -> bool:
    """Return whether a method has enough prompts for figures by task."""
    if "by_task" not in method:
        return False
    tasks = method["by_task"]["tasks"]
    return bool(method["by_task"]["overall"]["prompts"] >= MIN_PROMPTS_PER_TASK * len(tasks))


def _table(title: str, by_task: Mapping[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("task", no_wrap=True, max_width=MAX_NAME_WIDTH)
    for name in ("n", "tok/s", "tok/pass", "/ plain", "median", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in (*by_task["tasks"], {"task": "overall", **by_task["overall"]}):
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


def _format_verdicts(verdicts: Mapping[str, int]) -> str:
    failures = [f"{verdicts['near_ties']} near-ties"] if verdicts["near_ties"] else []
    failures += [f"{verdicts['bugs']} BUGS, please report"] if verdicts["bugs"] else []
    suffix = f" ({', '.join(failures)})" if failures else ""
    return f"{verdicts['same']} of {sum(verdicts.values())}{suffix}"
