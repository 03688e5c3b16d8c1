"""Prompts read by the `datasets` library: parquet files, folders of texts, and well-known data sets of the hub.

Rows are streamed, without a copy in a cache. By default only the first `ROWS` rows are read, and rows without text are
left out; `Rows.note` says how many.
"""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from selfspec.basics.errors import SelfspecError, reason
from selfspec.basics.files import check_file, read_text
from selfspec.basics.machine import unreachable
from selfspec.text.prompt_template import Prompt, PromptTemplate

ROWS = 4096
BATCH = 512  # rows in memory at a time, as one row group of a parquet file may have a million
RETRIES = 3  # maximum number of retries of an interrupted read
SUFFIXES = (".txt", ".md", ".rst", ".tex", ".py", ".js", ".ts", ".java", ".c", ".h", ".cpp", ".go", ".rs")


@dataclass(frozen=True, slots=True)
class Preset:
    """A data set of the hub: its repository, and `shape`, the template that makes prompts of its rows.

    Searches read the split `split`; audits and benchmarks read `held_out`, which is another split if the data set has
    two. `config`: the data set's configuration. `revision`: the repository's revision (None: the main revision).
    """

    repository: str
    config: str | None
    split: str
    held_out: str
    shape: PromptTemplate
    revision: str | None = None

    @property
    def address(self) -> str:
        """The URL of the data set's page on the hub."""
        revision = f"/tree/{quote(self.revision, safe='')}" if self.revision else ""
        return f"https://huggingface.co/datasets/{self.repository}{revision}"


PRESETS = {
    "cnn_dailymail": Preset(
        "abisee/cnn_dailymail", "3.0.0", "train", "test", PromptTemplate("article", "Article: {article}\nSummary:")
    ),
    "xsum": Preset(
        "EdinburghNLP/xsum",
        None,
        "train",
        "test",
        PromptTemplate("document", "Article: {document}\nSummary in one sentence:"),
        revision="refs/convert/parquet",  # the main revision is a script, which `datasets` no longer runs
    ),
    "gsm8k": Preset(
        "openai/gsm8k", "main", "train", "test", PromptTemplate("question", "Question: {question}\nAnswer:")
    ),
    "humaneval": Preset("openai/openai_humaneval", None, "test", "test", PromptTemplate("prompt")),
    "mt_bench": Preset("HuggingFaceH4/mt_bench_prompts", None, "train", "train", PromptTemplate("prompt")),
}


Use = Literal["first", "all", "every"]
"""Which rows are used: the first `ROWS` or all rows, except those without a text; or every row, or else an error."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The prompts of a data set's rows. `note`: which rows gave no prompt, as a text to show; None if every row did."""

    prompts: list[Prompt]
    note: str | None = None


def read_parquet(path: Path, shape: PromptTemplate, *, use: Use = "first", limit: int | None = None) -> Rows:
    """Read the prompts of a parquet file's rows, `limit` at most. Raises `SelfspecError`, which names the file."""
    with _streamed_parquet(path) as rows:
        return _prompts(rows, shape, str(path), use=use, limit=limit)


def parquet_rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return a parquet file's rows, with those of `columns` that it has. Raises `SelfspecError`, naming the file."""
    with _streamed_parquet(path) as rows:
        names = _column_names(rows)
        return list(rows.select_columns([name for name in columns if name in names]))


def read_folder(path: Path, shape: PromptTemplate, *, use: Use = "first") -> Rows:
    """Read the text files of a folder, each a prompt. Raises `SelfspecError`, which names the folder or file."""
    files = text_files(path)
    if not files:
        raise SelfspecError(f"{path}: holds no prompts; expected text files ({' '.join(SUFFIXES)})")
    try:
        with _settings():
            rows = _stream("text", files, sample_by="document", encoding="utf-8-sig")
            return _prompts(rows, shape, str(path), columns=["text"], use=use)
    except SelfspecError:
        raise
    except Exception as error:
        for file in files:
            read_text(file)  # raises an error that names the file
        raise SelfspecError(f"{path}: cannot be read ({reason(error)})") from None


def text_files(folder: Path) -> list[Path]:
    """Return the text files of a folder and its subfolders, sorted by path, without hidden ones."""

    def wrong(error: OSError) -> None:
        raise SelfspecError(f"{error.filename}: cannot be read ({error.strerror})")

    paths = []
    for directory, folders, names in os.walk(folder, onerror=wrong):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(directory, n) for n in names if n.lower().endswith(SUFFIXES) and not n.startswith(".")]
    return sorted(path for path in paths if path.is_file())


