"""The controllers that stop by number or by threshold. Pure Python: know nothing of models and tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from selfspec.basics.errors import SelfspecError

from .base import Controller


@dataclass
class FixedK(Controller):
    """Always draft `k` tokens (Leviathan et al. 2211.17192)."""

    name: ClassVar[str] = "fixed"
    k: int = 4

    def __post_init__(self) -> None:
        self._count("k")

    def go_on(self, confidences: Sequence[float]) -> bool:
        """Whether fewer than `k` are drafted."""
        return len(confidences) < self.k

    def lowest(self, drafted: int) -> float:
        """Any confidence will do."""
        return 0.0 if drafted < self.k else math.inf


@dataclass
class StaticThreshold(Controller):
    """Draft until a token's confidence is below `threshold`, at most `k_max` tokens."""

    name: ClassVar[str] = "static"
    threshold: float = 0.6
    k_max: int = 12

    def __post_init__(self) -> None:
        self._shares("threshold")
        self._count("k_max")

    def go_on(self, confidences: Sequence[float]) -> bool:
        """Whether the last token was confident enough."""
        return len(confidences) < self.k_max and confidences[-1] >= self.threshold

    def lowest(self, drafted: int) -> float:
        """The threshold."""
        return self.threshold if drafted < self.k_max else math.inf


@dataclass
class AdaptiveThreshold(Controller):
    """Draft & Verify's adaptive draft-exiting threshold (2309.08168, section 3.3), with its flaws corrected.

    After each verified draft, with a = accepted / drafted:

        m <- momentum * m + (1 - momentum) * a
        threshold' = threshold + step  if m < target  else  threshold - step
        threshold <- inertia * threshold + (1 - inertia) * threshold'

    Other than published: m starts from the first observation, not from 0; the threshold stays within `floor` and
    `ceiling`; the step is ten times as large, so that the rounds of one prompt can move it; a draft of `k_max` tokens
    counts like any other; and a round that drafted nothing changes nothing.
    """

    name: ClassVar[str] = "adaptive"
    threshold: float = 0.6
    k_max: int = 12
    target: float = 0.9
    momentum: float = 0.5
    inertia: float = 0.9
    step: float = 0.1
    floor: float = 0.05
    ceiling: float = 0.95
    acceptance: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._shares("threshold", "target", "momentum", "inertia", "step", "floor", "ceiling")
        self._count("k_max")
        if not self.floor <= self.threshold <= self.ceiling:
            raise SelfspecError(
                f"controller 'adaptive': threshold {self.threshold} is not between "
                f"floor {self.floor} and ceiling {self.ceiling}"
            )
        self._start = self.threshold

    def go_on(self, confidences: Sequence[float]) -> bool:
        """Whether the last token was confident enough for the threshold as it now stands."""
        return len(confidences) < self.k_max and confidences[-1] >= self.threshold

    def lowest(self, drafted: int) -> float:
        """The floor, below which the threshold never falls."""
        return self.floor if drafted < self.k_max else math.inf

    def observe(
        self, confidences: Sequence[float], accepted: int, *, candidates: int | None = None, other: bool = False
    ) -> None:
        """Update the acceptance estimate and the threshold."""
        if not confidences:
            return
        rate = accepted / len(confidences)
        past = rate if self.acceptance is None else self.acceptance
        self.acceptance = self.momentum * past + (1 - self.momentum) * rate
        moved = self.threshold + (self.step if self.acceptance < self.target else -self.step)
        threshold = self.inertia * self.threshold + (1 - self.inertia) * moved
        self.threshold = min(max(threshold, self.floor), self.ceiling)

    def start(self) -> Self:
        """A copy whose threshold is where this one's began."""
        return dataclasses.replace(self, threshold=self._start)
