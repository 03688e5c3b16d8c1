"""Parallel decoding by Jacobi iterations: each pass refines a block, or generates and verifies n-grams (lookahead)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Literal, TypeVar

from selfspec.basics.errors import SelfspecError
from selfspec.drafters.controlled import as_draft
from selfspec.proposers.base import Proposal
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import JACOBI, LOOKAHEAD, LOOKUP_WORK, NO_WORK, Work
from selfspec.types.methods import WIDEST_DRAFT

JacobiMethod = Literal["jacobi", "gauss-seidel", "hybrid"]
Start = Literal["padding", "prompt", "before"]
State = TypeVar("State")


@dataclass(slots=True)
class _Block:
    """The current block of one sequence, at positions `begin` to `end` - 1; `prompt`: the prompt's length.

    `guess`: the current iterate of the tokens after the text.
    """

    prompt: int
    begin: int
    end: int
    guess: list[int] = field(default_factory=list)
    sent: tuple[int, ...] = ()  # the part of the guess in the verification pass


class _FromLastPass(ABC, Generic[State]):
    """Base of drafters that draft what the last pass predicted, by a state for each sequence."""

    hidden: Sequence[int] = ()
    drafts = True

    def __init__(self) -> None:
        self._states: dict[SequenceState, State] = {}

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence's state."""
        self._states.pop(seq, None)

    def max_work(self, limit: Limit) -> Work:
        """Return the work of one lookup draft, whatever its size."""
        return LOOKUP_WORK if min(limit.depth, limit.nodes) > 0 else NO_WORK

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return a draft for each sequence."""
        return [self._drafted(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    @abstractmethod
    def _drafted(self, seq: SequenceState, limit: Limit) -> Draft:
        """Return the draft of one sequence."""


class JacobiDrafter(_FromLastPass[_Block]):
    """Jacobi drafter: drafts the tokens that the last pass predicted for a block, so a pass is one Jacobi iteration.

    Methods: `jacobi` uses one block for all remaining tokens, cut to the size of a verification pass. `gauss-seidel`
    uses blocks of `block` tokens, each converged before the next begins. `hybrid` uses gauss-seidel for the first
    `parallel` tokens of an answer, then plain decoding. Converged tokens are committed, so a block takes at most as
    many passes as it has tokens.

    `start`: the initial token of an unknown position. `padding`: the lowest token id that is not an end-of-sequence
    token; `prompt`: the prompt's token at the same offset; `before`: the token one block earlier. An end-of-sequence
    token in an unconverged block ends the draft, not the text. Raises `SelfspecError` for blocks of fewer than two
    tokens, and if `parallel` is below 1.
    """

    def __init__(
        self, method: JacobiMethod = "gauss-seidel", *, block: int = 8, parallel: int = 64, start: Start = "before"
    ) -> None:
        if block < 2 or parallel < 1:
            raise SelfspecError(
                f"block {block}, parallel {parallel}: expected blocks of 2 tokens or more, parallel above 0"
            )
        self.method, self.block, self.parallel, self.start = method, block, parallel, start
        super().__init__()

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Place the first block after the prompt."""
        n = len(seq.tokens)
        self._states[seq] = _Block(seq.prompt, n, n)

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Replace the iterate at each uncommitted position with the pass's argmax there."""
        if (block := self._states.get(seq)) is None:
            return
        sent, block.sent = block.sent, ()
        drafted = len(sent) if outcome.draft.tokens[: len(sent)] == sent else 0
        emitted = len(outcome.path) + 1
        known = block.guess[max(emitted, drafted + 1) :]
        assert outcome.step.logits is not None
        block.guess = outcome.step.logits[0, emitted : drafted + 1].argmax(-1).tolist() + known

    def _drafted(self, seq: SequenceState, limit: Limit) -> Draft:
        n, max_tokens = len(seq.tokens), min(limit.depth, limit.nodes)
        block = self._states.get(seq)
        if block is None or (self.method == "hybrid" and n - block.prompt >= self.parallel):
            return Draft()
        if n >= block.end:
            size = max_tokens + 1 if self.method == "jacobi" else self.block
            block.begin, block.end, block.guess = n, n + size, []
        deep = max(0, min(block.end - n - 1, max_tokens))
        block.guess += [self._first(seq, block, place) for place in range(n + len(block.guess), n + deep)]
        tokens = list[int]()
        for token in block.guess[:deep]:
            tokens.append(token)
            if token in seq.ends:
                break
        block.sent = tuple(tokens)
        return as_draft(Proposal(tokens, (), JACOBI))

    def _first(self, seq: SequenceState, block: _Block, place: int) -> int:
        """Return the initial token of an unknown position `place`, by the option `start`."""
        earlier = place - (block.end - block.begin if self.start == "before" else block.prompt)
        known = earlier < len(seq.tokens) if self.start == "before" else earlier < block.prompt
        if self.start != "padding" and earlier >= 0 and known and seq.tokens[earlier] not in seq.ends:
            return seq.tokens[earlier]
        return next(token for token in count() if token not in seq.ends)


