"""What every controller is: the protocol, and how one is made of its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from selfspec.basics.errors import SelfspecError
from selfspec.facts.controller import ControllerSpec
from selfspec.facts.limits import WIDEST_DRAFT


class Controller(Protocol):
    """Decides, token by token, whether drafting goes on, and then how many candidates stand beside each token.

    What is drafted is a function of the confidences (draft probabilities of the drafted tokens) and of what was
    observed before, so that a replay decides as real decoding does.
    """

    def go_on(self, confidences: Sequence[float]) -> bool:
        """Whether to draft another token after those with these confidences (one at least)."""

    def beside(self, confidences: Sequence[float], most: int) -> Sequence[int]:
        """How many further candidates are to stand beside each drafted token, `most` each."""

    def lowest(self, drafted: int) -> float:
        """The lowest confidence of the `drafted`-th token after which it may go on; infinite where it never does."""

    def observe(self, confidences: Sequence[float], accepted: int, *, candidates: int = 0, leaf: bool = False) -> None:
        """Learn from a verified draft: each token's confidence, and how many from the first on were accepted.

        `candidates`: how many further ones stood beside them; `leaf`: whether one of those was right where the chain
        broke.
        """

    def fresh(self) -> Controller:
        """A copy in the state this controller was made in."""

    def spec(self) -> ControllerSpec:
        """Name and options as they now stand (a learnt threshold included), for `make_controller`."""


@dataclass
class Options:
    """What the controllers share: they are made of their options, which are their dataclass fields.

    A field with `metadata={"option": False}` is none.
    """

    name: ClassVar[str]

    def beside(self, confidences: Sequence[float], most: int) -> Sequence[int]:
        """As many as there may be."""
        return [most] * len(confidences)

    def observe(self, confidences: Sequence[float], accepted: int, *, candidates: int = 0, leaf: bool = False) -> None:
        """Learn nothing."""

    def fresh(self) -> Self:
        """A copy in the state this controller was made in."""
        return dataclasses.replace(self)

    def spec(self) -> ControllerSpec:
        """Name and options, as they now stand."""
        return ControllerSpec(name=self.name, options={name: getattr(self, name) for name in self.known()})

    @classmethod
    def known(cls) -> list[str]:
        """The names of its options."""
        return [f.name for f in dataclasses.fields(cls) if f.init and f.metadata.get("option", True)]

    def _count(self, option: str) -> None:
        value = getattr(self, option)
        if value != int(value) or not 1 <= value <= WIDEST_DRAFT:
            raise SelfspecError(
                f"controller '{self.name}': {option} {value}: want a whole number from 1 to {WIDEST_DRAFT}"
            )
        setattr(self, option, int(value))

    def _shares(self, *options: str) -> None:
        for option in options:
            value = getattr(self, option)
            if not 0 <= value <= 1:
                raise SelfspecError(f"controller '{self.name}': {option} {value}: want a number from 0 to 1")
