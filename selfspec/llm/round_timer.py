"""Timing of rounds in the real decoding loop, so that measured costs include the loop's overhead."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.basics.clock import clock
from selfspec.basics.machine import synchronise
from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.engine.loop import decode
from selfspec.runtime.base import Runtime
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft
from selfspec.speculation.rules import find_rule
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_path import DraftPath


@dataclass(frozen=True, slots=True)
class RoundSample:
    """Timed round: draft path, number of drafted tokens, seconds of drafting (`draft`) and of all else (`rest`)."""

    path: DraftPath
    drafted: int
    draft: float
    rest: float  # verification and the loop


class Probe(PlainDrafter):
    """Drafter that drafts `length` tokens with `drafter` in each round, and records the `seconds` of drafting."""

    drafts = True

    def __init__(self, drafter: LayerSkipDrafter) -> None:
        self.drafter = drafter
        self.length, self.seconds = 0, 0.0

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return an autoregressive draft of `length` tokens for each sequence."""
        start = clock()
        drafts = [NO_DRAFT] * len(seqs)
        if self.length:
            self.drafter.controller = FixedK(self.length)
            drafts = self.drafter.propose(seqs, limits)
        synchronise(self.drafter.runtime.device)
        self.seconds = clock() - start
        return drafts


def timed_rounds(
    runtime: Runtime,
    context: int,
    sampler: Sampler,
    drafter: LayerSkipDrafter,
    plan: Sequence[int],
    draw: random.Random,
) -> list[RoundSample]:
    """Decode a random prompt with the draft lengths in `plan`, and time each round except the first.

    The first round, before those of `plan`, is the prefill, which also emits a token. `context`: the prompt's length in
    tokens. CPU caches take several rounds to settle: a decode step without a draft can take 1.6 times as long after a
    wide pass. Raises `BusyError` while the runtime has a stream.
    """
    vocabulary = runtime.skeleton.identity.vocabulary or 2
    longest = 2 + sum(length + 1 for length in plan)  # the cache holds no more than these rounds can emit
    max_new_tokens = min(longest, runtime.skeleton.context - context)
    seq = SequenceState([draw.randrange(vocabulary) for _ in range(context)], max_new_tokens, sampler)
    probe, samples = Probe(drafter), []
    rounds = decode(runtime, probe, seq, rule=find_rule(None, sampler))
    try:
        for number, probe.length in enumerate([0, *plan]):
            start = clock()
            next(rounds)
            synchronise(runtime.device)
            elapsed = clock() - start
            if number:
                samples.append(RoundSample(drafter.path, probe.length, probe.seconds, elapsed - probe.seconds))
    finally:
        rounds.close()
    return samples
