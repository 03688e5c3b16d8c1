"""The controllers that stop at a fixed draft length or at a confidence threshold. Does not import torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from selfspec.basics.errors import SelfspecError
from selfspec.types.controller import StoppingRule

from .base import Controller


@dataclass
class FixedK(Controller):
    """Always draft `k` tokens (Leviathan et al. 2211.17192)."""

    name: ClassVar[str] = "fixed"
    k: int = 4

    def __post_init__(self) -> None:
        self.check_count("k")

    def go_on(self, confidences: Sequence[float]) -> bool:
        """Return whether fewer than `k` tokens are drafted."""
        return len(confidences) < self.k

    def stopping(self, most: int) -> StoppingRule:
        """Return `min_confidence` after each token, which is all that `go_on` decides by."""
        return StoppingRule(self._least(most))

    def min_confidence(self, drafted: int) -> float:
        """Return 0, as any confidence suffices, or infinity once `k` tokens are drafted."""
        return 0.0 if drafted < self.k else math.inf


@dataclass
class StaticThreshold(Controller):
    """Draft until a token's confidence is below `threshold`, at most `k_max` tokens."""

    name: ClassVar[str] = "static"
    threshold: float = 0.6
    k_max: int = 12

    def __post_init__(self) -> None:
        self.check_shares("threshold")
        self.check_count("k_max")

    def go_on(self, confidences: Sequence[float]) -> bool:
        """Return whether the last confidence reaches the threshold."""
        return len(confidences) < self.k_max and confidences[-1] >= self.threshold

    def stopping(self, most: int) -> StoppingRule:
        """Return `min_confidence` after each token, which is all that `go_on` decides by."""
        return StoppingRule(self._least(most))

    def min_confidence(self, drafted: int) -> float:
        """Return the threshold, or infinity once `k_max` tokens are drafted."""
        return self.threshold if drafted < self.k_max else math.inf


@dataclass
class AdaptiveThreshold(Controller):
    """Draft & Verify's adaptive draft-exiting threshold (2309.08168, section 3.3), with its flaws corrected.

    After each verified draft, with a = accepted / drafted, and m the running mean of a (`acceptance`):

        m <- momentum * m + (1 - momentum) * a
        threshold' = threshold + step  if m < target  else  threshold - step
        threshold <- inertia * threshold + (1 - inertia) * threshold'

    Differences from the paper: m starts from the first observation, not from 0; the threshold stays between `floor` and
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
        self.check_shares("threshold", "target", "momentum", "inertia", "step", "floor", "ceiling")
        self.check_count("k_max")
        if not self.floor <= self.threshold <= self.ceiling:
            raise SelfspecError(
                f"controller 'adaptive': threshold {self.threshold} is not between "
                f"floor {self.floor} and ceiling {self.ceiling}"
            )
        self._start = self.threshold

    def go_on(self, confidences: Sequence[float]) -> bool:
        """Return whether the last confidence reaches the current threshold."""
        return len(confidences) < self.k_max and confidences[-1] >= self.threshold

    def stopping(self, most: int) -> StoppingRule:
        """Return the current threshold after each token, and infinity from `k_max` tokens on."""
        return StoppingRule(self._least(most, self.threshold))

    def min_confidence(self, drafted: int) -> float:
        """Return the floor of the threshold, or infinity once `k_max` tokens are drafted."""
        return self.floor if drafted < self.k_max else math.inf

    def observe(
        self, confidences: Sequence[float], accepted: int, *, candidates: int | None = None, other: int = 0
    ) -> None:
        """Update the running mean of the acceptance rate, and the threshold."""
        if not confidences:
            return
        rate = accepted / len(confidences)
        past = rate if self.acceptance is None else self.acceptance
        self.acceptance = self.momentum * past + (1 - self.momentum) * rate
        moved = self.threshold + (self.step if self.acceptance < self.target else -self.step)
        threshold = self.inertia * self.threshold + (1 - self.inertia) * moved
        self.threshold = min(max(threshold, self.floor), self.ceiling)

    def start(self) -> Self:
        """Return a copy with this controller's initial threshold."""
        return dataclasses.replace(self, threshold=self._start)
