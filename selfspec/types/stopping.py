"""When a controller ends a draft, as plain data that a device can apply without asking the controller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChanceCurve:
    """Chances by confidence, linear between `knots`, as in `AcceptanceCurve`: of a token, and of the one after it."""

    knots: tuple[float, ...]
    accepted: tuple[float, ...]
    following: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """A controller's decisions on one draft: after its n-th token, of confidence c, it goes on if both hold.

    c is at least `least[n - 1]`; without a `curve` nothing else matters. With one, the chance that all n tokens and
    the next one are accepted is above `prices[n - 1]`: the product of `accepted` at their confidences, and `following`
    at c. Both tuples have a value for each token that a draft may have.
    """

    least: tuple[float, ...]
    prices: tuple[float, ...] = ()
    curve: ChanceCurve | None = None

    @property
    def certain(self) -> int:
        """The number of tokens that are drafted whatever their confidences are."""
        return 1 + next((n for n, least in enumerate(self.least) if least > 0 or self.curve), len(self.least))

    @property
    def most(self) -> int:
        """The most tokens that a draft can have."""
        return next((n for n, least in enumerate(self.least, 1) if least > 1), len(self.least) + 1)
