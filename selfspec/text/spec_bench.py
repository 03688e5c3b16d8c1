"""Questions of Spec-Bench (Xia et al., 2401.07851) and SPEED-Bench (2604.09557): first user turns, with their tasks.

The questions are read from the benchmarks' own files, which are not shipped: `spec-bench:PATH` names Spec-Bench's
`question.jsonl`, `speed-bench:PATH` a parquet or JSONL file of SPEED-Bench.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from selfspec.basics.errors import SelfspecError, short
from selfspec.text.datasets_prompts import parquet_rows
from selfspec.text.prompt_template import check_unicode, json_rows

CONVERSATION = "multi-turn conversation"  # the task of all MT-Bench categories, as in Spec-Bench's results
_OF_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_OTHERS = ("translation", "summarization", "qa", "math_reasoning", "rag")
TASKS = {**dict.fromkeys(_OF_MT_BENCH, CONVERSATION), **{task: task for task in _OTHERS}}  # by category


class Benchmark(NamedTuple):
    """A benchmark: the prefix of its files' paths, its name, its file, and tasks by category (None: categories)."""

    prefix: str
    name: str
    file: str
    tasks: dict[str, str] | None


BENCHMARKS = (
    Benchmark("spec-bench:", "Spec-Bench", "question.jsonl", TASKS),
    Benchmark("speed-bench:", "SPEED-Bench", "parquet or .jsonl file", None),
)


def benchmark_file(data: str) -> tuple[Benchmark, Path] | None:
    """Return the benchmark and the file that `data` names, as in `spec-bench:PATH`; None for other data.

    Raises `SelfspecError` for a benchmark without a path.
    """
    for benchmark in BENCHMARKS:
        if data.startswith(benchmark.prefix):
            path = data.removeprefix(benchmark.prefix)
            if not path:
                raise SelfspecError(
                    f"{benchmark.prefix} names no file; expected {benchmark.prefix}PATH, the path of "
                    f"{benchmark.name}'s {benchmark.file}"
                )
            return benchmark, Path(os.path.expanduser(path))  # a shell does not expand ~ after the colon
    return None


def read_questions(path: Path, benchmark: Benchmark = BENCHMARKS[0]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the questions and their tasks. Raises `SelfspecError`, which names the file and the wrong line or row."""
    questions = [_question(row, where, benchmark) for where, row in _rows(path)]
    if not questions:
        raise SelfspecError(f"{path}: holds no questions; expected {benchmark.name}'s {benchmark.file}")
    texts, tasks = zip(*questions, strict=True)
    return texts, tasks


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix.lower() == ".parquet":
        yield from ((f"{path}, row {i}", row) for i, row in enumerate(parquet_rows(path, ("category", "turns")), 1))
    else:
        yield from ((line.where, row) for line, row in json_rows(path))


def _question(row: Any, where: str, benchmark: Benchmark) -> tuple[str, str]:
    if not isinstance(row, dict):
        raise SelfspecError(
            f"{where}: expected an object with 'category' and 'turns', as in {benchmark.name}'s {benchmark.file}"
        )
    category, turns = row.get("category"), row.get("turns")
    tasks = benchmark.tasks
    named = isinstance(category, str) and category.strip() and category.isprintable()
    if not isinstance(category, str) or not named or (tasks is not None and category not in tasks):
        got = "is missing" if category is None else f"is {short(category)}"
        expected = "a name" if tasks is None else f"one of {benchmark.name}'s: {', '.join(tasks)}"
        raise SelfspecError(f"{where}: 'category' {got}; expected {expected}")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise SelfspecError(f"{where}: 'turns' must be a list of texts, the user's turns")
    if not turns[0].strip():
        raise SelfspecError(f"{where}: the first of 'turns' is empty; expected a question")
    return check_unicode(turns[0], where), category if tasks is None else tasks[category]
