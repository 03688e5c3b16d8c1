"""Traces: what a drafter would have proposed at every place of a text, and what any controller would make of it.

Pure Python: knows nothing of models and tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from selfspec.controllers import Controller, DraftLoop
from selfspec.types.draft_work import GUESSED, Work, passes_of, steps_of
from selfspec.types.limits import WIDEST_DRAFT
from selfspec.types.stats import Stats


@dataclass(frozen=True, slots=True)
class Trace:
    """What a drafter proposes at each place of one text of `tokens` new tokens, of which `room` were allowed.

    Start i is the place where i of the text's tokens are emitted; it may emit `room` - i more. A trace may hold the
    first starts only; a walk then ends where they end.
    `confidences[i]` are those of the tokens drafted from start i; the first `runs[i]` of them are the text's own.
    `ranks[i]`: which candidate for the place after those is the text's token (1 for the second; the drafted token,
    the first, is not; 0: none of them). `unfinished[i]`: the draft ended because no controller in play would have gone
    on, not because it had to. `drafted[i]`: the tokens drafted from start i. `passes[i]`: the passes that draft them
    where guesses spare some, by the token each begins with and how many go through it; left out, one for each token.
    `free[i]`: the chances of the tokens that may be taken as guessed, and how many of them are the text's own.
    """

    tokens: int
    room: int
    confidences: Sequence[Sequence[float]]
    runs: Sequence[int]
    ranks: Sequence[int]
    unfinished: Sequence[bool]
    drafted: Sequence[Sequence[int]] = ()
    passes: Sequence[Sequence[tuple[int, int]]] = ()
    free: Sequence[tuple[Sequence[float], int]] = ()

    def then(self, later: Trace) -> Trace:
        """This trace lengthened by that of the starts after it."""
        parts = ("confidences", "runs", "ranks", "unfinished", "drafted", "passes", "free")
        joined = ([*getattr(self, part), *getattr(later, part)] or () for part in parts)
        return Trace(self.tokens, self.room, *joined)

    def work(self, start: int, drafted: int) -> Work:
        """What drafting so many tokens from a start takes."""
        return passes_of(w for i, w in self.passes[start] if i < drafted) if self.passes else steps_of(drafted)


@dataclass(slots=True)
class Walk:
    """What decoding one text takes: counts, and how many rounds drafted with this work and verified so many rows."""

    stats: Stats = field(default_factory=Stats)
    rounds: Counter[tuple[Work, int]] = field(default_factory=Counter)


class WalkStep(NamedTuple):
    """One round of a walk: the confidences of what was drafted, and how many of these tokens were the text's own.

    `candidates`: how many tokens were verified at all places together, the drafted ones counted; `other`: whether
    another candidate was right where the drafted token was not. `emitted`: tokens. `work`: what drafting took.
    """

    confidences: Sequence[float]
    kept: int
    candidates: int
    other: bool
    emitted: int
    work: Work


def walk(traces: Iterable[Trace], controller: Controller, *, candidates: int = 1, seeded: bool = False) -> list[Walk]:
    """Decode the texts on their traces, in order: the rounds that real decoding would have, without decoding.

    `candidates`: for each place at most, the drafted token counted. `seeded`: the controller starts anew with each
    text. `controller` itself is left as it is. Raises `ValueError` where a trace's drafts end before the controller's.
    """
    state = controller.start()
    walks = []
    for trace in traces:
        state = state.start() if seeded else state
        walks.append(_walk(trace, state, candidates))
    return walks


def _walk(trace: Trace, controller: Controller, most: int) -> Walk:
    done = Walk()
    stats = done.stats
    for confidences, kept, candidates, other, emitted, work in steps(trace, controller, candidates=most):
        drafted = len(confidences) or candidates
        done.rounds[work, 1 + candidates] += 1
        stats.rounds += 1
        stats.drafted += drafted
        stats.nodes += candidates
        stats.accepted += min(kept + other, emitted)
        stats.tokens += emitted
    return done


def steps(trace: Trace, controller: Controller, *, candidates: int = 1) -> Iterator[WalkStep]:
    """The rounds of decoding one text, in order; `controller` has observed each when it is given out."""
    start, deepest = 0, WIDEST_DRAFT // candidates
    while start < len(trace.runs):
        if guessed := _guessed(trace, start, controller):
            yield guessed
            start += guessed.emitted
            continue
        play = _played(trace, start, controller, deepest)
        counts, run = play.candidates(candidates, nodes=WIDEST_DRAFT), trace.runs[start]
        drafted, verified = len(counts), sum(counts)
        other = run < drafted and 1 <= trace.ranks[start] < counts[run]
        kept = min(run, drafted)
        emitted = min(kept + other + 1, trace.tokens - start)
        controller.observe(play.confidences, kept, candidates=verified, other=other)
        yield WalkStep(play.confidences, kept, verified, other, emitted, trace.work(start, drafted))
        start += emitted


def _guessed(trace: Trace, start: int, controller: Controller) -> WalkStep | None:
    """The round from `start` where the controller takes a guess as it is."""
    chances, run = trace.free[start] if trace.free else ((), 0)
    taken = controller.free(chances)
    if not taken:
        return None
    kept = min(run, taken)
    return WalkStep((), kept, taken, False, min(kept + 1, trace.tokens - start), GUESSED)


def _played(trace: Trace, start: int, controller: Controller, deepest: int) -> DraftLoop:
    """The draft from `start` as `controller` plays it."""
    play = DraftLoop(controller, depth=min(trace.room - start - 1, deepest))
    for confidence in trace.confidences[start]:
        if not play.wants:
            return play
        play.see(confidence)
    if play.wants and trace.unfinished[start]:
        raise ValueError("the trace is too short for this controller; replay with it in play")
    return play
