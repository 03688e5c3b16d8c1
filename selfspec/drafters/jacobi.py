"""Parallel decoding as a fixed point (Santilli et al. 2305.10427): a block guessed at once, mended pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from selfspec.basics.errors import SelfspecError
from selfspec.drafters.controlled import guessed
from selfspec.proposers.base import Guess
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import GUESSED, JACOBI, NO_WORK, Work

JacobiMethod = Literal["jacobi", "gauss-seidel", "hybrid"]
Start = Literal["padding", "prompt", "before"]


@dataclass(slots=True)
class _Block:
    """The block of one sequence: where it begins and ends in the text, and what is guessed after the text so far."""

    prompt: int
    begin: int
    end: int
    guess: list[int] = field(default_factory=list)
    sent: tuple[int, ...] = ()  # of the guess, what is being verified


class JacobiDrafter:
    """Drafts the block as the last pass would have it: every pass is one Jacobi iteration of all its places.

    `jacobi`: one block, the whole rest of the text (of which a verification holds so much); `gauss-seidel`: blocks of
    `block` tokens, each converged before the next begins; `hybrid`: the same for the first `parallel` tokens of an
    answer, and one token at a time from there. What has converged is committed, so a block takes at most as many
    passes as it has tokens. `start`: what an unknown place holds at first: `padding`, a token that says nothing;
    `prompt`, the prompt's token at the same place; `before`, the text's token one block earlier. An end of sequence
    in a block that has not converged ends the draft, not the text. Raises `SelfspecError` for blocks below two tokens.
    """

    hidden: Sequence[int] = ()
    drafts = True

    def __init__(
        self, method: JacobiMethod = "gauss-seidel", *, block: int = 8, parallel: int = 64, start: Start = "before"
    ) -> None:
        if block < 2 or parallel < 1:
            raise SelfspecError(
                f"block {block}, parallel {parallel}: expected blocks of 2 tokens or more, parallel above 0"
            )
        self.method, self.block, self.parallel, self.start = method, block, parallel, start
        self._blocks: dict[SequenceState, _Block] = {}

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """The first block begins after the prompt."""
        n = len(seq.tokens)
        self._blocks[seq] = _Block(n, n, n)

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence's block."""
        self._blocks.pop(seq, None)

    def max_work(self, limit: Limit) -> Work:
        """A guess, however long."""
        return GUESSED if min(limit.depth, limit.nodes) > 0 else NO_WORK

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """The rest of each sequence's block, as guessed so far."""
        return [self._drafted(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """What the pass would have at each place that it did not commit is the next guess there."""
        if (block := self._blocks.get(seq)) is None:
            return
        sent, block.sent = block.sent, ()
        drafted = len(sent) if outcome.draft.tokens[: len(sent)] == sent else 0
        emitted = len(outcome.path) + 1
        known = block.guess[max(emitted, drafted + 1) :]
        assert outcome.step.logits is not None
        block.guess = outcome.step.logits[0, emitted : drafted + 1].argmax(-1).tolist() + known

    def _drafted(self, seq: SequenceState, limit: Limit) -> Draft:
        n, room = len(seq.tokens), min(limit.depth, limit.nodes)
        block = self._blocks.get(seq)
        if block is None or (self.method == "hybrid" and n - block.prompt >= self.parallel):
            return Draft()
        if n >= block.end:
            size = room + 1 if self.method == "jacobi" else self.block
            block.begin, block.end, block.guess = n, n + size, []
        deep = max(0, min(block.end - n - 1, room))
        block.guess += [self._first(seq, block, place) for place in range(n + len(block.guess), n + deep)]
        tokens = list[int]()
        for token in block.guess[:deep]:
            tokens.append(token)
            if token in seq.ends:
                break
        block.sent = tuple(tokens)
        return guessed(Guess(tokens, (), JACOBI))

    def _first(self, seq: SequenceState, block: _Block, place: int) -> int:
        """What stands at a place of the text of which nothing is known yet."""
        earlier = place - (block.end - block.begin if self.start == "before" else block.prompt)
        known = earlier < len(seq.tokens) if self.start == "before" else earlier < block.prompt
        if self.start != "padding" and earlier >= 0 and known and seq.tokens[earlier] not in seq.ends:
            return seq.tokens[earlier]
        return next(token for token in count() if token not in seq.ends)
