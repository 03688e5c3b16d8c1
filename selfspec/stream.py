"""A generation under way, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from selfspec.drafts import Outcome
from selfspec.stats import Round, Stats
from selfspec.text import TextStream


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished (or interrupted) generation: the new text, the new token ids, and what they cost."""

    text: str
    tokens: list[int]
    stats: Stats


class Stream:
    """A generation under way: iterate over its pieces of text; `result` is the `Generation` so far.

    `close()` ends it early and frees the model; leaving the iteration and dropping the stream does so too. Without
    `pieces` all text comes at the end, for less work.
    """

    def __init__(self, rounds: Generator[Outcome], text: TextStream, *, pieces: bool = True) -> None:
        self._text = text
        self._tokens: list[int] = []
        self._stats = Stats()
        # The generator knows nothing of this object, so that dropping the stream ends it at once.
        self._pieces = _pieces(rounds, text, self._tokens, self._stats, pieces)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def result(self) -> Generation:
        """Text, tokens and stats so far; final once the iteration has ended."""
        return Generation(self._text.text, list(self._tokens), self._stats)

    def close(self) -> None:
        """End the generation now; what was emitted stays in `result`."""
        self._pieces.close()


def _pieces(
    rounds: Generator[Outcome], text: TextStream, tokens: list[int], stats: Stats, pieces: bool
) -> Generator[str]:
    """Pieces of text as the rounds bring them; `tokens` and `stats` are filled along the way."""
    start = time.perf_counter()
    try:
        for outcome in rounds:
            seconds = time.perf_counter() - start
            depth, nodes = outcome.draft.depth, len(outcome.draft)
            done = Round(depth, outcome.accepted, len(outcome.tokens), seconds, nodes - depth)
            stats.log.append(done)
            stats.rounds += 1
            stats.drafted += done.drafted
            stats.nodes += nodes
            stats.accepted += done.accepted
            stats.tokens += done.tokens
            stats.seconds += seconds
            tokens += outcome.tokens
            if pieces and (piece := text.take()):
                yield piece
            start = time.perf_counter()  # what the reader does in between is not ours
    finally:
        rounds.close()
        text.finish()
    if piece := text.take():
        yield piece
