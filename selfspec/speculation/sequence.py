"""One sequence while it is decoded. Knows nothing of models, caches and drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from selfspec.speculation.rules import Rule, find_rule
from selfspec.speculation.sampling import Sampler


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence while it is decoded. Only a round changes it; drafters and caches key their own state by it.

    `tokens`: prompt and emitted tokens. `room`: tokens it may still emit; 0 once it has ended. `row`: its cache row,
    which the engine allots. `kept`: how many of its tokens had their keys there when it joined. `ends`: end-of-sequence
    tokens. `rule`: how its drafts are verified; when left out, the one that fits its sampler. `stop`: told each emitted
    token in order, it says whether the sequence ends there.
    """

    tokens: list[int]
    remaining: int
    sampler: Sampler
    ends: frozenset[int] = frozenset()
    row: int = 0
    num_cached: int = 0
    rule: Rule | None = None
    stop: Callable[[int], bool] | None = None

    def verification_rule(self) -> Rule:
        """`rule`, or the one that fits the sampler."""
        if self.rule is None:
            self.rule = find_rule(None, self.sampler)
        return self.rule

    def emit(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Append `tokens` up to and including the first that ends the sequence; what was appended."""
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
