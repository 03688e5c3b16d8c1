"""The origin of each token of a generation: plain data, made from its rounds. Imports no torch and no tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeVar

from selfspec.types.draft_work import LOOKUP_WORK
from selfspec.types.stats import Round

T = TypeVar("T")


class Origin(StrEnum):
    """The origin of an emitted token."""

    PLAIN = "plain"
    ACCEPTED_DRAFT = "accepted draft"
    ACCEPTED_CANDIDATE = "accepted candidate"
    ACCEPTED_LOOKUP = "accepted lookup"
    CORRECTED = "corrected"
    BONUS = "bonus"

    @property
    def meaning(self) -> str:
        """A short explanation, for legends."""
        return _MEANINGS[self]


_MEANINGS = {
    Origin.PLAIN: "the model's own, nothing was drafted",
    Origin.ACCEPTED_DRAFT: "drafted, and accepted",
    Origin.ACCEPTED_CANDIDATE: "another candidate, and accepted",
    Origin.ACCEPTED_LOOKUP: "a lookup token, and accepted",
    Origin.CORRECTED: "the model's own, for a rejected token",
    Origin.BONUS: "the model's own, after a whole draft",
}


@dataclass(frozen=True, slots=True)
class Rejected:
    """A drafted token that was rejected; `confidence` as in `TokenEvent`."""

    token: int
    text: str
    confidence: float | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One emitted token and its origin.

    `text`: the text that the token added to the generation: '' for special tokens, for all but the last of the tokens
    that share a character, and from a stop string on. `round`: the number of the round, from 1. `place`: a drafted
    token's depth in its draft, from 1; None if the token was not drafted. `confidence`: the draft's confidence in the
    token; None if it was not drafted, and for a position's further candidates, whose confidence is unknown.
    `probability`: the target's probability of the token, the softmax of the raw logits without temperature and
    processors; None unless `probabilities` were requested. `rejected`: tokens rejected at this position before this
    token was taken: the drafted token first, then further candidates. `source`: the name of the proposer that
    proposed the token, even if the draft path drafted the same token; else that of the drafter; None if the token was
    not drafted.
    """

    token: int
    text: str
    origin: Origin
    round: int
    place: int | None = None
    confidence: float | None = None
    probability: float | None = None
    rejected: tuple[Rejected, ...] = ()
    source: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return {
            **asdict(self),
            "origin": str(self.origin),
            "rejected": [asdict(rejected) for rejected in self.rejected],
        }


def origins(done: Round) -> list[Origin]:
    """Return the origin of each token that a round emitted, in order."""
    if not done.proposed:
        return [Origin.PLAIN] * done.tokens
    first: dict[int, int] = {}  # by parent: its first child
    for node, parent in enumerate(done.parents):
        first.setdefault(parent, node)
    drafted = Origin.ACCEPTED_LOOKUP if done.work == LOOKUP_WORK else Origin.ACCEPTED_DRAFT
    result = [drafted if first[done.parents[node]] == node else Origin.ACCEPTED_CANDIDATE for node in done.path]
    result.append(Origin.CORRECTED if _last(done.path) in first else Origin.BONUS)
    return result[: done.tokens]


def token_events(
    tokens: Sequence[int], texts: Sequence[str], rounds: Iterable[Round], text_of: Callable[[int, int], str]
) -> tuple[TokenEvent, ...]:
    """Return the events of the emitted `tokens`, from the `rounds` that emitted them.

    `texts`: the text that each token added. `text_of(i, token)`: the text that `token` would have added as the i-th
    emitted token, for rejected tokens.
    """
    events: list[TokenEvent] = []
    for number, done in enumerate(rounds, 1):
        for i, origin in enumerate(origins(done)):
            index = len(events)
            if index == len(tokens):
                return tuple(events)
            node = done.path[i] if i < len(done.path) else None
            rejected = (
                Rejected(
                    done.proposed[other], text_of(index, done.proposed[other]), _get_or_none(done.confidence, other)
                )
                for other in _rejected(done, i)
            )
            events.append(
                TokenEvent(
                    tokens[index],
                    texts[index],
                    origin,
                    number,
                    place=None if node is None else i + 1,
                    confidence=None if node is None else _get_or_none(done.confidence, node),
                    probability=_get_or_none(done.probabilities, i),
                    rejected=tuple(rejected),
                    source=None if node is None else _get_or_none(done.sources, node),
                )
            )
    return tuple(events)


def counts(events: Iterable[TokenEvent]) -> dict[Origin, int]:
    """Return the number of tokens by origin, in the order of `Origin`; origins without tokens are left out."""
    counted = Counter(event.origin for event in events)
    return {origin: counted[origin] for origin in Origin if counted[origin]}


def _rejected(done: Round, i: int) -> list[int]:
    """Return the nodes that were rejected before a round's i-th emitted token was taken."""
    above = _last(done.path[:i])
    candidates = [node for node, parent in enumerate(done.parents) if parent == above]
    return candidates[: candidates.index(done.path[i])] if i < len(done.path) else candidates


def _last(path: Sequence[int]) -> int:
    """Return the node at the end of a path; -1: the root."""
    return path[-1] if path else -1


def _get_or_none(values: Sequence[T], i: int) -> T | None:
    return values[i] if i < len(values) else None
