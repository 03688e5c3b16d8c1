"""Prompts from files, folders and data sets of the hub, the package's own prompts, and Spec-Bench's questions.

The questions are read from the benchmark's own `question.jsonl`, which is not shipped.

This module reads `.jsonl` and `.txt` lines itself instead of by `datasets`, whose JSON reader converts texts that look
like dates to dates and accepts `["a"]` as a row, and whose JSON and text readers do not name a wrong line.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Self

from selfspec import builtin
from selfspec.basics.errors import SelfspecError, one_line
from selfspec.basics.files import kind, read_text
from selfspec.text.datasets_prompts import PRESETS, Use, read_folder, read_parquet, read_preset
from selfspec.text.prompt_template import FileTexts, Prompt, PromptTemplate, check_unicode, json_row, lines
from selfspec.text.spec_bench import benchmark_file, read_questions

TASK = ("task", "category")  # columns that hold a prompt's task; the first of these that exists is read
CHAT = "built-in chat prompts"


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts to draw prompts from, with their source and the column or template that made the texts.

    `messages`: whether each text is a user's message, for a model with a chat template. `tasks`: the task of each text;
    empty if unknown. `note`: which rows of the source are not among the texts; None if every row is.
    """

    source: str
    texts: Sequence[Prompt]
    column: str | None = None
    template: str | None = None
    messages: bool = False
    tasks: tuple[str, ...] = ()
    note: str | None = None

    def subset(self, limit: int, *, last: bool = False) -> Self:
        """Return at most `limit` texts, the first or the last; with known tasks, balanced over the tasks."""
        order = range(len(self.texts))
        indices = list(reversed(order)) if last else list(order)
        if self.tasks:
            by_task: dict[str, list[int]] = defaultdict(list)
            for index in indices:
                by_task[self.tasks[index]].append(index)
            indices = [index for index in chain(*zip_longest(*by_task.values())) if index is not None]
        selected = sorted(indices[:limit])
        tasks = tuple(self.tasks[index] for index in selected) if self.tasks else ()
        return replace(self, texts=tuple(self.texts[index] for index in selected), tasks=tasks)


def prompts_for(prompts: Prompts | None, part: builtin.Part, *, chat: bool, takes_messages: bool) -> Prompts:
    """Return the prompts of a command: `prompts`, or built-in prompts if it is None.

    `part`: the part of the built-in prompts, for calibration or held out. `takes_messages`: whether the model has a
    chat template; the built-in prompts are then requests to an assistant, else Python code. `chat`: use every prompt as
    a user's message. The `messages` of the result say whether the prompts are to be used as messages.
    """
    if prompts is None:
        prompts = Prompts(builtin.NAME, tuple(builtin.prompts(part)))
        if takes_messages:
            texts, tasks = zip(*builtin.chat_prompts(part), strict=True)
            prompts = Prompts(CHAT, texts, messages=True, tasks=tasks)
    return replace(prompts, messages=chat or (prompts.messages and takes_messages))


def read_prompts(
    data: str | Path,
    *,
    column: str | None = None,
    template: str | None = None,
    held_out: bool = False,
    chat: bool = False,
    use: Use = "first",
    limit: int | None = None,
) -> Prompts:
    """Read the prompts of a file, a folder, a data set of the hub by its name in `PRESETS`, or a benchmark's questions.

    `spec-bench:PATH` and `speed-bench:PATH` name a benchmark's file. Another file is `.jsonl` (an object a line),
    `.txt` (a prompt a line) or `.parquet`; each text file of a folder is one prompt. A preset's name takes precedence
    over a folder; write `./gsm8k` for a folder of that name. `column` and `template` are those of `PromptTemplate`; by
    default those of the preset. Tasks are kept if every row of a `.jsonl` file has a `task` (or `category`).
    `held_out`: read the preset's split that searches do not read, if the preset has two splits. `chat`: if a row has
    `messages`, the prompt is the whole conversation, else the first user message. `use`: which rows are used, of which
    only "every" concerns `.jsonl` and `.txt` files. `limit`: the most prompts that are read of a data set of the hub
    or a parquet file (None: as `use` says). Raises `SelfspecError`, which names the file and the wrong line.
    """
    name, path = str(data), Path(data)
    if not name:
        raise SelfspecError("the data's name is empty; expected a file, a folder, or the name of a data set")
    shape = PromptTemplate(column, template, chat)
    prompts: Sequence[Prompt]
    tasks: tuple[str, ...] = ()
    if (named := benchmark_file(name)) is not None:
        if (column, template) != (None, None):
            raise SelfspecError(f"{name}: takes no column and no template; its prompts are the questions' first turns")
        benchmark, path = named
        texts, tasks = read_questions(path, benchmark)
        return Prompts(f"{benchmark.name} ({path.name})", texts, messages=True, tasks=tasks)
    if name in PRESETS:
        preset = PRESETS[name]
        shape = preset.shape if (column, template) == (None, None) else shape
        rows = read_preset(name, shape, held_out=held_out, use=use, limit=limit)
        split = preset.held_out if held_out else preset.split
        name = " ".join(filter(None, (preset.repository, preset.config, split)))
    elif kind(path) == "folder":
        rows, name = read_folder(path, shape, use=use), path.resolve().name
    elif path.suffix.lower() == ".parquet":
        rows, name = read_parquet(path, shape, use=use, limit=limit), path.name
    else:
        prompts, tasks = _read_file(path, shape, every=use == "every")
        return Prompts(path.name, prompts, shape.column, shape.template, tasks=tasks)
    return Prompts(name, tuple(rows.prompts), shape.column, shape.template, note=rows.note)


