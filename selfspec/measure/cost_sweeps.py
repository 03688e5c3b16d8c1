"""Rounds timed in the decoding loop, for a cost model to be fitted to: how many, of which drafts, and each of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter
from selfspec.llm.round_timer import RoundSample, timed_rounds
from selfspec.runtime.forward import Runtime
from selfspec.speculation.sampling import Sampler
from selfspec.types.skip import SkipSet

# Drafted tokens, and how often in one decoding: short drafts are common when decoding, and caches settle accordingly.
LENGTHS = {1: 6, 2: 5, 3: 4, 4: 3, 5: 2, 7: 2, 11: 1, 15: 1}
ROUNDS = sum(LENGTHS.values())  # of one decoding: few, so that the context stays near the one asked for
SETTLING = 5  # rounds before them that are not counted, until caches have settled
LONG = 20.0  # seconds that a sweep may take without being thinned out
WIDE = (1, 2, 4, 8)  # tokens of draft steps that are timed, too
WIDE_STEPS = 9.0  # what one of each takes in plain steps, where rows are dear
ROUND_STEPS = 4.0  # what a round with a draft takes, in plain steps, on average over `LENGTHS`
PACE = 6  # plain steps that tell how long a sweep will take


@dataclass(frozen=True, slots=True)
class Effort:
    """What one sweep times: decodings with `fitted` random paths to fit to, and `fresh` ones to test the fit on.

    Each decoding has so many `rounds`, after `settling` ones that are not counted; between them, plain ones.
    """

    fitted: int
    fresh: int
    rounds: int
    settling: int

    @property
    def decodings(self) -> int:
        """Along paths, and plain ones: one before every third."""
        return self.fitted + self.fresh + -(-(self.fitted + self.fresh) // 3)

    def seconds(self, step: float, prompt: float) -> float:
        """About what a sweep and the fit take where a plain step takes `step` and a prompt's pass `prompt` seconds."""
        drafting, plain = self.fitted + self.fresh, 2 * self.rounds
        steps = drafting * (self.settling + self.rounds) * ROUND_STEPS
        steps += (
            self.decodings - drafting
        ) * plain + self.decodings  # and the round that reads the prompt's last token
        steps += WIDE_STEPS * self.rounds
        return (steps + PACE + 2 * plain) * step + (self.decodings + 6) * prompt


# Of a model whose plain step takes 29 ms, the draft steps of 40 other skip sets came out wrong by (root mean square, 30
# draws from 720 rounds): 1.7%, 2.3%, 3.0%, 4.6%, 5.1%, 5.6%, 9.6%.
EFFORTS = (
    Effort(10, 5, ROUNDS, SETTLING),
    Effort(10, 5, ROUNDS // 2, SETTLING),
    Effort(10, 5, 6, 3),
    Effort(6, 3, 6, 3),
    Effort(4, 2, 6, 2),
    Effort(4, 2, 4, 2),
    Effort(3, 1, 4, 1),
)
GOOD = 2  # the least of them that is good enough where there is time


def effort_within(seconds: float, step: float, prompt: float, *, further: int = 0) -> Effort:
    """The most thorough sweep that takes no longer than `seconds`, and `LONG` if a good one can; else the least.

    `further`: how many more paths are to be fitted to, as there are more prices.
    """
    efforts = [replace(effort, fitted=effort.fitted + further) for effort in EFFORTS]
    for number, effort in enumerate(efforts):
        if effort.seconds(step, prompt) <= (min(LONG, seconds) if number < GOOD else seconds):
            return effort
    return efforts[-1]


class Sweep:
    """Decodings with every drafter, drafts of all lengths in random order, plain decoding in between.

    `samples`: of the former's rounds; `plain`: of each of the latter, the seconds of every step.
    """

    def __init__(
        self,
        runtime: Runtime,
        context: int,
        sampler: Sampler,
        lengths: Sequence[int],
        draw: random.Random,
        effort: Effort,
    ) -> None:
        self.runtime, self.context, self.effort = runtime, context, effort
        self.samples: list[RoundSample] = []
        self.plain: list[list[float]] = []
        self._sampler, self._draw = sampler, draw
        self._lengths = _shuffled(lengths, draw)

    def over(self, drafters: Sequence[LayerSkipDrafter]) -> Iterator[None]:
        """Once with every drafter; yields after every decoding."""
        effort = self.effort
        for number, drafter in enumerate(drafters):
            if number % 3 == 0:
                self.plain.append([step.rest for step in self._decode(drafter, [0] * 2 * effort.rounds)])
                yield
            plan = list(islice(self._lengths, effort.rounds))
            self._draw.shuffle(plan)
            self.samples += self._decode(drafter, [*plan[: effort.settling], *plan])[effort.settling :]
            yield

    def _decode(self, drafter: LayerSkipDrafter, plan: Sequence[int]) -> list[RoundSample]:
        return timed_rounds(self.runtime, self.context, self._sampler, drafter, plan, self._draw)


def _shuffled(lengths: Sequence[int], draw: random.Random) -> Iterator[int]:
    """Draft lengths, each as often as `LENGTHS` has it and every one before any comes again, without end."""
    while True:
        further = [k for k in lengths for _ in range(LENGTHS[k] - 1)]
        yield from [*draw.sample(lengths, len(lengths)), *draw.sample(further, len(further))]


def pace(runtime: Runtime, context: int, sampler: Sampler, draw: random.Random) -> tuple[float, float]:
    """About the seconds of a plain step, and of a prompt's pass, by a short decoding."""
    drafter = LayerSkipDrafter(runtime, SkipSet(), FixedK(1))
    begun = time.perf_counter()
    steps = [step.rest for step in timed_rounds(runtime, context, sampler, drafter, [0] * PACE, draw)]
    whole = time.perf_counter() - begun
    return quiet(steps), max(whole - sum(steps) - quiet(steps), 0.0)


def room_for(runtime: Runtime, context: int) -> tuple[int, list[int]]:
    """The context asked for, or less, and the draft lengths, that leave room for a decoding."""
    limit = runtime.skeleton.context
    longest = max(LENGTHS) + 1
    context = max(1, min(context, limit - (ROUNDS + SETTLING) * longest))
    return context, [k for k in LENGTHS if (ROUNDS + SETTLING) * (k + 1) + context <= limit] or [1]


def quiet(times: Sequence[float]) -> float:
    """The lower quartile: what something takes while nothing else disturbs the machine."""
    return max(min(times), statistics.quantiles(times, n=4)[0]) if len(times) > 1 else times[0]
