"""Text that comes in pieces, its lines folded between words where a terminal ends. Knows nothing of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Generic, TypeVar

from rich.cells import cell_len

Kind = TypeVar("Kind")
_TAB = 8
# A line's end, a gap, a sign of a script that has none (a word of its own), or a part of a word.
_PARTS = re.compile(r"\n|[^\S\n]+|[\u2e80-\U0010ffff]|[^\s\u2e80-\U0010ffff]+")


class Folding(Generic[Kind]):
    """Folds text to `width` columns: where a word does not fit, a line's end takes the place of the gap before it.

    A word is held back until it is complete, or too long for its line. Each piece is of some `Kind`, which stays with
    what comes of it.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._gap: list[tuple[Kind, str]] = []
        self._word: list[tuple[Kind, str]] = []

    def feed(self, kind: Kind, text: str) -> Iterator[tuple[Kind, str]]:
        """What may be shown now that this piece has come."""
        for part in _PARTS.findall(text):
            if part == "\n":
                yield from self.end()
                yield kind, part
                self._column = 0
            elif part.isspace():
                yield from self._settle()
                self._gap.append((kind, part))
            else:
                if part >= "\u2e80":
                    yield from self._settle()
                self._word.append((kind, part))
                if part >= "\u2e80" or self._after() > self._width:
                    yield from self._settle()

    def end(self) -> Iterator[tuple[Kind, str]]:
        """What was held back, as no more comes on this line."""
        yield from self._settle()
        yield from self._gap
        self._gap = []

    def _settle(self) -> Iterator[tuple[Kind, str]]:
        """The word that was held back, on this line or the next."""
        if not self._word:
            return
        after = self._after()
        if after > self._width and self._gap and self._column:
            yield self._word[0][0], "\n"
            self._column, self._gap = 0, []
            after = self._after()
        yield from (*self._gap, *self._word)
        self._column, self._gap, self._word = after if after <= self._width else after % self._width, [], []

    def _after(self) -> int:
        """The column after the gap and the word, on this line."""
        column = self._column
        for _, text in (*self._gap, *self._word):
            for part in re.split("(\t)", text):
                column += _TAB - column % _TAB if part == "\t" else cell_len(part)
        return column
