"""Traces: the draft from every start of a text, and the rounds that any controller would make of them.

Pure Python, without tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from selfspec.controllers import Controller, DraftLoop
from selfspec.types.draft_work import LOOKUP_WORK, Work, passes_of, steps_of
from selfspec.types.limits import WIDEST_DRAFT
from selfspec.types.stats import Stats


@dataclass(frozen=True, slots=True)
class Trace:
    """The draft from every start in one text of `tokens` new tokens, of which `remaining` were allowed.

    Start i is the position after i emitted tokens of the text; `remaining` - i more may be emitted from it. A trace may
    hold the first starts only; a walk then ends with them. `confidences[i]` are those of the tokens drafted from start
    i; the first `runs[i]` of them match the text. `ranks[i]`: which candidate for the position after those is the
    text's token (1: the second one; 0: none of them; the drafted token, the first candidate, does not match).
    `unfinished[i]`: the draft ended because no controller in play would have gone on, not because it had to.
    `drafted[i]`: the tokens drafted from start i. `passes[i]`: the draft passes from start i where lookup tokens spare
    some, each as its first token's index and its number of tokens; empty: one pass for each token. `free[i]`: the
    chances of lookup tokens that may be verified without a draft step, and how many of them match the text.
    """

    tokens: int
    remaining: int
    confidences: Sequence[Sequence[float]]
    runs: Sequence[int]
    ranks: Sequence[int]
    unfinished: Sequence[bool]
    drafted: Sequence[Sequence[int]] = ()
    passes: Sequence[Sequence[tuple[int, int]]] = ()
    free: Sequence[tuple[Sequence[float], int]] = ()

    def then(self, later: Trace) -> Trace:
        """Return this trace followed by `later`, the trace of the next starts."""
        parts = ("confidences", "runs", "ranks", "unfinished", "drafted", "passes", "free")
        joined = ([*getattr(self, part), *getattr(later, part)] or () for part in parts)
        return Trace(self.tokens, self.remaining, *joined)

    def work(self, start: int, drafted: int) -> Work:
        """Return the draft work of `drafted` tokens from `start`."""
        return passes_of(w for i, w in self.passes[start] if i < drafted) if self.passes else steps_of(drafted)


@dataclass(slots=True)
class Walk:
    """Decoding of one text: its statistics, and the number of rounds for each pair of draft work and verified rows."""

    stats: Stats = field(default_factory=Stats)
    rounds: Counter[tuple[Work, int]] = field(default_factory=Counter)


class WalkStep(NamedTuple):
    """One round of a walk: the confidences of the drafted tokens, of which the first `num_accepted` match the text.

    `candidates`: the tokens verified at all positions, the drafted ones included. `other`: whether another candidate
    was right where the drafted token was not. `emitted`: a number of tokens. `work`: the draft work.
    """

    confidences: Sequence[float]
    num_accepted: int
    candidates: int
    other: bool
    emitted: int
    work: Work


def walk(traces: Iterable[Trace], controller: Controller, *, candidates: int = 1, seeded: bool = False) -> list[Walk]:
    """Walk the traces in order and return the rounds that real decoding would have, without decoding.

    `candidates`: the most for each position, the drafted token included. `seeded`: the controller starts afresh with
    each text. `controller` itself is not changed. Raises `ValueError` where a trace's draft is shorter than the
    controller's.
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
    for confidences, num_accepted, candidates, other, emitted, work in steps(trace, controller, candidates=most):
        drafted = len(confidences) or candidates
        done.rounds[work, 1 + candidates] += 1
        stats.rounds += 1
        stats.drafted += drafted
        stats.nodes += candidates
        stats.accepted += min(num_accepted + other, emitted)
        stats.tokens += emitted
    return done


def steps(trace: Trace, controller: Controller, *, candidates: int = 1) -> Iterator[WalkStep]:
    """Yield the rounds of decoding one text, in order; `controller` has observed each round before it is yielded."""
    start, deepest = 0, WIDEST_DRAFT // candidates
    while start < len(trace.runs):
        if step := _lookup_step(trace, start, controller):
            yield step
            start += step.emitted
            continue
        draft_loop = _draft_from(trace, start, controller, deepest)
        counts, run = draft_loop.candidates(candidates, nodes=WIDEST_DRAFT), trace.runs[start]
        drafted, verified = len(counts), sum(counts)
        other = run < drafted and 1 <= trace.ranks[start] < counts[run]
        num_accepted = min(run, drafted)
        emitted = min(num_accepted + other + 1, trace.tokens - start)
        controller.observe(draft_loop.confidences, num_accepted, candidates=verified, other=other)
        yield WalkStep(draft_loop.confidences, num_accepted, verified, other, emitted, trace.work(start, drafted))
        start += emitted


def _lookup_step(trace: Trace, start: int, controller: Controller) -> WalkStep | None:
    """Return the round from `start` if the controller verifies lookup tokens without a draft step, else None."""
    chances, run = trace.free[start] if trace.free else ((), 0)
    taken = controller.lookup_length(chances)
    if not taken:
        return None
    num_accepted = min(run, taken)
    return WalkStep((), num_accepted, taken, False, min(num_accepted + 1, trace.tokens - start), LOOKUP_WORK)


def _draft_from(trace: Trace, start: int, controller: Controller, deepest: int) -> DraftLoop:
    """Return the draft from `start` as `controller` would end it."""
    draft_loop = DraftLoop(controller, depth=min(trace.remaining - start - 1, deepest))
    for confidence in trace.confidences[start]:
        if not draft_loop.wants:
            return draft_loop
        draft_loop.record(confidence)
    if draft_loop.wants and trace.unfinished[start]:
        raise ValueError("the trace is too short for this controller; replay with it in play")
    return draft_loop
