"""The state of one sequence during decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from selfspec.speculation.rules import Rule, find_rule
from selfspec.speculation.sampling import Sampler


class Continuation(Protocol):
    """The interface of a proposer of the tokens that a guide's grammar forces, for one sequence."""

    @property
    def literals(self) -> Sequence[int]:
        """Return the tokens of texts that the grammar spells out, such as keys, from which lookup may draft."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return at most `most` likely tokens after prompt and emitted `tokens`; none if the grammar is free.

        Where the grammar allows a few continuations, such as of whitespace, one of them is proposed, and verified.
        """


@dataclass(slots=True, eq=False)
class SequenceState:
    """The state of one sequence during decoding; only a round changes it. Drafters and caches key their state by it.

    `tokens`: prompt and emitted tokens. `prompt`: the number of prompt tokens. `remaining`: how many tokens the
    sequence may still emit; 0 once it has ended. `row`: the sequence's KV cache row, which the engine assigns.
    `num_cached`: how many tokens had their keys and values in the cache when the sequence joined. `ends`:
    end-of-sequence tokens. `rule`: the verification rule; None: the default rule of the sampler. `stop`: called with
    each emitted token in order; returns whether the sequence ends after that token. `continuation`: the proposer of the
    sequence's guide; None without a guide.
    """

    tokens: list[int]
    remaining: int
    sampler: Sampler
    ends: frozenset[int] = frozenset()
    row: int = 0
    num_cached: int = 0
    rule: Rule | None = None
    stop: Callable[[int], bool] | None = None
    continuation: Continuation | None = None
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    def verification_rule(self) -> Rule:
        """Return `rule`, or the default for the sampler."""
        if self.rule is None:
            self.rule = find_rule(None, self.sampler)
        return self.rule

    def emit(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Append `tokens` up to and including the first that ends the sequence; return the appended tokens."""
        emitted: list[int] = []
        for token in tokens[: self.remaining]:
            emitted.append(token)
            ended = token in self.ends
            if (self.stop is not None and self.stop(token)) or ended:
                self.remaining = len(emitted)
                break
        self.tokens += emitted
        self.remaining -= len(emitted)
        return tuple(emitted)
