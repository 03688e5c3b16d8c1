"""A stream of generated text, and the finished generation with its statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
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
    """A finished (or interrupted) generation: the new text, the new token ids (`tokens`), and the statistics.

    A notebook shows the text with each token coloured by its origin.
    """

    text: str
    tokens: list[int]
    stats: Stats
    _source: TextStream = field(repr=False, compare=False)

    @property
    def finish(self) -> Finish | None:
        """The reason why the text ended; None for an interrupted generation."""
        return self.stats.finish

    @cached_property
    def events(self) -> tuple[TokenEvent, ...]:
        """The event of each new token: its text, its origin and its round. Computed on first access.

        The texts of all events, joined, equal `text`.
        """
        texts = self._source.texts(len(self.tokens), self.text)
        return token_events(self.tokens, texts, self.stats.log, self._source.text_of)

    def _repr_html_(self) -> str:
        return tokens_html(self.events) + legend_html(self.events, self.stats)


class Stream:
    """A running generation, an iterator over its pieces of text; `result` is the `Generation` so far.

    `close()` ends the generation early and frees the model, as does dropping the last reference to the stream.

    `rounds`: the outcomes of decoding `seq`, whose tokens are pushed to the detokeniser `text`. Without `pieces`, the
    stream yields all text at the end, which is less work. With `probabilities`, the generation's events include the
    target's probabilities. `guided`: an end token means that the guide's grammar is complete; the finish reason is then
    "guide", not "end". `ended`: called with the text when the stream ends for any reason, if it emitted a token.
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
        stop_tokens: Collection[int] = (),
        ended: Callable[[str], None] | None = None,
    ) -> None:
        self._text = text
        self._tokens: list[int] = []
        self._stats = Stats(prompt=len(seq.tokens))
        # The generator does not reference this object, so that dropping the stream ends the generator at once.
        finish = finish_of(seq, text, self._tokens, guided=guided, stop_tokens=stop_tokens)
        shown = _pieces(rounds, seq, text, self._tokens, self._stats, pieces, probabilities, finish)
        self._pieces = shown if ended is None else _call_when_ended(shown, seq, text, ended)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def spans(self) -> Iterator[tuple[Origin, str]]:
        """Yield pairs of origin and text: the pieces of text split at token boundaries, with each token's origin.

        Closing this iterator ends the generation.
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
        """The text, tokens and statistics so far; they are final once the iteration has ended."""
        return Generation(self._text.text, list(self._tokens), self._stats, self._text)

    def wait(self) -> Generation:
        """Run the generation to its end and return it."""
        for _ in self:
            pass
        return self.result

    def close(self) -> None:
        """End the generation now; emitted tokens stay in `result`."""
        self._pieces.close()


class Spans:
    """Splitter of a stream's pieces of text at token boundaries, which pairs each part with its token's origin.

    `stats`: the statistics of the stream, whose rounds tell the origins.
    """

    def __init__(self, text: TextStream, stats: Stats) -> None:
        self._text, self._stats = text, stats
        self._origins: list[Origin] = []
        self._rounds = self._token = self._shown = 0

    def split(self, piece: str) -> Iterator[tuple[Origin, str]]:
        """Yield the parts of the stream's next piece, each with its token's origin."""
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
    seq: SequenceState,
    text: TextStream,
    tokens: Sequence[int],
    *,
    guided: bool,
    stop_tokens: Collection[int] = (),
) -> Callable[[], Finish | None]:
    """Return a function that returns the finish reason of a new sequence, or None until the sequence has ended.

    `text`: the sequence's detokeniser. `tokens`: the list to which the sequence's new tokens are appended. `guided`:
    report an end token as "guide", not as "end". `stop_tokens`: tokens that are reported as "stop".
    """
    limit = seq.remaining

    def finish() -> Finish | None:
        if seq.remaining:
            return None
        if text.stopped or (tokens and tokens[-1] in stop_tokens):
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
    """Add a round that took `seconds` to the statistics, and return its record.

    With `probabilities`, the record includes the target's probability of each emitted token.
    """
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
    """Yield pieces of text round by round (without `pieces`: all text at the end), and fill `tokens` and `stats`.

    `finish`: returns the finish reason, None before the end.
    """
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
