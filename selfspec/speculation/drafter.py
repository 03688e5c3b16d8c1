"""The interface of drafters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from selfspec.speculation.drafts import Draft, Outcome, SequenceState
from selfspec.speculation.step import Step


class Drafter(Protocol):
    """Proposes tokens for sequences, round by round.

    A draft for `seq` is at most `seq.room - 1` deep, and nothing hangs below an end-of-sequence token. In sampling,
    what is drafted may depend on what was drawn before, never on the drawn token itself. All randomness comes from
    `seq.sampler`.
    """

    @property
    def hidden(self) -> Sequence[int]:
        """Layers whose streams the full passes should return in `Step.hidden`."""

    def begin(self, seq: SequenceState, prefill: Step) -> None:
        """A sequence starts; `prefill` is the full pass over its prompt but the last token (no logits)."""

    def propose(self, seqs: Sequence[SequenceState]) -> list[Draft]:
        """One draft for each sequence; an empty one makes the round a plain decoding step."""

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """A round of `seq` was verified; `seq.tokens` already holds what was emitted."""

    def end(self, seq: SequenceState) -> None:
        """The sequence is over, however it ended; called once for each `begin`."""
