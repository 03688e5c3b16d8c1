"""The time budget of a search, shared among its phases: one clock, and one table of shares."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Clock = Callable[[], float]

SHARES = {  # phases in order; a phase gets its share of the time left, relative to itself and all later phases
    "texts": 8,  # the whole model continues the prompts
    "costs": 18,
    "ranking": 12,  # the gain of skipping each sub-layer alone
    "trials": 28,  # and the time that later phases do not need
    "heads": 4,  # the best path again, with bridges and smaller draft vocabularies
    "choosing": 8,  # the finalists against each other
    "measuring": 19,  # the best path against plain decoding
    "ending": 3,  # the prediction for the profile, and the model in the weight layout for plain decoding
}


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time, by `clock`, until which a phase may go on."""

    end_time: float
    clock: Clock = field(repr=False)

    @property
    def left(self) -> float:
        """Seconds until the deadline; 0 after the deadline."""
        return max(0.0, self.end_time - self.clock())

    def part(self, share: float) -> Deadline:
        """Return the deadline of a task that begins now and may take `share` of the seconds left."""
        return Deadline(self.end_time if math.isinf(self.end_time) else self.clock() + share * self.left, self.clock)

    def allows(self, seconds: float = 0.0) -> bool:
        """Return whether `seconds` more fit before the deadline."""
        return self.clock() + seconds <= self.end_time


def no_deadline(clock: Clock = time.perf_counter) -> Deadline:
    """Return a deadline that never comes."""
    return Deadline(math.inf, clock)


class Budget:
    """The time that a whole search may take, in seconds from the creation of this object; None: unlimited.

    Every phase asks for its `deadline` when it begins, so that all later phases share the time that a phase saves or
    overruns. `clock` returns seconds. `loaded`: the seconds spent until the model was loaded.
    """

    loaded = 0.0

    def __init__(self, seconds: float | None = None, *, clock: Clock = time.perf_counter) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self.clock = clock
        self.start_time = clock()
        self._needs: dict[str, float] = {}

    @property
    def limited(self) -> bool:
        """Whether the time is limited."""
        return not math.isinf(self.seconds)

    @property
    def spent(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self.start_time

    @property
    def left(self) -> float:
        """Seconds until the search should end; 0 after that time."""
        return max(0.0, self.seconds - self.spent)

    def expect(self, needs: Mapping[str, float]) -> None:
        """Set the seconds that each phase needs; earlier phases reserve at most these seconds for it."""
        self._needs.update(needs)

    def part(self, phase: str) -> float:
        """Return the seconds of a phase if all phases, from the first on, take their shares of the time left."""
        return self.left * SHARES[phase] / sum(SHARES.values())

    def share(self, phase: str) -> float:
        """Return the seconds that a phase may take if it begins now."""
        if not self.limited:
            return math.inf
        names = list(SHARES)
        coming = names[names.index(phase) :]
        unit = self.left / sum(SHARES[name] for name in coming)
        return self.left - sum(min(self._needs.get(name, math.inf), SHARES[name] * unit) for name in coming[1:])

    def deadline(self, phase: str) -> Deadline:
        """Return the deadline of a phase that begins now."""
        return Deadline(self.clock() + self.share(phase), self.clock)