@dataclass(slots=True)
class _Branches:
    """One sequence's window and n-gram pool; `levels[j][i]`: the token of level (trajectory) j in column i."""

    levels: list[list[int]]
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)  # n-grams by first token, oldest first
    last: list[int] | None = None  # nodes of the window's last level during verification
    sent: tuple[int, ...] = ()  # tokens of the last draft


@dataclass(slots=True)
class _Tree:
    """Token tree under construction; equal tokens below one parent are one node."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    node_ids: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, parent: int, token: int) -> int:
        """Return the node of `token` below `parent`, adding it if it is new."""
        node = self.node_ids.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node


class LookaheadDrafter(_FromLastPass[_Branches]):
    """Lookahead drafter: drafts the pool's n-grams that begin with the last token, and the window for new n-grams.

    `window` (W): columns of the window; `ngram` (N): tokens of an n-gram, so the window has N - 1 levels; `guesses`
    (G): the maximum of n-grams for one first token in the pool, and so in one draft. The token of level j in column i
    is at position i + j after the text. It attends to level 0 up to column i, then to column i. That attention
    mask is a token tree, so the window is part of the draft, and its correct tokens are accepted as in any draft. Each
    pass predicts the successors of the window's last level. These successors complete an n-gram in every column and
    become the next level. If the whole window exceeds the draft's limit, only n-grams of the pool are drafted.
    Raises `SelfspecError` for sizes that no verification pass holds.
    """

    def __init__(self, *, window: int = 7, ngram: int = 4, guesses: int = 7) -> None:
        rows = window * (ngram - 1)
        if window < 1 or ngram < 2 or guesses < 1 or rows > WIDEST_DRAFT:
            raise SelfspecError(
                f"window {window}, ngram {ngram}, guesses {guesses}: expected a window of at least 1 token, n-grams of "
                f"at least 2, at least 1 guess, and window x (ngram - 1) up to {WIDEST_DRAFT}"
            )
        self.window, self.ngram, self.guesses = window, ngram, guesses
        super().__init__()

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Fill the window with consecutive prompt tokens."""
        levels = [
            [self._replace_end_token(seq, seq.tokens[(i + j) % len(seq.tokens)]) for i in range(self.window)]
            for j in range(self.ngram - 1)
        ]
        self._states[seq] = _Branches(levels)

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Complete an n-gram in each column with the argmax after the last level, which becomes the next level."""
        own = self._states.get(seq)
        if own is None or own.last is None:
            return
        nodes, own.last = own.last, None
        if outcome.draft.tokens[: len(own.sent)] != own.sent:
            return
        assert outcome.step.logits is not None
        predicted: list[int] = outcome.step.logits[0, [node + 1 for node in nodes]].argmax(-1).tolist()
        for i, token in enumerate(predicted):
            first, *after = [level[i] for level in own.levels]
            ngrams = own.pool.setdefault(first, {})
            gram = (*after, token)
            ngrams.pop(gram, None)
            ngrams[gram] = None
            if len(ngrams) > self.guesses:
                ngrams.pop(next(iter(ngrams)))
        own.levels = [*own.levels[1:], [self._replace_end_token(seq, token) for token in predicted]]

    def _drafted(self, seq: SequenceState, limit: Limit) -> Draft:
        own = self._states.get(seq)
        if own is None:
            return NO_DRAFT
        tree, rows = _Tree(), self.window * (self.ngram - 1)
        window_fits = limit.nodes >= rows and limit.depth >= self.window + self.ngram - 2
        left = limit.nodes - rows if window_fits else limit.nodes
        for gram in reversed(own.pool.get(seq.tokens[-1], {})):
            if len(tree.tokens) + len(gram) > left:
                break
            node = -1
            for token in gram[: limit.depth]:
                node = tree.add(node, token)
                if token in seq.ends:
                    break
        own.last = self._windowed(own, tree) if window_fits else None
        own.sent = tuple(tree.tokens)
        sources = (LOOKAHEAD,) * len(own.sent)
        return Draft(own.sent, tuple(tree.parents), None, (-1,) * len(own.sent), (), LOOKUP_WORK, sources)

    def _windowed(self, own: _Branches, tree: _Tree) -> list[int]:
        """Add the window below the tree's root; return the nodes of its last level."""
        first, *later = own.levels
        nodes = list[int]()
        for token in first:
            nodes.append(tree.add(nodes[-1] if nodes else -1, token))
        for level in later:
            nodes = [tree.add(above, token) for above, token in zip(nodes, level, strict=True)]
        return nodes

    def _replace_end_token(self, seq: SequenceState, token: int) -> int:
        """Return `token`; for an end-of-sequence token, which cannot have children, another token instead."""
        return token if token not in seq.ends else next(other for other in count() if other not in seq.ends)
