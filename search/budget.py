"""How a search's time is shared out among its phases: one clock, and one table of shares. Knows nothing of models."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Clock = Callable[[], float]

SHARES = {  # the phases in their order; a phase may take its share of what time is left, against those that follow
    "texts": 8,  # the whole model continues the prompts
    "costs": 18,
    "ranking": 12,  # what bypassing each sub-layer alone brings
    "trials": 28,  # which also get what the phases after them do not need
    "heads": 4,  # the best again with smaller draft vocabularies
    "choosing": 8,  # the best few against each other
    "measuring": 19,  # the best against plain decoding
    "ending": 3,  # what it was predicted to bring, and the model once more as suits plain decoding
}


@dataclass(frozen=True, slots=True)
class Deadline:
    """Until when a phase may go on."""

    at: float
    clock: Clock = field(repr=False)

    @property
    def left(self) -> float:
        """Seconds until then; 0 when it is past."""
        return max(0.0, self.at - self.clock())

    def part(self, share: float) -> Deadline:
        """That of something that may take a share of the seconds left."""
        return Deadline(self.at if math.isinf(self.at) else self.clock() + share * self.left, self.clock)

    def allows(self, seconds: float = 0.0) -> bool:
        """Whether so many seconds more can be had."""
        return self.clock() + seconds <= self.at


def never(clock: Clock = time.perf_counter) -> Deadline:
    """The deadline of what may take any time."""
    return Deadline(math.inf, clock)


class Budget:
    """The time that a whole search may take; it runs from when this is made. `seconds` None: any time.

    Every phase asks for its `deadline` when it begins. So what one leaves over goes to those after it, and what one
    takes too long is taken from all of them. `clock` gives seconds. `loaded`: what had been spent when the model was
    loaded, all that came before included.
    """

    loaded = 0.0

    def __init__(self, seconds: float | None = None, *, clock: Clock = time.perf_counter) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self.clock = clock
        self.begun = clock()
        self._needs: dict[str, float] = {}

    @property
    def limited(self) -> bool:
        """Whether the time is limited."""
        return not math.isinf(self.seconds)

    @property
    def spent(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self.begun

    @property
    def left(self) -> float:
        """Seconds until the search should be over; 0 when that is past."""
        return max(0.0, self.seconds - self.spent)

    def expect(self, needs: Mapping[str, float]) -> None:
        """What phases would take to be done in full, in seconds: no more is kept for them while others go on."""
        self._needs.update(needs)

    def part(self, phase: str) -> float:
        """Seconds of a phase, should every phase take its share of what is left."""
        return self.left * SHARES[phase] / sum(SHARES.values())

    def share(self, phase: str) -> float:
        """Seconds that a phase may take if it begins now."""
        if not self.limited:
            return math.inf
        names = list(SHARES)
        coming = names[names.index(phase) :]
        unit = self.left / sum(SHARES[name] for name in coming)
        return self.left - sum(min(self._needs.get(name, math.inf), SHARES[name] * unit) for name in coming[1:])

    def deadline(self, phase: str) -> Deadline:
        """Until when a phase that begins now may go on."""
        return Deadline(self.clock() + self.share(phase), self.clock)
