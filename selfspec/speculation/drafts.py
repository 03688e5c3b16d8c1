"""The data that drafters, checkers and rules exchange: drafts (chains and token trees) and outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from selfspec.speculation.forward_output import ForwardOutput
from selfspec.types.draft_work import NO_WORK, Work


@dataclass(frozen=True)
class Draft:
    """A token tree of proposed tokens, whose root is the last committed token.

    `tokens[i]` is a child of `parents[i]` (-1: the root; parents come first). Tokens with one parent are the candidates
    for one position; a chain is a draft with one candidate for each position. `q_row[i]` is the row of `q` `[m, V]`
    that token i was drawn from; -1: it was chosen deterministically. Candidates from one row were drawn in order,
    without replacement. Candidates are verified in order. `confidence`: the drafter's confidence in each of the first
    nodes; may be empty. `work`: the calls that made the draft; `sources`: the name of each token's source, empty where
    unknown.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: Tensor | None = None
    q_row: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    work: Work = NO_WORK
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.parents) == len(self.q_row):
            raise ValueError("a draft needs a parent and a q_row for each token")
        if self.sources and len(self.sources) != len(self.tokens):
            raise ValueError("draft sources: expected one for each token, or none")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a draft's parents must come before their children")
        if max(self.q_row, default=-1) >= (0 if self.q is None else len(self.q)):
            raise ValueError("a draft's q_row names a row that q does not have")

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        *,
        q: Tensor | None = None,
        confidence: Sequence[float] = (),
        work: Work = NO_WORK,
        sources: Sequence[str] = (),
    ) -> Draft:
        """Make a draft without branches; token i was drawn from row i of `q` `[n, V]`; None: all deterministic."""
        n = len(tokens)
        rows = tuple(range(n)) if q is not None else (-1,) * n
        return cls(tuple(tokens), tuple(range(-1, n - 1)), q, rows, tuple(confidence), work, tuple(sources))

    def with_candidates(self, others: Sequence[Sequence[int]], *, source: str = "") -> Draft:
        """Return this chain with further candidates `others[i]` for the position of its token i.

        The candidates were drawn or chosen as token i was. The chain's tokens stay the first nodes. `source`: the
        source of the candidates, used if the chain has sources.
        """
        added = [(i, token) for i, tokens in enumerate(others) for token in tokens]
        return Draft(
            (*self.tokens, *(token for _, token in added)),
            (*self.parents, *(self.parents[i] for i, _ in added)),
            self.q,
            (*self.q_row, *(self.q_row[i] for i, _ in added)),
            self.confidence,
            self.work,
            (*self.sources, *(source for _ in added)) if self.sources else (),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        """Whether each position has one candidate."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each token from the root, 1 for the root's children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Draft length: the number of tokens on the longest path."""
        return max(self.depths, default=0)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node as token indices, in order: entry 0 of the root, entry i + 1 of token i."""
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return tuple(tuple(nodes) for nodes in children)

    def path_to(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root's child down to `node`; empty for -1."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def prefixes(self, committed: Sequence[int]) -> Iterator[list[int]]:
        """Yield, for each row (the root, then each token), the prefix up to the row's token, which is included."""
        for node in range(-1, len(self)):
            yield [*committed, *(self.tokens[i] for i in self.path_to(node))]

    def backbone(self) -> Draft:
        """Return the chain of first children without other candidates, for a checker that verifies no token trees."""
        if self.is_chain:
            return self
        nodes: list[int] = []
        row = 0
        while self.children[row]:
            nodes.append(self.children[row][0])
            row = nodes[-1] + 1
        pick = tuple(nodes)
        return Draft(
            tuple(self.tokens[i] for i in pick),
            tuple(range(-1, len(pick) - 1)),
            self.q,
            tuple(self.q_row[i] for i in pick),
            tuple(self.confidence[i] for i in pick if i < len(self.confidence)),
            self.work,
            tuple(self.sources[i] for i in pick) if self.sources else (),
        )

    def first(self, count: int) -> Draft:
        """Return the first `count` tokens of a chain, or all of them if there are fewer."""
        if count >= len(self):
            return self
        prefix = slice(count)
        return replace(
            self,
            tokens=self.tokens[prefix],
            parents=self.parents[prefix],
            q_row=self.q_row[prefix],
            confidence=self.confidence[prefix],
            sources=self.sources[prefix],
        )


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of verifying a draft: `path`, the accepted nodes in order, and `tokens`, the emitted tokens.

    The emitted tokens are the accepted tokens and the target's next token, up to the sequence's end.

    `step` holds the logits and hidden states of the whole verification pass (the root's row, then each token's),
    including rejected tokens. `p` `[1 + m, V]`: the target's probabilities in these rows; None in greedy decoding.
    """

    draft: Draft
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    step: ForwardOutput
    p: Tensor | None = None

    @property
    def accepted(self) -> int:
        """The number of drafted tokens that were emitted."""
        return min(len(self.path), len(self.tokens))

    def probabilities(self) -> tuple[float, ...]:
        """Return the target's probability of each emitted token: the softmax of its raw logits."""
        assert self.step.logits is not None
        rows = [0, *(node + 1 for node in self.path)][: len(self.tokens)]
        logits = self.step.logits[0, rows]
        p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        of_tokens: list[float] = p[range(len(rows)), list(self.tokens)].tolist()
        return tuple(of_tokens)
