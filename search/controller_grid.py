"""The controllers in play while a search tunes when drafting stops, and the length of their drafts."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.controllers import AdaptiveThreshold, Controller, FixedK, RateOptimal, StaticThreshold
from selfspec.types.costs import CostModel

LONGEST_DRAFT = 12  # the longest draft of the controllers in play
LONG_ENOUGH = 0.98  # of the best speed, were every token right: the speed that the longest draft in play must reach
LOWEST_THRESHOLD, LONGEST_FIXED = 0.05, 3


def controllers_in_play(depth: int) -> list[Controller]:
    """Return fixed lengths, thresholds, adaptive thresholds and the rate-optimal rule, with drafts of at most `depth`.

    Fixed lengths are short, because a replay drafts to a fixed length from every start, while thresholds end most
    drafts early.
    """
    lengths = sorted({min(k, depth) for k in (1, 2, 3, 4, 6, 8, 12)})
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
    """Return the least draft length, at most `most`, at which hardly any speed can be lost.

    Were every drafted token right, drafts of that length would reach `LONG_ENOUGH` of the best speed of all lengths up
    to `most`; `draft`: the seconds of a draft step. Where drafts are expensive, long ones hardly gain even then.
    """

    def speed(k: int) -> float:
        return (k + 1) / (costs.round + k * draft + costs.verification(k + 1))

    speeds = {k: speed(k) for k in range(1, most + 1)}
    return min(k for k, rate in speeds.items() if rate >= LONG_ENOUGH * max(speeds.values()))


def deepest(controllers: Sequence[Controller]) -> int:
    """Return the most tokens that any of the controllers may draft."""
    depth = 1
    while any(c.min_confidence(depth) <= 1 for c in controllers):
        depth += 1
    return depth
