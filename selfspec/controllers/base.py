"""What every controller is, and how one is made of its options."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from selfspec.basics.errors import SelfspecError
from selfspec.types.acceptance import PayoffModel
from selfspec.types.controller import ControllerSpec
from selfspec.types.limits import WIDEST_DRAFT


@dataclass
class Controller(ABC):
    """Decides after each drafted token whether another is drafted, and how many candidates each place then has.

    What it decides follows from the confidences alone (the draft's probabilities of the tokens that it drafted) and
    from what it observed before, so a replay decides as real decoding does. A controller is the state that one
    sequence carries: `start` gives a sequence one of its own. Its options are its dataclass fields, but for those with
    `metadata={"option": False}`. `asks_payoff`: whether it decides by an `PayoffModel`, to be `told` before it is used.
    """

    name: ClassVar[str]
    asks_payoff: ClassVar[bool] = False

    @abstractmethod
    def go_on(self, confidences: Sequence[float]) -> bool:
        """Whether to draft another token after those with these confidences (one at least)."""

    @abstractmethod
    def lowest(self, drafted: int) -> float:
        """The least confidence of the `drafted`-th token at which it may ever go on; infinite where it never does."""

    def hope(self, confidences: Sequence[float], first: float) -> tuple[float, float]:
        """The chance that the next token would be accepted, and that one is where the one before it was.

        `first`: that of a draft's first token, as it was lately; here, of every token where the one before it is right.
        """
        return first ** (len(confidences) + 1), first

    def candidates(self, confidences: Sequence[float], most: int) -> Sequence[int]:
        """How many candidates each place is to have, the drafted token counted: 1 to `most` each; here, `most`."""
        return [most] * len(confidences)

    def free(self, chances: Sequence[float]) -> int:
        """How many tokens of a guess that costs nothing are worth verifying as they are; 0 (here): draft instead.

        `chances`: of each token, that it is right where those before it are.
        """
        return 0

    def observe(  # noqa: B027 (a controller need not learn)
        self, confidences: Sequence[float], accepted: int, *, candidates: int | None = None, other: bool = False
    ) -> None:
        """Learn from a verified draft; here, nothing.

        `confidences`: of the drafted tokens, of which the first `accepted` were accepted. `candidates`: how many were
        verified at all places together (None: the drafted tokens alone). `other`: whether at the first place whose
        drafted token was wrong another candidate was accepted.
        """

    def told(self, payoff: PayoffModel, *, rate: float | None = None) -> Self:
        """A controller that rests on `payoff`, and starts at `rate` if given; itself where it asks for none."""
        return self

    def learnt(self) -> PayoffModel | None:
        """The outlook it rests on, with what it has observed; None where it asks for none."""
        return None

    def start(self) -> Self:
        """A copy in the state that this controller was made in."""
        return dataclasses.replace(self)

    def spec(self) -> ControllerSpec:
        """Name and options as they now stand (a learnt threshold included), for `make_controller`."""
        return ControllerSpec(name=self.name, options={name: getattr(self, name) for name in self.known()})

    @classmethod
    def known(cls) -> list[str]:
        """The names of its options."""
        return [f.name for f in dataclasses.fields(cls) if f.init and f.metadata.get("option", True)]

    def _count(self, option: str) -> None:
        value = getattr(self, option)
        if value != int(value) or not 1 <= value <= WIDEST_DRAFT:
            raise SelfspecError(
                f"controller '{self.name}': {option} {value}: expected a whole number from 1 to {WIDEST_DRAFT}"
            )
        setattr(self, option, int(value))

    def _shares(self, *options: str) -> None:
        for option in options:
            value = getattr(self, option)
            if not 0 <= value <= 1:
                raise SelfspecError(f"controller '{self.name}': {option} {value}: expected a number from 0 to 1")
