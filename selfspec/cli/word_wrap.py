"""Word wrapping of streamed text to the width of a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Generic, TypeVar

from rich.cells import cell_len

Kind = TypeVar("Kind")
_TAB = 8
# A newline, a gap (spaces), a character of a script without spaces (a word by itself), or letters of a word.
_PARTS = re.compile(r"\n|[^\S\n]+|[\u2e80-\U0010ffff]|[^\s\u2e80-\U0010ffff]+")


class WordWrapper(Generic[Kind]):
    """Word wrapper to `width` columns: the gap before a word that does not fit is replaced by a newline.

    A word is buffered until it is complete, or too long for its line. Each piece of text has a `Kind`, such as its
    colour, and the parts of the piece keep that kind.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._gap: list[tuple[Kind, str]] = []
        self._word: list[tuple[Kind, str]] = []

    def feed(self, kind: Kind, text: str) -> Iterator[tuple[Kind, str]]:
        """Add a piece of text; yield the parts that can be shown now."""
        for part in _PARTS.findall(text):
            if part == "\n":
                yield from self.end()
                yield kind, part
                self._column = 0
            elif part.isspace():
                yield from self._flush_word()
                self._gap.append((kind, part))
            else:
                if part >= "\u2e80":
                    yield from self._flush_word()
                self._word.append((kind, part))
                if part >= "\u2e80" or self._column_after() > self._width:
                    yield from self._flush_word()

    def end(self) -> Iterator[tuple[Kind, str]]:
        """Yield the buffered text, because the line ends."""
        yield from self._flush_word()
        yield from self._gap
        self._gap = []

    def _flush_word(self) -> Iterator[tuple[Kind, str]]:
        """Yield the buffered word, on this line or the next."""
        if not self._word:
            return
        after = self._column_after()
        if after > self._width and self._gap and self._column:
            yield self._word[0][0], "\n"
            self._column, self._gap = 0, []
            after = self._column_after()
        yield from (*self._gap, *self._word)
        self._column, self._gap, self._word = after if after <= self._width else after % self._width, [], []

    def _column_after(self) -> int:
        """Return the column after the buffered gap and word on this line."""
        column = self._column
        for _, text in (*self._gap, *self._word):
            for part in re.split("(\t)", text):
                column += _TAB - column % _TAB if part == "\t" else cell_len(part)
        return column
