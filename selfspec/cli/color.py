"""Text coloured by where its tokens came from, for terminals."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from selfspec.cli.common import stdout
from selfspec.cli.word_wrap import Folding
from selfspec.profile.schema import Profile
from selfspec.show.markup import LOOKS, acceptance
from selfspec.types.events import Origin, TokenEvent, counts
from selfspec.types.stats import Stats

if TYPE_CHECKING:
    from selfspec.llm.stream import Stream

_WIDE = 76  # columns from which the legend says what the origins mean
# What a terminal would act on, as the characters that stand for it; newlines and tabs stay.
_CONTROLS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}

# For terminals of 16 colours, whose nearest to the others would be two alike, and white.
_BASIC = {
    Origin.ACCEPTED_DRAFT: "cyan",
    Origin.ACCEPTED_CANDIDATE: "blue",
    Origin.ACCEPTED_GUESS: "yellow",
    Origin.CORRECTED: "red",
    Origin.BONUS: "magenta",
}


def write(stream: Stream, *, color: bool, fold: bool = False) -> None:
    """Write a stream's text to standard output as it comes; a terminal shows where it came from, with `color`.

    With `fold`, a terminal's lines end between words. The stream ends with this, however it ends; what was held back
    until then is written too.
    """
    console, given = stdout(), 0
    folding = Folding[Origin | None](console.width) if fold and console.is_terminal else None
    pieces = stream.spans() if color and console.is_terminal else ((None, piece) for piece in stream)
    try:
        for origin, text in pieces:
            given += len(text)  # before it is written: should that be interrupted, it is not to be written twice
            for part in [(origin, text)] if folding is None else folding.feed(origin, text):
                _put(console, *part)
    finally:
        stream.close()
        rest = stream.result.text[given:]
        for part in [(None, rest)] if folding is None else [*folding.feed(None, rest), *folding.end()]:
            _put(console, *part)
        _put(console, None, "\n")


def _put(console: Console, origin: Origin | None, text: str) -> None:
    if origin is not None:
        show(console, origin, text)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()


def show(console: Console, origin: Origin, text: str) -> None:
    """Write a piece of text at once, as it is: nothing is wrapped, no markup is read, and no tab becomes spaces."""
    console.print(Segments([Segment(text.translate(_CONTROLS), style(console, origin))]), soft_wrap=True)


def colored(console: Console, events: Sequence[TokenEvent]) -> Text:
    """The whole text, for a table's cell."""
    return Text.assemble(*((event.text.translate(_CONTROLS), style(console, event.origin)) for event in events))


def style(console: Console, origin: Origin) -> Style:
    """How a console shows tokens of an origin."""
    look = LOOKS[origin]
    return Style(
        color=_BASIC.get(origin) if console.color_system == "standard" else look.color,
        bold=look.bold or None,  # False would be written as "not bold"
        italic=look.italic or None,
        underline=look.underline or None,
    )


def legend(console: Console, events: Sequence[TokenEvent], stats: Stats, profile: Profile | None = None) -> None:
    """Print how many tokens came from where, and what was accepted of what was drafted.

    With the profile that drafted, also what ran in few bits.
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
        how = f"; drafts ran with {profile.path.said}"
    console.print(acceptance(stats) + how, highlight=False, soft_wrap=True, markup=False)
