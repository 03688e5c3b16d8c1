"""What every proposer is, and how sure of its guesses one may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

MEMORY = 0.98  # what a guess still counts for when the next one is made
STRENGTH = 8.0  # guesses that the first chances count for


class Guess(NamedTuple):
    """How a text may go on: tokens, and for each the chance that it is right where those before it are.

    `source`: the name of the proposer, which `ProposerChain` fills in.
    """

    tokens: Sequence[int] = ()
    chances: Sequence[float] = ()
    source: str = ""

    def cut(self, most: int, source: str | None = None) -> Guess:
        """At most `most` tokens of it; of `source`, where that is said."""
        return Guess(self.tokens[:most], self.chances[:most], self.source if source is None else source)


NO_GUESS = Guess()


class ProposerReader(Protocol):
    """What a proposer knows of one text, token by token. What it guesses follows from the text alone."""

    def append(self, token: int) -> None:
        """The text has another token."""

    def guess(self, drafted: Sequence[int], most: int) -> Guess:
        """At most `most` tokens that may follow the text and the tokens `drafted` after it."""


class Proposer(Protocol):
    """Guesses how texts go on, at next to no cost."""

    @property
    def name(self) -> str:
        """Of what it guesses, in figures."""

    def reader(self) -> ProposerReader:
        """One for a text that has no token yet."""


@runtime_checkable
class LearningProposer(Proposer, Protocol):
    """A proposer that what was decoded is told to. It guesses nothing of texts with a seed, and learns none of them."""

    def learn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """A text has ended."""


@dataclass(slots=True)
class Chances:
    """How often guesses were right, for each strength from 0 to the last; `first`: before any was made."""

    first: Sequence[float]
    _seen: list[float] = field(init=False)
    _right: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._seen = [STRENGTH] * len(self.first)
        self._right = [STRENGTH * chance for chance in self.first]

    def see(self, strength: int, right: bool) -> None:
        """A guess of that strength was right, or was not."""
        at = min(strength, len(self.first) - 1)
        self._seen[at] = MEMORY * self._seen[at] + 1
        self._right[at] = MEMORY * self._right[at] + right

    def __call__(self, strength: int) -> float:
        """The chance that a guess of that strength is right."""
        at = min(strength, len(self.first) - 1)
        return self._right[at] / self._seen[at]
