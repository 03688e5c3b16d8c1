"""Questions of Spec-Bench (Xia et al., 2401.07851): each question's first user turn, with its task.

The questions are read from the benchmark's own `question.jsonl`, which is not shipped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from selfspec.basics.errors import SelfspecError, short
from selfspec.text.jsonl import check_unicode, json_rows

PREFIX = "spec-bench:"
CONVERSATION = "multi-turn conversation"  # the task of all MT-Bench categories, as in Spec-Bench's results
_OF_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_OTHERS = ("translation", "summarization", "qa", "math_reasoning", "rag")
TASKS = {**dict.fromkeys(_OF_MT_BENCH, CONVERSATION), **{task: task for task in _OTHERS}}  # by category


def spec_bench_file(data: str) -> Path:
    """Return the file that `spec-bench:PATH` names. Raises `SelfspecError` without a path."""
    path = data.removeprefix(PREFIX)
    if not path:
        raise SelfspecError(f"{PREFIX} names no file; expected {PREFIX}PATH, the path of Spec-Bench's question.jsonl")
    return Path(os.path.expanduser(path))  # a shell does not expand ~ after the colon


def read_questions(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the questions and their tasks. Raises `SelfspecError`, which names the file and the wrong line."""
    questions = [_question(row, line.where) for line, row in json_rows(path)]
    if not questions:
        raise SelfspecError(f"{path}: holds no questions; expected Spec-Bench's question.jsonl")
    texts, tasks = zip(*questions, strict=True)
    return texts, tasks


def _question(row: Any, where: str) -> tuple[str, str]:
    if not isinstance(row, dict):
        raise SelfspecError(
            f"{where}: expected an object with 'category' and 'turns', as in Spec-Bench's question.jsonl"
        )
    category, turns = row.get("category"), row.get("turns")
    if not isinstance(category, str) or category not in TASKS:
        got = "is missing" if category is None else f"is {short(category)}"
        raise SelfspecError(f"{where}: 'category' {got}; expected one of Spec-Bench's: {', '.join(TASKS)}")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise SelfspecError(f"{where}: 'turns' must be a list of texts, the user's turns")
    if not turns[0].strip():
        raise SelfspecError(f"{where}: the first of 'turns' is empty; expected a question")
    return check_unicode(turns[0], where), TASKS[category]
