"""Lookahead decoding (Fu et al. 2402.02057): one pass generates n-grams by Jacobi iteration and verifies n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from selfspec.basics.errors import SelfspecError
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.draft_work import LOOKAHEAD, LOOKUP_WORK, NO_WORK, Work
from selfspec.types.limits import WIDEST_DRAFT


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


class LookaheadDrafter:
    """Lookahead drafter: drafts the pool's n-grams that begin with the last token, and the window for new n-grams.

    `window` (W): columns of the window; `ngram` (N): tokens of an n-gram, so the window has N - 1 levels; `guesses`
    (G): the maximum of n-grams for one first token in the pool, and so in one draft. The token of level j in column i
    is at position i + j after the text. It attends to level 0 up to column i, then to column i. That attention
    mask is a token tree, so the window is part of the draft, and its correct tokens are accepted as in any draft. Each
    pass predicts the successors of the window's last level. These successors complete an n-gram in every column and
    become the next level. If the whole window exceeds the draft's limit, only n-grams of the pool are drafted.
    Raises `SelfspecError` for sizes that no verification pass holds.
    """

    hidden: Sequence[int] = ()
    drafts = True

    def __init__(self, *, window: int = 7, ngram: int = 4, guesses: int = 7) -> None:
        rows = window * (ngram - 1)
        if window < 1 or ngram < 2 or guesses < 1 or rows > WIDEST_DRAFT:
            raise SelfspecError(
                f"window {window}, ngram {ngram}, guesses {guesses}: expected a window of at least 1 token, n-grams of "
                f"at least 2, at least 1 guess, and window x (ngram - 1) up to {WIDEST_DRAFT}"
            )
        self.window, self.ngram, self.guesses = window, ngram, guesses
        self._own: dict[SequenceState, _Branches] = {}

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Fill the window with consecutive prompt tokens."""
        levels = [
            [self._replace_end_token(seq, seq.tokens[(i + j) % len(seq.tokens)]) for i in range(self.window)]
            for j in range(self.ngram - 1)
        ]
        self._own[seq] = _Branches(levels)

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence's window and pool."""
        self._own.pop(seq, None)

    def max_work(self, limit: Limit) -> Work:
        """Return the work of one lookup draft, whatever its size."""
        return LOOKUP_WORK if min(limit.depth, limit.nodes) > 0 else NO_WORK

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return one token tree for each sequence."""
        return [self._drafted(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Complete an n-gram in each column with the argmax after the last level, which becomes the next level."""
        own = self._own.get(seq)
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
        own = self._own.get(seq)
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
