"""The base class of controllers."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from selfspec.basics.errors import SelfspecError
from selfspec.types.acceptance import PayoffModel
from selfspec.types.controller import ControllerSpec, StoppingRule
from selfspec.types.methods import WIDEST_DRAFT


@dataclass
class Controller(ABC):
    """The policy that decides after each drafted token whether to draft another, and how many candidates to verify.

    A subclass is a dataclass with a `name` that implements `go_on` and `min_confidence`; `register` makes it known by
    its name. Its options are its dataclass fields, except fields with `metadata={"option": False}`: they are numbers
    and have defaults, and `__post_init__` raises `SelfspecError` for a bad value. For every state of the controller:

    - `go_on` returns False at 64 drafted tokens (`WIDEST_DRAFT`), whatever their confidences.
    - `go_on` returns False if the last confidence is below `min_confidence(len(confidences))`.
    - `make_controller(self.spec(), self.learnt())` decides as this controller does.

    Decisions depend only on the draft's confidences in its tokens and on earlier observations, so the search's replay
    decides as real decoding does; the exception is `ends_draft`, which the replay cannot ask. A confidence is the
    estimated probability, from 0 to 1, that the target accepts the token. `start` makes a copy without observations,
    for another sequence. `asks_payoff`: whether the controller decides by a `PayoffModel`, which `with_payoff` sets
    before use.
    """

    name: ClassVar[str]
    asks_payoff: ClassVar[bool] = False

    @abstractmethod
    def go_on(self, confidences: Sequence[float]) -> bool:
        """Return whether to draft another token, by the confidences of the drafted tokens (at least one)."""

    @abstractmethod
    def min_confidence(self, drafted: int) -> float:
        """Return the lowest confidence in the `drafted`-th token at which drafting may go on; infinity: it may not."""

    def ends_draft(self, token: int) -> bool:
        """Return whether the draft ends after the token with this id, whatever `go_on` says; by default False.

        A controller that implements this leaves `stopping` as it is.
        """
        return False

    def stopping(self, most: int) -> StoppingRule | None:
        """Return the decisions of `go_on` on drafts of up to `most` tokens as numbers, for rounds on a device.

        None (the default): the rule cannot be written so, and rounds of one sequence run on the host.
        """
        return None

    def acceptance_chances(self, confidences: Sequence[float], first: float) -> tuple[float, float]:
        """Return two probabilities: that the next token is accepted, and that a later token is.

        The next token is accepted only if all drafted tokens before it are, which the first probability includes. The
        second is conditional on the acceptance of the token before the later token. `first`: the recent acceptance rate
        of a draft's first token; by default it applies to every token.
        """
        return first ** (len(confidences) + 1), first

    def candidates(self, confidences: Sequence[float], most: int) -> Sequence[int]:
        """Return the number of candidates at each position, drafted token included: 1 to `most`, by default `most`."""
        return [most] * len(confidences)

    @property
    def looks_up(self) -> bool:
        """Whether the controller ever has lookup tokens verified without drafting."""
        return type(self).lookup_length is not Controller.lookup_length

    def lookup_length(self, chances: Sequence[float], *, only: bool = False) -> int:
        """Return how many lookup tokens to verify without drafting; 0 (the default): draft instead.

        `chances`: for each token, the chance that it is right if all before it are. `only`: whether nothing can be
        drafted instead, so that 0 makes a plain decode step.
        """
        return 0

    def observe(  # noqa: B027 (a controller need not learn)
        self, confidences: Sequence[float], accepted: int, *, candidates: int | None = None, other: int = 0
    ) -> None:
        """Learn from a verified draft; by default nothing.

        `confidences`: the confidences of the drafted tokens, of which the first `accepted` were accepted. `candidates`:
        how many tokens were verified at all positions together (None: the drafted tokens alone). `other`: how many
        tokens of other branches were accepted after them, such as another candidate for the first rejected one.
        """

    def with_payoff(self, payoff: PayoffModel, *, rate: float | None = None) -> Self:
        """Return a controller with the costs and gains `payoff`; by default, controllers do not use them.

        `rate`: the initial tokens in the time of a plain decode step; None: unchanged.
        """
        return self

    def set_context(self, keys: int) -> None:  # noqa: B027 (costs need not matter)
        """Set the context length in tokens before each draft, since costs may depend on it; by default ignored."""

    def learnt(self) -> PayoffModel | None:
        """Return the controller's payoff model, corrected by its observations; None if it has no payoff model."""
        return None

    def start(self) -> Self:
        """Return a copy without observations, as this controller was when it was created."""
        return dataclasses.replace(self)

    def spec(self) -> ControllerSpec:
        """Return the controller's name and current options (a learnt threshold included), for `make_controller`."""
        return ControllerSpec(name=self.name, options={name: getattr(self, name) for name in self.known()})

    @classmethod
    def known(cls) -> list[str]:
        """Return the names of the controller's options."""
        return [f.name for f in dataclasses.fields(cls) if f.init and f.metadata.get("option", True)]

    def _least(self, most: int, threshold: float = 0.0) -> tuple[float, ...]:
        """Return the lowest confidence at which drafting goes on after each of `most` tokens, `threshold` at least."""
        return tuple(max(threshold, self.min_confidence(n)) for n in range(1, most + 1))

    def check_count(self, option: str) -> None:
        """Make the option an int. Raises `SelfspecError` unless it is a whole number from 1 to `WIDEST_DRAFT`."""
        value = getattr(self, option)
        if value != int(value) or not 1 <= value <= WIDEST_DRAFT:
            raise SelfspecError(
                f"controller '{self.name}': {option} {value}: expected a whole number from 1 to {WIDEST_DRAFT}"
            )
        setattr(self, option, int(value))

    def check_shares(self, *options: str) -> None:
        """Raise `SelfspecError` unless each option is a number from 0 to 1."""
        for option in options:
            value = getattr(self, option)
            if not 0 <= value <= 1:
                raise SelfspecError(f"controller '{self.name}': {option} {value}: expected a number from 0 to 1")
