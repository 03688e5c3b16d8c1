"""A stream of generated text, and the finished generation with its statistics."""

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
    """A finished (or interrupted) generation: the new text, the new token ids, and their statistics.

    In a notebook the text is shown coloured by `events`.
    """

    text: str
    tokens: list[int]
    stats: Stats
    _source: TextStream = field(repr=False, compare=False)

    @property
    def finish(self) -> Finish | None:
        """Why the text ended; None for an interrupted generation."""
        return self.stats.finish

    @cached_property
    def events(self) -> tuple[TokenEvent, ...]:
        """The origin of each token, computed on first access; the events' texts, joined, equal `text`."""
        texts = self._source.texts(len(self.tokens), self.text)
        return token_events(self.tokens, texts, self.stats.log, self._source.text_of)

    def _repr_html_(self) -> str:
        return tokens_html(self.events) + legend_html(self.events, self.stats)


class Stream:
    """A running generation: iterate over its pieces of text; `result` is the `Generation` so far.

    `close()` ends it early and frees the model; leaving the iteration and dropping the stream does so too. Without
    `pieces` all text comes at the end, which is less work. With `probabilities` the events include the target's
    probabilities. `ended` is called with the text when the stream ends for any reason, if it emitted a token.
    `guided`: an end token means that a guide is complete.
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
        # The generator does not reference this object, so that dropping the stream ends the generator at once.
        finish = finish_of(seq, text, self._tokens, guided=guided)
        shown = _pieces(rounds, seq, text, self._tokens, self._stats, pieces, probabilities, finish)
        self._pieces = shown if ended is None else _call_when_ended(shown, seq, text, ended)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def spans(self) -> Iterator[tuple[Origin, str]]:
        """Iterate over the pieces of text, split at token boundaries, each with its token's origin.

        Leaving the iteration ends the generation.
        """
        try:
            yield from self._spans()
        finally:
            self.close()

    def _spans(self) -> Iterator[tuple[Origin, str]]:
        spans = Spans(self._text, self._stats)
        for piece in self:
            yield from spans.split(piece)

    @property
    def result(self) -> Generation:
        """Text, tokens and stats so far; final once the iteration has ended."""
        return Generation(self._text.text, list(self._tokens), self._stats, self._text)

    def close(self) -> None:
        """End the generation now; emitted tokens stay in `result`."""
        self._pieces.close()


class Spans:
    """Splitter of a stream's pieces at token boundaries, which labels each part with its token's origin."""

    def __init__(self, text: TextStream, stats: Stats) -> None:
        self._text, self._stats = text, stats
        self._origins: list[Origin] = []
        self._rounds = self._token = self._shown = 0

    def split(self, piece: str) -> Iterator[tuple[Origin, str]]:
        """Yield the parts of the next piece, each with its token's origin."""
        log, ends, token_origins = self._stats.log, self._text.ends, self._origins
        token_origins += (origin for done in log[self._rounds :] for origin in origins(done))
        self._rounds, start, end = len(log), self._shown, self._shown + len(piece)
        while self._shown < end:
            while self._token < len(token_origins) - 1 and ends[self._token] <= self._shown:
                self._token += 1
            upto = end if self._token == len(token_origins) - 1 else min(ends[self._token], end)
            yield token_origins[self._token], piece[self._shown - start : upto - start]
            self._shown = upto


def finish_of(
    seq: SequenceState, text: TextStream, tokens: Sequence[int], *, guided: bool
) -> Callable[[], Finish | None]:
    """Return a function that gives the finish reason of a new sequence, None until it ends.

    `tokens`: the list to which its new tokens are appended.
    """
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


def _call_when_ended(
    pieces: Generator[str], seq: SequenceState, text: TextStream, ended: Callable[[str], None]
) -> Generator[str]:
    """Yield the pieces, then call `ended` with the text if the sequence emitted a token."""
    before = len(seq.tokens)
    try:
        yield from pieces
    finally:
        pieces.close()
        if len(seq.tokens) > before:
            ended(text.text)


def count_round(stats: Stats, outcome: Outcome, seconds: float, *, probabilities: bool = False) -> Round:
    """Add a round of `seconds` to the statistics; with `probabilities`, record the target's for each token."""
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
    """Yield pieces of text round by round, filling `tokens` and `stats`."""
    start = time.perf_counter()
    try:
        for outcome in rounds:
            count_round(stats, outcome, time.perf_counter() - start, probabilities=probabilities)
            stats.num_cached = seq.num_cached
            tokens += outcome.tokens
            stats.finish = finish()
            if pieces and (piece := text.take()):
                yield piece
            start = time.perf_counter()  # exclude the time that the consumer takes
    finally:
        rounds.close()
        text.finish()
    if piece := text.take():
        yield piece