def read_texts(
    data: str | Path, *, column: str | None = None, template: str | None = None
) -> tuple[list[str], str | None]:
    """Read whole texts: the rows of a `.jsonl` or `.parquet` file, each file of a folder, or the text of one file.

    Returns the texts, and a note that says which rows gave no text (None: every row did). `column` and `template` make
    a text of a row, as in `PromptTemplate`. Raises `SelfspecError`, which names the file.
    """
    path = Path(data)
    if kind(path) == "file" and path.suffix.lower() not in (".jsonl", ".parquet"):
        return ([text] if (text := read_text(path)).strip() else []), None
    prompts = read_prompts(data, column=column, template=template, use="all")
    return [str(text) for text in prompts.texts], prompts.note


def _read_file(path: Path, shape: PromptTemplate, *, every: bool) -> tuple[Sequence[Prompt], tuple[str, ...]]:
    """Read the prompts of a .jsonl or .txt file, and their tasks if every prompt has one.

    Blank lines are not prompts; with `every`, only those at the end may be blank.
    """
    suffix = path.suffix.lower()
    if suffix not in (".jsonl", ".txt"):
        missing = "no such file or folder; " if kind(path) == "missing" else ""
        raise SelfspecError(
            f"{path}: {missing}expected a .jsonl file (rows with 'prompt' or 'text'), a .txt file (a prompt a line), a "
            f".parquet file, a folder of text files, or one of {', '.join(PRESETS)}"
        )
    text = _line_of(path, shape) if suffix == ".txt" else _row_of(shape)
    texts, tasks, number = FileTexts(path, text), list[str | None](), 0
    for line in lines(path):
        if every and line.number > number + 1:
            raise SelfspecError(f"{path}, line {number + 1}: blank; expected a prompt on every line")
        number = line.number
        if suffix == ".jsonl":
            row = json_row(line.text, line.where)
            texts.add(line, _prompt(row, shape, where=line.where))
            tasks.append(_task(row))
        elif prompt := text(line.text, line.where):
            texts.add(line, prompt)
    if not texts:
        raise SelfspecError(f"{path}: holds no prompts")
    known = tuple(task for task in tasks if task is not None)
    return texts, known if len(known) == len(texts) else ()


def _line_of(path: Path, shape: PromptTemplate) -> Callable[[str, str], Prompt]:
    """Return the function that makes a prompt of a line of a .txt file."""
    try:
        shape.columns(["text"])
    except SelfspecError as error:
        raise SelfspecError(f"{path}: {error}") from None
    return lambda line, where: shape.text({"text": line.rstrip("\r")}) or ""


def _row_of(shape: PromptTemplate) -> Callable[[str, str], Prompt]:
    """Return the function that makes a prompt of a line of a .jsonl file."""
    return lambda line, where: _prompt(json_row(line, where), shape, where=where)


def _prompt(row: Any, shape: PromptTemplate, *, where: str) -> Prompt:
    prompt = shape.prompt(row) if isinstance(row, dict) else None
    if prompt is None:
        hint = ""
        if isinstance(row, dict) and row and not set(shape.names) & set(row):
            hint = f" (there are: {one_line(', '.join(row))[:200]}); name another column"
        raise SelfspecError(f"{where}: expected an object whose {shape}{hint}")
    check_unicode(prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False), where)
    return prompt


def _task(row: dict[str, Any]) -> str | None:
    named = next((row[name] for name in TASK if name in row), None)
    return named if isinstance(named, str) and named.strip() and named.isprintable() else None
