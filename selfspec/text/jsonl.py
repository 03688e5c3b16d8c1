"""Lines of text files and of JSON lines files, with errors that name the line."""

from __future__ import annotations

from array import array
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from operator import eq
from pathlib import Path
from typing import Any, BinaryIO, overload

from selfspec.basics.errors import SelfspecError
from selfspec.basics.files import check_file, parse_json
from selfspec.text.prompt import Prompt, is_chat, is_unicode, token_ids


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
