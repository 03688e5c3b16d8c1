"""Styles of tokens by their origin (drafted, corrected, ..), and generations as HTML. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from selfspec.types.draft_work import DRAFT_PATH
from selfspec.types.events import Origin, Rejected, TokenEvent, counts
from selfspec.types.stats import Stats


@dataclass(frozen=True, slots=True)
class Look:
    """The style of tokens of one origin: a colour and a font style that distinguishes the origin without colour.

    `color`: a colour-blind-safe colour `#rrggbb` of Okabe and Ito (2008); None: no colour.
    """

    color: str | None = None
    bold: bool = False
    italic: bool = False
    underline: bool = False

    @property
    def css(self) -> str:
        """The inline CSS style; the colour becomes a transparent background, so that the text stays readable."""
        style = []
        if self.color is not None:
            red, green, blue = (int(self.color[i : i + 2], 16) for i in (1, 3, 5))
            style.append(f"background-color:rgba({red},{green},{blue},0.3)")
        if self.bold:
            style.append("font-weight:bold")
        if self.italic:
            style.append("font-style:italic")
        if self.underline:
            style.append("text-decoration:underline")
        return ";".join(style)


LOOKS = {
    Origin.PLAIN: Look(),
    Origin.ACCEPTED_DRAFT: Look("#009e73", italic=True),
    Origin.ACCEPTED_CANDIDATE: Look("#0072b2", underline=True),
    Origin.ACCEPTED_LOOKUP: Look("#56b4e9", italic=True, underline=True),
    Origin.CORRECTED: Look("#d55e00", bold=True),
    Origin.BONUS: Look("#cc79a7", bold=True, italic=True),
}


def tokens_html(events: Sequence[TokenEvent]) -> str:
    """Return the text of a generation as HTML; each token is coloured by origin and has its details as a tooltip."""
    shown = (event for event in events if event.text)
    return (
        '<div style="font-family:monospace;line-height:1.5;white-space:pre-wrap;overflow-wrap:anywhere">'
        + "".join(_span(event.text, LOOKS[event.origin], _title(event)) for event in shown)
        + "</div>"
    )


def legend_html(events: Sequence[TokenEvent], stats: Stats | None = None) -> str:
    """Return the token counts by origin as one line of HTML; with `stats`, also the acceptance rate."""
    parts = [
        f"{_span(origin, LOOKS[origin], origin.meaning)} {number} ({number / len(events):.0%})"
        for origin, number in counts(events).items()
    ]
    if stats is not None:
        parts.append(escape(acceptance(stats)))
    return f'<div style="font-size:smaller;margin-top:0.5em">{" &middot; ".join(parts)}</div>'


def acceptance(stats: Stats) -> str:
    """Return the acceptance rate and its counts as text, with accepted tokens by source if lookups proposed some."""
    if not stats.drafted:
        return "nothing was drafted"
    return f"acceptance {stats.acceptance_rate:.0%} ({stats.accepted} of {stats.drafted} drafted{by_source(stats)})"


def by_source(stats: Stats) -> str:
    """Return the accepted tokens by source as a suffix `: source n, ..`; empty without a source but the draft path."""
    if set(stats.sources) <= {DRAFT_PATH}:
        return ""
    return ": " + ", ".join(f"{source} {tokens}" for source, tokens in stats.sources.most_common())


def _title(event: TokenEvent) -> str:
    """Return the details of a token (origin, round, source, confidence, ..) in one line, for its tooltip."""
    parts = [str(event.origin), f"round {event.round}"]
    if event.place is not None:
        parts.append(f"position {event.place} in the draft")
    if event.source is not None:
        parts.append(f"from: {event.source}")
    if event.confidence is not None:
        parts.append(f"the draft's confidence {event.confidence:.3f}")
    if event.probability is not None:
        parts.append(f"the model's probability {event.probability:.3f}")
    if event.rejected:
        parts.append(f"rejected: {', '.join(map(_quoted, event.rejected))}")
    return "; ".join(parts)


def _quoted(rejected: Rejected) -> str:
    quoted = json.dumps(rejected.text, ensure_ascii=False)
    return quoted if rejected.confidence is None else f"{quoted} ({rejected.confidence:.3f})"


def _span(text: str, look: Look, title: str) -> str:
    style = f' style="{look.css}"' if look.css else ""
    return f'<span{style} title="{_escaped(title)}">{_escaped(text)}</span>'


def _escaped(text: str) -> str:
    """Return the text escaped for HTML.

    Carriage returns are escaped, as browsers would change them; NUL, which HTML cannot hold, is replaced by U+FFFD.
    """
    return escape(text).replace("\r", "&#13;").replace("\0", "\ufffd")
