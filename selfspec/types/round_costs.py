"""The costs of passes over a batch of sequences, by number of tokens: plain data, measured on the machine in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from selfspec.basics.errors import SelfspecError
from selfspec.types.costs import CostModel
from selfspec.types.limits import MOST_ROWS


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of a pass by its total number of tokens, 0, 1, 2, .., whatever the number of sequences.

    `verify[n]`: a full pass over n tokens, with the round's other work; `draft[n]`: a pass along the draft path. Beyond
    the last entry, costs rise with the mean slope of the upper half of the entries. Raises `SelfspecError` if `verify`
    or `draft` has fewer than three entries.
    """

    verify: tuple[float, ...]
    draft: tuple[float, ...]

    def __post_init__(self) -> None:
        if min(len(self.verify), len(self.draft)) < 3:
            raise SelfspecError("costs of passes: expected at least those over 0, 1 and 2 tokens")

    @classmethod
    def from_measurements(cls, verify: Mapping[int, float], draft: Mapping[int, float], *, most: int) -> PassCosts:
        """Interpolate measured costs, given by number of tokens, up to `most` tokens; costs never fall with tokens."""
        return cls(_filled(verify, most), _filled(draft, most))

    @classmethod
    def from_cost_model(cls, costs: CostModel, draft: float) -> PassCosts:
        """Return the costs of a profile, which are of one sequence; `draft`: the seconds of a draft step."""
        full = (costs.round + costs.verification(rows) for rows in range(1, MOST_ROWS + 1))
        return cls((0.0, *full), (0.0, *costs.passes(draft)))

    def verified(self, tokens: int) -> float:
        """Return the seconds of a full pass over `tokens` tokens."""
        return _seconds_for(self.verify, tokens)

    def wider(self, tokens: int, more: int) -> float:
        """Return the seconds that `more` further tokens add to a full pass over `tokens` tokens."""
        return self.verified(tokens + more) - self.verified(tokens)

    def drafted(self, tokens: int) -> float:
        """Return the seconds of a pass along the draft path over `tokens` tokens."""
        return _seconds_for(self.draft, tokens)


def _filled(timed: Mapping[int, float], most: int) -> tuple[float, ...]:
    known = sorted(timed.items())
    for i in range(len(known) - 2, -1, -1):  # disturbed measurements are too long, never too short
        known[i] = known[i][0], min(known[i][1], known[i + 1][1])
    filled = [0.0]
    for tokens in range(1, max(most, 2) + 1):
        high = next((i for i, (n, _) in enumerate(known) if n >= tokens), len(known) - 1)
        (a, x), (b, y) = known[max(high - 1, 0)], known[max(high, 1) if len(known) > 1 else high]
        seconds = y if a == b else x + (y - x) * (tokens - a) / (b - a)
        filled.append(seconds)
    return tuple(filled)


def _seconds_for(seconds: tuple[float, ...], tokens: int) -> float:
    last = len(seconds) - 1
    if tokens <= last:
        return seconds[tokens]
    half = last // 2
    return seconds[last] + (tokens - last) * (seconds[last] - seconds[half]) / (last - half)
