"""Traces: what a drafter would have proposed at every place of a text, and what any controller would make of it.

Pure Python: knows nothing of models and tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from selfspec.controllers import Controller
from selfspec.facts.limits import WIDEST_DRAFT
from selfspec.facts.stats import Stats
from selfspec.facts.work import Work, steps_of


@dataclass(frozen=True, slots=True)
class Trace:
    """Drafts from the starts of one text: start i has emitted i of its `tokens` new tokens and may emit `room` - i.

    The first of its starts are there, perhaps not all: a walk ends where they end.
    `confidences[i]` are those of the tokens drafted from start i; the first `runs[i]` of them are the text's own.
    `ranks[i]`: which candidate the text's next token was where the first drafted token was not (0: none of them).
    `unfinished[i]`: the draft ended because no controller in play would have gone on, not because it had to.
    """

    tokens: int
    room: int
    confidences: Sequence[Sequence[float]]
    runs: Sequence[int]
    ranks: Sequence[int]
    unfinished: Sequence[bool]

    def then(self, later: Trace) -> Trace:
        """This trace lengthened by that of the starts after it."""
        parts = ("confidences", "runs", "ranks", "unfinished")
        joined = ([*getattr(self, part), *getattr(later, part)] for part in parts)
        return Trace(self.tokens, self.room, *joined)


@dataclass(slots=True)
class Walk:
    """What decoding one text takes: counts, and how many rounds drafted with this work and verified so many rows."""

    stats: Stats = field(default_factory=Stats)
    rounds: Counter[tuple[Work, int]] = field(default_factory=Counter)


class Step(NamedTuple):
    """One round of a walk: the confidences of what was drafted, and how many of these tokens were the text's own.

    `candidates` stood beside them; `leaf`: one of those was right where the chain broke. `emitted`: tokens.
    """

    confidences: Sequence[float]
    kept: int
    candidates: int
    leaf: bool
    emitted: int


def walk(traces: Iterable[Trace], controller: Controller, *, siblings: int = 1, seeded: bool = False) -> list[Walk]:
    """Decode the texts on their traces, in order: the rounds that real decoding would have, without decoding.

    `siblings`: candidates for each position at most, the drafted token counted. `seeded`: the controller starts afresh
    with each text. `controller` itself is left as it is. Raises `ValueError` when the trace ends before the controller.
    """
    state = controller.fresh()
    walks = []
    for trace in traces:
        state = state.fresh() if seeded else state
        walks.append(_walk(trace, state, siblings))
    return walks


def _walk(trace: Trace, controller: Controller, siblings: int) -> Walk:
    done = Walk()
    stats = done.stats
    for confidences, kept, candidates, leaf, emitted in steps(trace, controller, siblings=siblings):
        drafted = len(confidences)
        done.rounds[steps_of(drafted), 1 + drafted + candidates] += 1
        stats.rounds += 1
        stats.drafted += drafted
        stats.nodes += drafted + candidates
        stats.accepted += min(kept + leaf, emitted)
        stats.tokens += emitted
    return done


def steps(trace: Trace, controller: Controller, *, siblings: int = 1) -> Iterator[Step]:
    """The rounds of decoding one text, in order; `controller` has observed each when it is given out."""
    start, deepest = 0, WIDEST_DRAFT // siblings
    while start < len(trace.runs):
        confidences = _drafted(trace, start, controller, deepest)
        drafted, run = len(confidences), trace.runs[start]
        beside = controller.beside(confidences, siblings - 1) if siblings > 1 and drafted else [0] * drafted
        leaf = run < drafted and 1 <= trace.ranks[start] <= beside[run]
        kept, candidates = min(run, drafted), sum(beside)
        emitted = min(kept + leaf + 1, trace.tokens - start)
        controller.observe(confidences, kept, candidates=candidates, leaf=leaf)
        yield Step(confidences, kept, candidates, leaf, emitted)
        start += emitted


def _drafted(trace: Trace, start: int, controller: Controller, deepest: int) -> Sequence[float]:
    """Confidences of the tokens that `controller` has drafted from `start`."""
    confidences = trace.confidences[start]
    limit = min(len(confidences), deepest)
    for drafted in range(1, limit + 1):
        if not controller.go_on(confidences[:drafted]):
            return confidences[:drafted]
    if limit < deepest and trace.unfinished[start]:
        raise ValueError("the trace is too short for this controller; replay with it in play")
    return confidences[:limit]