def read_preset(
    name: str, shape: PromptTemplate, *, held_out: bool, use: Use = "first", limit: int | None = None
) -> Rows:
    """Read the prompts of a data set of the hub, `limit` at most, or of its copy in the cache of `datasets`.

    Raises `SelfspecError` within a minute if neither is available; the message says what to download and how to use it.
    """
    from datasets import load_dataset

    preset = PRESETS[name]
    split = preset.held_out if held_out else preset.split
    missing = unreachable()
    try:
        with _settings(
            HF_HUB_OFFLINE=missing is not None, STREAMING_READ_MAX_RETRIES=RETRIES, STREAMING_OPEN_MAX_RETRIES=RETRIES
        ):
            rows = load_dataset(preset.repository, preset.config, split=split, revision=preset.revision, streaming=True)
            return _prompts(rows, shape, name, use=use, limit=limit)
    except SelfspecError:
        raise
    except Exception as error:  # a network can fail in any way
        where = f"its split {split}" + (f" of config {preset.config}" if preset.config else "")
        arguments = [] if shape.column is None else ["--column", shape.column]
        arguments += [] if shape.template is None else ["--template", shape.template.replace("\n", "\\n")]
        cause = Exception(str(error).rpartition(" either: ")[2])  # the text before it names an unrelated folder
        raise SelfspecError(
            f"{name}: {missing or reason(cause)}; download a parquet file of {where} from {preset.address} "
            f"and give it: --prompts FILE.parquet {shlex.join(arguments)}"
        ) from None


def _stream(kind: str, files: Iterable[Path], **options: Any) -> Any:
    from datasets import load_dataset

    names = [glob.escape(str(file.absolute())) for file in files]  # brackets in a name would match other names
    return load_dataset(kind, data_files={"train": names}, split="train", streaming=True, **options)


@contextmanager
def _streamed_parquet(path: Path) -> Iterator[Any]:
    """Stream a parquet file's rows. Raises `SelfspecError`, which names the file, if they cannot be read."""
    check_file(path)
    try:
        with _settings():
            yield _stream("parquet", [path], batch_size=BATCH)
    except SelfspecError:
        raise
    except Exception as error:  # a corrupt file can raise anything
        raise SelfspecError(f"{path}: not a parquet file that can be read ({reason(error)})") from None


def _column_names(rows: Any) -> list[str]:
    """Return the columns of a streamed data set; none if it has no rows and does not name them."""
    return rows.column_names or list(next(iter(rows), {}))


def _prompts(
    rows: Any,
    shape: PromptTemplate,
    where: str,
    columns: list[str] | None = None,
    *,
    use: Use,
    limit: int | None = None,
) -> Rows:
    """Return the prompts of a streamed data set's rows, `limit` at most. Raises `SelfspecError` if there is none."""
    names = columns or _column_names(rows)
    if not names:
        raise SelfspecError(f"{where}: holds no prompts")
    try:
        wanted = shape.columns(names)
    except SelfspecError as error:
        raise SelfspecError(f"{where}: {error}") from None
    prompts, empty, more = list[Prompt](), 0, False
    for number, row in enumerate(rows.select_columns(list(wanted)), start=1):
        if use == "first" and number > ROWS:
            more = True
            break
        if len(prompts) == limit:
            break
        prompt = shape.prompt(row)
        if prompt is not None:
            prompts.append(prompt)
        elif use == "every":
            raise SelfspecError(f"{where}, row {number}: expected a row whose {shape}")
        else:
            empty += 1
    if not prompts:
        raise SelfspecError(f"{where}: holds no prompts; expected rows whose {shape}")
    notes = [f"{empty} row{'s' if empty > 1 else ''} without text"] if empty else []
    notes += [f"all rows after the first {ROWS}"] if more else []
    return Rows(prompts, f"{where}: not used: {' and '.join(notes)}" if notes else None)


@contextmanager
def _settings(**values: Any) -> Iterator[None]:
    """Silence the logging of `datasets` and set values in its `config`; restore both afterwards."""
    from datasets import config
    from datasets.utils import logging

    before, verbosity = {name: getattr(config, name) for name in values}, logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    for name, value in values.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
        logging.set_verbosity(verbosity)
