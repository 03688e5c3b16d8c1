"""Traces: the drafts from all positions of a text, and the rounds that decoding with any controller would make of them.

A start is a position of a text that a draft begins at. Pure Python, without tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from selfspec.controllers import AdaptiveThreshold, Controller, DraftLoop, FixedK, RateOptimal, StaticThreshold
from selfspec.types.costs import CostModel
from selfspec.types.draft_work import LOOKUP_WORK, NO_WORK, Work, passes_of, steps_of
from selfspec.types.methods import WIDEST_DRAFT
from selfspec.types.stats import Stats


@dataclass(frozen=True, slots=True)
class Trace:
    """The drafts from all starts of one text, which has `tokens` new tokens; at most `remaining` were allowed.

    Start i is the position after i new tokens, from which `remaining` - i more tokens may be emitted. A trace may hold
    the first starts only; a walk then ends after the last of these starts.

    `drafted[i]`: the tokens drafted from start i; the first `runs[i]` of these tokens match the text.
    `confidences[i]`: the confidence of each drafted token. `ranks[i]`: which candidate for the first wrong token's
    position is the text's token (1: the second candidate; 0: no candidate; the drafted token is the first candidate).
    `unfinished[i]`: whether the draft ended because every controller of the replay would stop, not because the text
    ended or had no room. `passes[i]`: the draft passes from start i if lookup tokens save some passes, each as the
    index of its first token and its number of tokens; empty: one pass for each token. `free[i]`: the chance of each
    lookup token that may be verified without a draft step, and how many of these tokens match the text.
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
        """Return the draft-path passes that draft the first `drafted` tokens from `start`, as `Work`."""
        return passes_of(w for i, w in self.passes[start] if i < drafted) if self.passes else steps_of(drafted)


@dataclass(slots=True)
class Walk:
    """The result of walking over the trace of one text, as if the text were decoded.

    `rounds`: the number of rounds for each pair of draft work and number of verified rows.
    """

    stats: Stats = field(default_factory=Stats)
    rounds: Counter[tuple[Work, int]] = field(default_factory=Counter)


class WalkStep(NamedTuple):
    """One round of a walk: `confidences` of the drafted tokens, of which the first `num_accepted` match the text.

    `candidates`: the number of tokens verified at all positions, drafted tokens included. `other`: whether another
    candidate matches the text at the first wrong token. `emitted`: the number of tokens emitted. `work`: the draft
    work.
    """

    confidences: Sequence[float]
    num_accepted: int
    candidates: int
    other: bool
    emitted: int
    work: Work


def walk(traces: Iterable[Trace], controller: Controller, *, candidates: int = 1, seeded: bool = False) -> list[Walk]:
    """Walk the traces in order and return the rounds that real decoding would have, without decoding.

    `candidates`: the largest number of candidates for each position, the drafted token included. `seeded`: whether the
    controller starts each text in its initial state. `controller` itself is not changed. Raises `ValueError` if a draft
    of a trace ended where `controller` would continue.
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
    """Yield the rounds of decoding one text, in order; `controller` observes each round before the round is yielded.

    The first round drafts nothing: its token comes with the prompt's pass.
    """
    start, deepest = 1, WIDEST_DRAFT // candidates
    if trace.runs:
        yield WalkStep((), 0, 0, False, 1, NO_WORK)
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
    """Return the round from `start` if `controller` verifies lookup tokens instead of drafting, else None."""
    chances, run = trace.free[start] if trace.free else ((), 0)
    taken = controller.lookup_length(chances)
    if not taken:
        return None
    num_accepted = min(run, taken)
    return WalkStep((), num_accepted, taken, False, min(num_accepted + 1, trace.tokens - start), LOOKUP_WORK)


def _draft_from(trace: Trace, start: int, controller: Controller, deepest: int) -> DraftLoop:
    """Replay the drafting loop from `start` on the recorded confidences, until `controller` stops drafting."""
    draft_loop = DraftLoop(controller, depth=min(trace.remaining - start - 1, deepest))
    for confidence in trace.confidences[start]:
        if not draft_loop.wants:
            return draft_loop
        draft_loop.record(confidence)
    if draft_loop.wants and trace.unfinished[start]:
        raise ValueError("the trace is too short for this controller; expected a replay with this controller")
    return draft_loop


LONGEST_DRAFT = 15  # the longest draft of the controllers to try: costs are measured up to 16 rows, and rise after
LONG_ENOUGH = 0.98  # share of the best speed that the longest draft must reach if every token is right
LOWEST_THRESHOLD, LONGEST_FIXED = 0.05, 3


def controllers_in_play(depth: int) -> list[Controller]:
    """Return the controllers to try, of all kinds, with drafts of at most `depth` tokens.

    Fixed lengths are short, because a replay drafts to a fixed length from every start, while thresholds end most
    drafts early.
    """
    lengths = sorted({min(k, depth) for k in (1, 2, 3, 4, 6, 8, 12, 15)})
    thresholds = (LOWEST_THRESHOLD, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8)
    adaptive = [
        AdaptiveThreshold(target=target, k_max=k, floor=LOWEST_THRESHOLD)
        for target in (0.7, 0.8, 0.9)
        for k in lengths[-3:]
    ]
    static = [StaticThreshold(threshold, k) for threshold in thresholds for k in lengths if k > 1]
    fixed = [FixedK(k) for k in lengths if k <= LONGEST_FIXED]
    return [*fixed, *static, *adaptive, RateOptimal(k_max=depth, floor=LOWEST_THRESHOLD)]


def long_enough(costs: CostModel, draft: float, most: int) -> int:
    """Return the least draft length that can reach nearly the speed of all lengths up to `most`.

    If every drafted token were right, drafts of this length would reach `LONG_ENOUGH` times the speed of the fastest
    length. If draft steps are expensive, longer drafts hardly gain even then. `draft`: the seconds of a draft step.
    """

    def speed(k: int) -> float:
        return (k + 1) / (costs.round + k * draft + costs.verification(k + 1))

    speeds = {k: speed(k) for k in range(1, most + 1)}
    return min(k for k, rate in speeds.items() if rate >= LONG_ENOUGH * max(speeds.values()))


def deepest(controllers: Sequence[Controller]) -> int:
    """Return the length of the longest draft that any of the controllers allows."""
    depth = 1
    while any(c.min_confidence(depth) <= 1 for c in controllers):
        depth += 1
    return depth
