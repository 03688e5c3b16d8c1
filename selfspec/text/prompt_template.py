"""Prompt types (a text, token ids, or chat messages), and prompts from data rows, lines of text and JSON lines."""

from __future__ import annotations

import operator
from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from operator import eq
from pathlib import Path
from string import Formatter
from typing import Any, BinaryIO, cast, overload

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_file, parse_json

Message = Mapping[str, str]  # {"role": "system", "user" or "assistant", "content": text}
Prompt = str | Sequence[int] | Sequence[Message]  # a text, token ids, or a chat whose last message is to be answered


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8: it has no unpaired surrogate, as undecodable bytes leave."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def is_chat(prompt: object) -> bool:
    """Return whether a prompt is a list of chat messages."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def shown(prompt: Prompt) -> str:
    """Return a prompt as text to show: each message with its role on a new line, token ids as numbers."""
    if is_chat(prompt):
        return "\n\n".join(f"{entry.get('role')}: {entry.get('content')}" for entry in prompt)  # type: ignore[union-attr]
    return prompt if isinstance(prompt, str) else " ".join(map(str, prompt))


def token_ids(prompt: Any) -> list[int]:
    """Convert a sequence of whole numbers, or a tensor or array `[n]` or `[1, n]`, to a list of token ids.

    Raises `SelfspecError` for anything else.
    """
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, (list, tuple)) and len(ids) == 1 and isinstance(ids[0], (list, tuple)):
        ids = ids[0]
    if not isinstance(ids, Sequence) or isinstance(ids, (bytes, bytearray)) or any(isinstance(i, bool) for i in ids):
        raise SelfspecError(f"a prompt is a text, token ids or messages; got {type(prompt).__name__}")
    if any(isinstance(i, (str, list, tuple, Mapping)) for i in ids):
        raise SelfspecError(
            "a prompt is one text, token ids or messages; got a list of prompts, which generate_many takes"
        )
    try:
        return [operator.index(i) for i in ids]
    except TypeError:
        raise SelfspecError("a prompt's token ids are whole numbers; got something else among them") from None


DEFAULT_COLUMNS = ("prompt", "text", "messages")  # without a named column, the first of these that exists is read


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    r"""The column, or the template over several columns, that makes a prompt of a row.

    `column`: the column to read; by default the first of `DEFAULT_COLUMNS` that the row has. `template`: a text with
    columns in braces, such as `"Question: {question}\nAnswer:"`, where `{{` and `}}` stand for braces. If both are
    given, the template must name the column. If a column holds a list of texts, such as a conversation's turns, the
    first text is read; if it holds a list of messages, `{"role": ..., "content": ...}`, the user's first message is
    read. With `chat` and without a template, the whole list of messages is the prompt.
    Raises `SelfspecError` for an invalid template.
    """

    column: str | None = None
    template: str | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        if self.column == "":
            raise SelfspecError("the column's name is empty")
        if self.template is None:
            return
        if not is_unicode(self.template):
            raise SelfspecError("the template is not valid Unicode text; give UTF-8")
        names = _names(self.template)
        if not names:
            raise SelfspecError(
                f"template {self.template!r}: names no column; expected one in braces, such as {{text}}"
            )
        if self.column is not None and self.column not in names:
            raise SelfspecError(
                f"template {self.template!r}: does not name the column '{self.column}' that was asked for"
            )

    def columns(self, available: Collection[str]) -> tuple[str, ...]:
        """Return the columns to read, given the existing ones. Raises `SelfspecError` for a missing column."""
        defaults = tuple(name for name in DEFAULT_COLUMNS if name in available)[:1]
        selected = defaults if self.template is None and self.column is None else self._columns({})
        missing = [name for name in selected if name not in available]
        if missing or not selected:
            *most, last = (f"'{name}'" for name in missing[:1] or DEFAULT_COLUMNS)
            named = " or ".join(filter(None, (", ".join(most), last)))
            raise SelfspecError(f"no column {named} (there are: {', '.join(list(available)[:20])}); name another")
        return selected

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that a prompt may be made of."""
        if self.template is not None:
            return _names(self.template)
        return DEFAULT_COLUMNS if self.column is None else (self.column,)

    def prompt(self, row: Mapping[str, Any]) -> Prompt | None:
        """Return the prompt of a row; None if a text is missing, empty or of another type."""
        if self.chat and self.template is None and is_chat(value := row.get(self._columns(row)[0])):
            return cast("list[Message]", value)
        return self.text(row)

    def text(self, row: Mapping[str, Any]) -> str | None:
        """Return the text of a row's prompt; None if a text is missing, empty or of another type."""
        texts = {name: _text(row.get(name), numbers=self.template is not None) for name in self._columns(row)}
        if None in texts.values():
            return None
        if self.template is None:
            return next(iter(texts.values()))
        parts = Formatter().parse(self.template)
        return "".join(before + (texts[name] or "" if name is not None else "") for before, name, *_ in parts)

    def __str__(self) -> str:
        """Return the condition on rows for an error that reads "a row whose ..."."""
        if self.template is not None:
            named = " and ".join(f"'{name}'" for name in self._columns({}))
            return f"{named} are texts that are not empty, or numbers"
        named = "'prompt' (or 'text')" if self.column is None else f"'{self.column}'"
        return f"{named} is a text that is not empty"

    def _columns(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        if self.template is not None:
            return _names(self.template)
        return (self.column or next((name for name in DEFAULT_COLUMNS if name in row), DEFAULT_COLUMNS[0]),)


def _names(template: str) -> tuple[str, ...]:
    """Return a template's column names, each once. Raises `SelfspecError` for anything but a name inside braces."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise SelfspecError(f"template {template!r}: {error}; {{{{ and }}}} stand for braces") from None
    names = dict.fromkeys(name for _, name, *_ in parts if name is not None)
    for _, name, details, conversion in parts:
        if name is not None and (not name or details or conversion or set(name) & set(".[]{}")):
            raise SelfspecError(
                f"template {template!r}: expected nothing but the name of a column in braces, such as {{text}}"
            )
    return tuple(names)


def _text(value: Any, *, numbers: bool) -> str | None:
    if is_chat(value):
        value = next(
            (
                message.get("content")
                for message in value
                if isinstance(message, Mapping) and message.get("role") == "user"
            ),
            None,
        )
    elif isinstance(value, list) and value:
        value = value[0]
    if numbers and isinstance(value, (int, float)):
        return str(value)
    return value if isinstance(value, str) and value.strip() else None


def digest(prompt: Prompt) -> bytes:
    """Return a hash of a text, token ids or messages. Raises `SelfspecError` for anything else."""
    text = prompt if isinstance(prompt, str) else repr(prompt if is_chat(prompt) else token_ids(prompt))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class FileTexts(Sequence[Prompt]):
    """Lazy sequence of prompts from a file's lines: it stores only offsets, and reads a prompt on access.

    `text(line, where)` converts a line to its prompt. `digests`: a hash of each prompt, to find equal ones. Raises
    `SelfspecError` if the file can no longer be read.
    """

    def __init__(self, path: Path, text: Callable[[str, str], Prompt]) -> None:
        self._path, self._text = path, text
        self._starts, self._numbers = array("q"), array("q")
        self.digests: list[bytes] = []

    def add(self, line: Line, text: Prompt) -> None:
        """Add a line to the sequence; `text`: the line's prompt, of which only a hash is kept."""
        self._starts.append(line.start)
        self._numbers.append(line.number)
        self.digests.append(digest(text))

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prompt, ...]: ...
    def __getitem__(self, index: int | slice) -> Prompt | tuple[Prompt, ...]:
        if isinstance(index, slice):
            return tuple(self._read(range(len(self))[index]))
        (text,) = self._read([range(len(self))[index]])
        return text

    def __iter__(self) -> Iterator[Prompt]:
        return self._read(range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def _read(self, indices: Iterable[int]) -> Iterator[Prompt]:
        with opened(self._path) as file:
            for index in indices:
                file.seek(self._starts[index])
                where = f"{self._path}, line {self._numbers[index]}"
                yield self._text(_decoded(file.readline(), self._path, self._starts[index]), where)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading. Raises `SelfspecError` if it is missing, no regular file or unreadable, also later."""
    check_file(path)
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise SelfspecError(f"{path}: cannot be read ({error.strerror or error})") from None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file: its text, its number from 1, its byte offset, and its location for errors."""

    text: str
    number: int
    start: int
    where: str


def lines(path: Path) -> Iterator[Line]:
    """Yield the lines that are not blank, without reading the whole file into memory. Raises `SelfspecError`."""
    start = 0
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            mark = len(BOM_UTF8) if number == 1 and line.startswith(BOM_UTF8) else 0
            if (text := _decoded(line[mark:], path, start + mark)).strip():
                yield Line(text, number, start + mark, f"{path}, line {number}")
            start += len(line)


def _decoded(line: bytes, path: Path, start: int) -> str:
    try:
        return line.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise SelfspecError(f"{path}: not UTF-8 text (byte {start + error.start})") from None


def json_rows(path: Path) -> Iterator[tuple[Line, Any]]:
    """Yield each line of a .jsonl file with its parsed value. Raises `SelfspecError` for invalid JSON."""
    for line in lines(path):
        yield line, json_row(line.text, line.where)


def json_row(text: str, where: str) -> Any:
    """Parse a line of a .jsonl file. Raises `SelfspecError` for invalid JSON."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise SelfspecError(f"{where}: not valid JSON ({getattr(error, 'msg', error)})") from None


def check_unicode(text: str, where: str) -> str:
    """Return the text. Raises `SelfspecError` for unpaired surrogates, which JSON can encode."""
    if not is_unicode(text):
        raise SelfspecError(f"{where}: the text has half a surrogate pair, which is not valid Unicode")
    return text
