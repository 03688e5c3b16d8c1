"""A generation under way, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from selfspec.show.markup import legend_html, tokens_html
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.sequence import SequenceState
from selfspec.text.detokenizer import TextStream
from selfspec.types.events import Origin, TokenEvent, origins, token_events
from selfspec.types.stats import Finish, Round, Stats


@dataclass(frozen=True)
class Generation:
    """A finished (or interrupted) generation: the new text, the new token ids, and what they cost.

    In a notebook it shows its text coloured by `events`.
    """

    text: str
    tokens: list[int]
    stats: Stats
    _source: TextStream = field(repr=False, compare=False)

    @property
    def finish(self) -> Finish | None:
        """Why the text ended; None where it was broken off."""
        return self.stats.finish

    @cached_property
    def events(self) -> tuple[TokenEvent, ...]:
        """Where each token came from, made when first asked for; the texts of all, joined, are `text`."""
        texts = self._source.texts(len(self.tokens), self.text)
        return token_events(self.tokens, texts, self.stats.log, self._source.text_of)

    def _repr_html_(self) -> str:
        return tokens_html(self.events) + legend_html(self.events, self.stats)


class Stream:
    """A generation under way: iterate over its pieces of text; `result` is the `Generation` so far.

    `close()` ends it early and frees the model; leaving the iteration and dropping the stream does so too. Without
    `pieces` all text comes at the end, for less work. With `probabilities` the events hold the model's own. `ended` is
    told the text when it is over, however it ends, if there is a token at all. `guided`: it ends where a guide is
    complete.
    """

    def __init__(
        self,
        rounds: Generator[Outcome],
        seq: SequenceState,
        text: TextStream,
        *,
        pieces: bool = True,
        probabilities: bool = False,
        guided: bool = False,
        ended: Callable[[str], None] | None = None,
    ) -> None:
        self._text = text
        self._tokens: list[int] = []
        self._stats = Stats(prompt=len(seq.tokens))
        # The generator knows nothing of this object, so that dropping the stream ends it at once.
        finish = finish_of(seq, text, self._tokens, guided=guided)
        shown = _pieces(rounds, seq, text, self._tokens, self._stats, pieces, probabilities, finish)
        self._pieces = shown if ended is None else _told(shown, seq, text, ended)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def spans(self) -> Iterator[tuple[Origin, str]]:
        """Iterate over the pieces of text as they come, cut where the tokens meet, each with its token's origin.

        Leaving the iteration ends the generation.
        """
        try:
            yield from self._spans()
        finally:
            self.close()

    def _spans(self) -> Iterator[tuple[Origin, str]]:
        spans = Spans(self._text, self._stats)
        for piece in self:
            yield from spans.of(piece)

    @property
    def result(self) -> Generation:
        """Text, tokens and stats so far; final once the iteration has ended."""
        return Generation(self._text.text, list(self._tokens), self._stats, self._text)

    def close(self) -> None:
        """End the generation now; what was emitted stays in `result`."""
        self._pieces.close()


class Spans:
    """Cuts pieces of a text, as they come, where the tokens meet, each with its token's origin."""

    def __init__(self, text: TextStream, stats: Stats) -> None:
        self._text, self._stats = text, stats
        self._found: list[Origin] = []
        self._rounds = self._token = self._shown = 0

    def of(self, piece: str) -> Iterator[tuple[Origin, str]]:
        """The next piece, cut."""
        log, ends, found = self._stats.log, self._text.ends, self._found
        found += (origin for done in log[self._rounds :] for origin in origins(done))
        self._rounds, start, end = len(log), self._shown, self._shown + len(piece)
        while self._shown < end:
            while self._token < len(found) - 1 and ends[self._token] <= self._shown:
                self._token += 1
            upto = end if self._token == len(found) - 1 else min(ends[self._token], end)
            yield found[self._token], piece[self._shown - start : upto - start]
            self._shown = upto


def finish_of(
    seq: SequenceState, text: TextStream, tokens: Sequence[int], *, guided: bool
) -> Callable[[], Finish | None]:
    """Says why a sequence that begins now, and of which these `tokens` come, has ended; None while it has not."""
    limit = seq.remaining

    def finish() -> Finish | None:
        if seq.remaining:
            return None
        if text.stopped:
            return "stop"
        if tokens and tokens[-1] in seq.ends:
            return "guide" if guided else "end"
        return "length" if len(tokens) >= limit else "time"

    return finish


def _told(pieces: Generator[str], seq: SequenceState, text: TextStream, ended: Callable[[str], None]) -> Generator[str]:
    """The pieces; once they are over, `ended` is told the text, if a token came."""
    before = len(seq.tokens)
    try:
        yield from pieces
    finally:
        pieces.close()
        if len(seq.tokens) > before:
            ended(text.text)


def count_round(stats: Stats, outcome: Outcome, seconds: float, *, probabilities: bool = False) -> Round:
    """Count a round that took so long; with `probabilities` its record holds the model's own of each token."""
    draft = outcome.draft
    done = Round(
        draft.depth,
        outcome.accepted,
        len(outcome.tokens),
        seconds,
        len(draft),
        draft.tokens,
        draft.parents,
        draft.confidence,
        outcome.path,
        outcome.probabilities() if probabilities else (),
        draft.work,
        draft.sources,
    )
    stats.log.append(done)
    stats.rounds += 1
    stats.drafted += done.drafted
    stats.nodes += done.nodes
    stats.accepted += done.accepted
    stats.tokens += done.tokens
    stats.seconds += seconds
    for part, calls in draft.work:
        stats.work[part] += calls
    if draft.sources:
        stats.sources.update(draft.sources[node] for node in outcome.path[: done.accepted])
    return done


def _pieces(
    rounds: Generator[Outcome],
    seq: SequenceState,
    text: TextStream,
    tokens: list[int],
    stats: Stats,
    pieces: bool,
    probabilities: bool,
    finish: Callable[[], Finish | None],
) -> Generator[str]:
    """Pieces of text as the rounds bring them; `tokens` and `stats` are filled along the way."""
    start = time.perf_counter()
    try:
        for outcome in rounds:
            count_round(stats, outcome, time.perf_counter() - start, probabilities=probabilities)
            stats.kept = seq.num_cached
            tokens += outcome.tokens
            stats.finish = finish()
            if pieces and (piece := text.take()):
                yield piece
            start = time.perf_counter()  # what the reader does in between is not ours
    finally:
        rounds.close()
        text.finish()
    if piece := text.take():
        yield piece
