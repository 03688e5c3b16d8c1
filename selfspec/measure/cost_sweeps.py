"""Timed rounds of the decoding loop for fitting a cost model, and the choice of their number and drafts."""

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

# Draft lengths and their counts in one decoding: short drafts are common in use, and caches settle accordingly.
LENGTHS = {1: 6, 2: 5, 3: 4, 4: 3, 5: 2, 7: 2, 11: 1, 15: 1}
ROUNDS = sum(LENGTHS.values())  # of one decoding: few, so that the context stays near the requested one
SETTLING = 5  # warm-up rounds before them, not counted
LONG = 20.0  # seconds that a sweep may take before fewer rounds are timed
WIDE = (1, 2, 4, 8)  # widths of draft steps that are timed, too
WIDE_STEPS = 9.0  # cost of one of each in plain steps, where width is expensive
ROUND_STEPS = 4.0  # mean cost of a round with a draft over `LENGTHS`, in plain steps
PACE = 6  # plain steps that estimate how long a sweep will take


@dataclass(frozen=True, slots=True)
class Effort:
    """The size of a sweep: decodings with `fitted` random paths to fit to, and `fresh` ones to test the fit on.

    Each decoding has `rounds` counted rounds after `settling` uncounted ones; plain decodings come in between.
    """

    fitted: int
    fresh: int
    rounds: int
    settling: int

    @property
    def decodings(self) -> int:
        """The number of decodings along paths, and of plain ones: one before every third."""
        return self.fitted + self.fresh + -(-(self.fitted + self.fresh) // 3)

    def seconds(self, step: float, prompt: float) -> float:
        """Estimate the seconds of a sweep and its fit, for a plain step of `step` and a prefill of `prompt` seconds."""
        drafting, plain = self.fitted + self.fresh, 2 * self.rounds
        steps = drafting * (self.settling + self.rounds) * ROUND_STEPS
        steps += (self.decodings - drafting) * plain + self.decodings  # one more round reads the prompt's last token
        steps += WIDE_STEPS * self.rounds
        return (steps + PACE + 2 * plain) * step + (self.decodings + 6) * prompt


# Errors of the fitted draft steps of 40 other skip sets, on a model with a plain step of 29 ms (root mean square, 30
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
GOOD = 2  # index of the effort that is thorough enough beyond `LONG` seconds


def effort_within(seconds: float, step: float, prompt: float, *, further: int = 0) -> Effort:
    """Return the most thorough sweep within `seconds`; the least thorough one if none is.

    Sweeps more thorough than `EFFORTS[GOOD]` must also take at most `LONG` seconds. `further`: the number of additional
    paths to fit to, as further modes have costs of their own.
    """
    efforts = [replace(effort, fitted=effort.fitted + further) for effort in EFFORTS]
    for number, effort in enumerate(efforts):
        if effort.seconds(step, prompt) <= (min(LONG, seconds) if number < GOOD else seconds):
            return effort
    return efforts[-1]


class Sweep:
    """Decodings with every drafter, drafts of all lengths in random order, plain decoding in between.

    `samples`: the rounds of the drafting decodings; `plain`: the seconds of every step of each plain decoding.
    """

    def __init__(
        self,
        runtime: Runtime,
        context: int,
        sampler: Sampler,
        lengths: Sequence[int],
        rng: random.Random,
        effort: Effort,
    ) -> None:
        self.runtime, self.context, self.effort = runtime, context, effort
        self.samples: list[RoundSample] = []
        self.plain: list[list[float]] = []
        self._sampler, self._rng = sampler, rng
        self._lengths = _shuffled(lengths, rng)

    def over(self, drafters: Sequence[LayerSkipDrafter]) -> Iterator[None]:
        """Decode once with every drafter; yields after every decoding."""
        effort = self.effort
        for number, drafter in enumerate(drafters):
            if number % 3 == 0:
                self.plain.append([step.rest for step in self._decode(drafter, [0] * 2 * effort.rounds)])
                yield
            plan = list(islice(self._lengths, effort.rounds))
            self._rng.shuffle(plan)
            self.samples += self._decode(drafter, [*plan[: effort.settling], *plan])[effort.settling :]
            yield

    def _decode(self, drafter: LayerSkipDrafter, plan: Sequence[int]) -> list[RoundSample]:
        return timed_rounds(self.runtime, self.context, self._sampler, drafter, plan, self._rng)


def _shuffled(lengths: Sequence[int], rng: random.Random) -> Iterator[int]:
    """Yield draft lengths without end: all once in random order, then the further repeats that `LENGTHS` asks for."""
    while True:
        further = [k for k in lengths for _ in range(LENGTHS[k] - 1)]
        yield from [*rng.sample(lengths, len(lengths)), *rng.sample(further, len(further))]


def pace(runtime: Runtime, context: int, sampler: Sampler, rng: random.Random) -> tuple[float, float]:
    """Estimate the seconds of a plain step and of a prefill, by a short decoding."""
    drafter = LayerSkipDrafter(runtime, SkipSet(), FixedK(1))
    begun = time.perf_counter()
    steps = [step.rest for step in timed_rounds(runtime, context, sampler, drafter, [0] * PACE, rng)]
    elapsed = time.perf_counter() - begun
    return lower_quartile(steps), max(elapsed - sum(steps) - lower_quartile(steps), 0.0)


def fit_context(runtime: Runtime, context: int) -> tuple[int, list[int]]:
    """Return the requested context, reduced if necessary, and the draft lengths that fit a decoding."""
    limit = runtime.skeleton.context
    longest = max(LENGTHS) + 1
    context = max(1, min(context, limit - (ROUNDS + SETTLING) * longest))
    return context, [k for k in LENGTHS if (ROUNDS + SETTLING) * (k + 1) + context <= limit] or [1]


def lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile: the time while nothing else disturbs the machine."""
    return max(min(times), statistics.quantiles(times, n=4)[0]) if len(times) > 1 else times[0]
