"""Timed rounds of the decoding loop, to which a cost model is fitted, and the choice of their number and lengths."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter
from selfspec.llm.local_costs import RoundSample, timed_rounds
from selfspec.runtime.base import Runtime
from selfspec.speculation.sampling import Sampler
from selfspec.types.draft_path import SkipSet

# Each draft length and its number of rounds in one decoding. Short drafts dominate, as in use, because the state of the
# CPU caches depends on the lengths of the previous rounds.
LENGTHS = {1: 6, 2: 5, 3: 4, 4: 3, 5: 2, 7: 2, 11: 1, 15: 1}
ROUNDS = sum(LENGTHS.values())  # timed rounds of one decoding: few, so that the context stays near the requested one
SETTLING = 5  # warm-up rounds before the timed rounds
LONG = 20.0  # seconds; a sweep expected to take longer times fewer rounds
WIDE = (1, 2, 4, 8)  # numbers of tokens per draft step that are timed
WIDE_STEPS = 9.0  # estimated cost of one draft step of each width in `WIDE`, in plain decode steps
ROUND_STEPS = 4.0  # estimated mean cost of a round over the draft lengths in `LENGTHS`, in plain decode steps
PACE = 6  # plain decode steps that `pace` times to estimate how long a sweep will take


@dataclass(frozen=True, slots=True)
class Effort:
    """The size of a sweep, in decodings and rounds.

    `fitted`: the number of paths to fit to. `fresh`: the number of further paths to test the fit on. Each path is
    decoded along once. `rounds`: the timed rounds of a decoding. `settling`: the warm-up rounds before them. A plain
    decoding precedes every third path.
    """

    fitted: int
    fresh: int
    rounds: int
    settling: int

    @property
    def decodings(self) -> int:
        """The number of all decodings, along paths and plain."""
        return self.fitted + self.fresh + -(-(self.fitted + self.fresh) // 3)

    def seconds(self, step: float, prompt: float) -> float:
        """Estimate the seconds of a sweep and its further timings.

        `step`: the seconds of a plain decode step. `prompt`: the seconds of a prefill.
        """
        drafting, plain = self.fitted + self.fresh, 2 * self.rounds
        steps = drafting * (self.settling + self.rounds) * ROUND_STEPS
        steps += (self.decodings - drafting) * plain + self.decodings  # one more round reads the prompt's last token
        steps += WIDE_STEPS * self.rounds
        return (steps + PACE + 2 * plain) * step + (self.decodings + 6) * prompt


# From the most to the least thorough. Relative errors of the fitted draft steps on 40 further skip sets, for a model
# whose plain decode step takes 29 ms (root mean square over 30 draws from 720 rounds): 1.7%, 2.3%, 3.0%, 4.6%, 5.1%,
# 5.6%, 9.6%.
EFFORTS = (
    Effort(10, 5, ROUNDS, SETTLING),
    Effort(10, 5, ROUNDS // 2, SETTLING),
    Effort(10, 5, 6, 3),
    Effort(6, 3, 6, 3),
    Effort(4, 2, 6, 2),
    Effort(4, 2, 4, 2),
    Effort(3, 1, 4, 1),
)
GOOD = 2  # index in `EFFORTS`: more thorough efforts are chosen only if they take at most `LONG` seconds


def effort_within(seconds: float, step: float, prompt: float, *, further: int = 0) -> Effort:
    """Return the most thorough effort that takes at most `seconds`, or the least thorough effort if all take longer.

    Efforts more thorough than `EFFORTS[GOOD]` must also take at most `LONG` seconds. `step`: the seconds of a plain
    decode step. `prompt`: the seconds of a prefill. `further`: the number of additional paths to fit to, which
    quantised modes need as each mode adds two costs to fit.
    """
    efforts = [replace(effort, fitted=effort.fitted + further) for effort in EFFORTS]
    for number, effort in enumerate(efforts):
        if effort.seconds(step, prompt) <= (min(LONG, seconds) if number < GOOD else seconds):
            return effort
    return efforts[-1]


class Sweep:
    """Timed decodings with several drafters, with plain decodings in between; draft lengths are in random order.

    `samples`: the timed rounds with drafts. `plain`: the seconds of each step of each plain decoding.
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
        """Decode once with every drafter, and plainly before every third drafter; yield after each decoding."""
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
    """Yield draft lengths without end: each of `lengths` as often as `LENGTHS` says, in random order, then again.

    In each repetition every length comes once before any length comes a second time.
    """
    while True:
        further = [k for k in lengths for _ in range(LENGTHS[k] - 1)]
        yield from [*rng.sample(lengths, len(lengths)), *rng.sample(further, len(further))]


def pace(runtime: Runtime, context: int, sampler: Sampler, rng: random.Random) -> tuple[float, float]:
    """Return the seconds of a plain decode step and of a prefill of `context` tokens, timed in a short decoding."""
    drafter = LayerSkipDrafter(runtime, SkipSet(), FixedK(1))
    begun = time.perf_counter()
    steps = [step.rest for step in timed_rounds(runtime, context, sampler, drafter, [0] * PACE, rng)]
    elapsed = time.perf_counter() - begun
    return lower_quartile(steps), max(elapsed - sum(steps), 0.0)


def fit_context(runtime: Runtime, context: int) -> tuple[int, list[int]]:
    """Return the number of keys to decode after, and the draft lengths to time, so that a decoding fits the model.

    `context`: the requested number of keys, which is reduced if the model's context is too short.
    """
    limit = runtime.skeleton.context
    longest = max(LENGTHS) + 1
    context = max(1, min(context, limit - (ROUNDS + SETTLING) * longest))
    return context, [k for k in LENGTHS if (ROUNDS + SETTLING) * (k + 1) + context <= limit] or [1]


def lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile of `times`, which estimates the time without disturbance by other processes."""
    return max(min(times), statistics.quantiles(times, n=4)[0]) if len(times) > 1 else times[0]
