"""The controllers that a search tries for each path, and the longest drafts of these controllers."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.controllers import AdaptiveThreshold, Controller, FixedK, RateOptimal, StaticThreshold
from selfspec.types.costs import CostModel

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
