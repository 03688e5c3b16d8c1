"""The interface of proposers, and their acceptance statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

MEMORY = 0.98  # decay of an observation's weight with each later observation
STRENGTH = 8.0  # weight of the prior rates, in observations


class Proposal(NamedTuple):
    """Lookup tokens: a likely continuation of a text.

    `chances[i]`: the chance that token i is right if all tokens before it are. `source`: the name of the proposer,
    which a `ProposerState` fills in.
    """

    tokens: Sequence[int] = ()
    chances: Sequence[float] = ()
    source: str = ""

    def cut(self, most: int, source: str | None = None) -> Proposal:
        """Return a proposal of the first `most` tokens; `source`: a new source, None: unchanged."""
        return Proposal(self.tokens[:most], self.chances[:most], self.source if source is None else source)


NO_PROPOSAL = Proposal()


class ProposerReader(Protocol):
    """A proposer's state for one text, which is read token by token."""

    def append(self, token: int) -> None:
        """Append a token to the text."""

    def look_up(self, drafted: Sequence[int], most: int) -> Proposal:
        """Return at most `most` lookup tokens that may follow the text and then the tokens `drafted`."""


class Proposer(Protocol):
    """A source of lookup tokens, at almost no cost."""

    @property
    def name(self) -> str:
        """The proposer's name, which statistics give as the source of its lookup tokens."""

    def reader(self) -> ProposerReader:
        """Return a reader for an empty text."""


@runtime_checkable
class LearningProposer(Proposer, Protocol):
    """A proposer that learns from decoded texts. Sequences with a seed neither use nor teach such a proposer."""

    def learn(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Learn from a finished text."""


@dataclass(slots=True)
class AcceptanceStats:
    """Acceptance rates of lookup tokens by match strength; `first[s]`: the prior rate for strength s.

    Strengths beyond the last entry of `first` count as the last.
    """

    first: Sequence[float]
    _counts: list[float] = field(init=False)
    _right: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._counts = [STRENGTH] * len(self.first)
        self._right = [STRENGTH * chance for chance in self.first]

    def record(self, strength: int, right: bool) -> None:
        """Record whether a lookup token of this strength was right."""
        index = min(strength, len(self.first) - 1)
        self._counts[index] = MEMORY * self._counts[index] + 1
        self._right[index] = MEMORY * self._right[index] + right

    def __call__(self, strength: int) -> float:
        """Return the chance that a lookup token of this strength is right."""
        index = min(strength, len(self.first) - 1)
        return self._right[index] / self._counts[index]
