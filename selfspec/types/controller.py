"""A controller's specification in a profile, and when it ends a draft: plain data. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from selfspec.basics.checked_model import Data

Option = Annotated[int, Field(ge=-(10**9), le=10**9)] | Annotated[float, Field(allow_inf_nan=False)]


class ControllerSpec(Data):
    """The registered name of a controller, and its options, which `selfspec.controllers` checks."""

    name: str = Field(description="Name: fixed, static, adaptive or rate.")
    options: dict[str, Option] = Field(
        {}, description="Options, such as threshold or k_max; omitted options keep their defaults."
    )


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
