"""Terminal text coloured by the origins of its tokens, and word wrapping of streamed text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from selfspec.basics.errors import as_signs
from selfspec.cli.common import stdout
from selfspec.profile.schema import Profile
from selfspec.show.markup import LOOKS, acceptance
from selfspec.types.events import Origin, TokenEvent, counts
from selfspec.types.stats import Stats

if TYPE_CHECKING:
    from selfspec.llm.stream import Stream


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


_WIDE = 76  # minimum width of a console, in columns, for a legend that explains the origins

# Colours for terminals of 16 colours: the nearest ones to the colours of `LOOKS` include white, and one colour twice.
_BASIC = {
    Origin.ACCEPTED_DRAFT: "cyan",
    Origin.ACCEPTED_CANDIDATE: "blue",
    Origin.ACCEPTED_LOOKUP: "yellow",
    Origin.CORRECTED: "red",
    Origin.BONUS: "magenta",
}


def write(stream: Stream, *, color: bool, fold: bool = False) -> None:
    """Write a stream's text to standard output as it arrives; with `color`, a terminal shows the tokens' origins.

    With `fold`, lines are wrapped between words on a terminal. The stream is closed even after an error or an
    interrupt, and text that was buffered until then is still written.
    """
    console, num_written = stdout(), 0
    wrapper = WordWrapper[Origin | None](console.width) if fold and console.is_terminal else None
    pieces = stream.spans() if color and console.is_terminal else ((None, piece) for piece in stream)
    try:
        for origin, text in pieces:
            num_written += len(text)  # counted before writing, so that an interrupt does not write it twice
            for part in [(origin, text)] if wrapper is None else wrapper.feed(origin, text):
                _put(console, *part)
    finally:
        stream.close()
        rest = stream.result.text[num_written:]
        for part in [(None, rest)] if wrapper is None else [*wrapper.feed(None, rest), *wrapper.end()]:
            _put(console, *part)
        _put(console, None, "\n")


def _put(console: Console, origin: Origin | None, text: str) -> None:
    if origin is not None:
        show(console, origin, text)
    else:
        sys.stdout.write(as_signs(text) if console.is_terminal else text)
        sys.stdout.flush()


def show(console: Console, origin: Origin, text: str) -> None:
    """Write a piece of text verbatim: without wrapping, markup or tab expansion."""
    console.print(Segments([Segment(as_signs(text), style(console, origin))]), soft_wrap=True)


def colored(console: Console, events: Sequence[TokenEvent]) -> Text:
    """Return the text of all events, coloured by their origins, for a table's cell."""
    return Text.assemble(*((as_signs(event.text), style(console, event.origin)) for event in events))


def style(console: Console, origin: Origin) -> Style:
    """Return the style of an origin's tokens on a console."""
    look = LOOKS[origin]
    return Style(
        color=_BASIC.get(origin) if console.color_system == "standard" else look.color,
        bold=look.bold or None,  # False would be written as "not bold"
        italic=look.italic or None,
        underline=look.underline or None,
    )


def legend(console: Console, events: Sequence[TokenEvent], stats: Stats, profile: Profile | None = None) -> None:
    """Print the number of tokens of each origin, and the acceptance of the drafts.

    With the `profile` that drafted, also print which of its sub-layers run quantised.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column(justify="right")
    for origin, number in counts(events).items():
        meaning = [origin.meaning] if console.width >= _WIDE else []
        table.add_row(Text(origin, style(console, origin)), f"{number}", f"{number / len(events):.0%}", *meaning)
    if events:
        console.print(table)
    how = ""
    if stats.drafted and profile is not None and profile.path.low_precision:
        how = f"; drafts ran with {profile.path.summary}"
    console.print(acceptance(stats) + how, highlight=False, soft_wrap=True, markup=False)
