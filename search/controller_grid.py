"""The controllers that are in play while a search tunes when drafting stops, and how long their drafts may be."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.controllers import AdaptiveThreshold, Controller, FixedK, RateOptimal, StaticThreshold
from selfspec.types.costs import CostModel

LONGEST_DRAFT = 12  # tokens that the controllers in play may draft
LONG_ENOUGH = 0.98  # of the speed of the longest drafts, were every token right: what shorter ones in play must reach
LOWEST_THRESHOLD, LONGEST_FIXED = 0.05, 3


def controllers_in_play(depth: int) -> list[Controller]:
    """Fixed lengths, thresholds, adaptive thresholds and the rate-optimal rule, all drafting at most `depth` tokens.

    Fixed lengths are short ones: a replay drafts as deep as a fixed length says from every place, while thresholds end
    most drafts early.
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
    """The fewest tokens of a draft, `most` at the most, with which hardly any speed can be lost.

    Were every drafted token right, drafts of that length would bring `LONG_ENOUGH` of the speed that any up to `most`
    would; `draft`: seconds of a draft step. Where drafts are dear, long ones hardly bring more even then.
    """

    def speed(k: int) -> float:
        return (k + 1) / (costs.round + k * draft + costs.verification(k + 1))

    speeds = {k: speed(k) for k in range(1, most + 1)}
    return min(k for k, of in speeds.items() if of >= LONG_ENOUGH * max(speeds.values()))


def deepest(controllers: Sequence[Controller]) -> int:
    """The most tokens that any of the controllers may draft."""
    depth = 1
    while any(c.lowest(depth) <= 1 for c in controllers):
        depth += 1
    return depth
