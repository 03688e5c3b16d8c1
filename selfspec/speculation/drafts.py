"""What travels between drafters, checkers and rules: drafts (chains and trees) and outcomes."""

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
    """Proposed tokens: a tree whose root is the last committed token; a chain has one candidate for each place.

    `tokens[i]` hangs below `parents[i]` (-1: the root; parents come first); tokens with one parent are the candidates
    for one place. `q_row[i]` names the row of `q` `[m, V]` it was drawn from; -1: chosen deterministically. Candidates
    from one row were drawn in order, without replacement; candidates are verified in order, and deterministic ones
    come first. `confidence[i]`, of the first nodes at least, is optional. `work`: what making the draft took;
    `sources`: what came up with each token, by name, none where it is not told.
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
            raise ValueError("a draft's sources are of every token, or of none")
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
        """A chain: with `q` `[n, V]`, token i was drawn from row i; without, chosen deterministically."""
        n = len(tokens)
        rows = tuple(range(n)) if q is not None else (-1,) * n
        return cls(tuple(tokens), tuple(range(-1, n - 1)), q, rows, tuple(confidence), work, tuple(sources))

    def with_candidates(self, others: Sequence[Sequence[int]], *, source: str = "") -> Draft:
        """This chain with further candidates `others[i]` for the place of its token i, drawn or chosen as it was.

        The chain's tokens stay the first nodes. `source`: of the candidates, where the chain's are told.
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
        """Whether each place has one candidate."""
        return self.parents == tuple(range(-1, len(self) - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each token from the root, 1 for its children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Draft steps: the length of the longest path."""
        return max(self.depths, default=0)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children in order, by row: row 0 is the root's, row i + 1 token i's."""
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return tuple(tuple(nodes) for nodes in children)

    def path_to(self, node: int) -> tuple[int, ...]:
        """The nodes from the root's child down to `node`; empty for -1."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def prefixes(self, committed: Sequence[int]) -> Iterator[list[int]]:
        """For each row (the root, then each token): all tokens up to and including it."""
        for node in range(-1, len(self)):
            yield [*committed, *(self.tokens[i] for i in self.path_to(node))]

    def backbone(self) -> Draft:
        """The chain of first children alone, for a runtime without trees."""
        if self.is_chain:
            return self
        kept: list[int] = []
        row = 0
        while self.children[row]:
            kept.append(self.children[row][0])
            row = kept[-1] + 1
        pick = tuple(kept)
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
        """Of a chain, so many tokens at most."""
        if count >= len(self):
            return self
        of = slice(count)
        return replace(
            self,
            tokens=self.tokens[of],
            parents=self.parents[of],
            q_row=self.q_row[of],
            confidence=self.confidence[of],
            sources=self.sources[of],
        )


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What verification made of a draft: the accepted nodes in order, and the tokens emitted (accepted and next).

    `step` holds the logits and hidden rows of all of the pass (the root's row, then each token's), rejected ones
    too. `p` `[1 + m, V]`: the checker's probabilities in these rows; None in greedy decoding.
    """

    draft: Draft
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    step: ForwardOutput
    p: Tensor | None = None

    @property
    def laws(self) -> Tensor | None:
        """The laws `[len(path) + 1, V]` that the path's tokens and the next one follow: p, before any residual."""
        return None if self.p is None else self.p[[0, *(node + 1 for node in self.path)]]

    @property
    def accepted(self) -> int:
        """Drafted tokens that were emitted."""
        return min(len(self.path), len(self.tokens))

    def probabilities(self) -> tuple[float, ...]:
        """The model's own of each emitted token: the softmax of the raw logits, temperature and processors left out."""
        assert self.step.logits is not None
        rows = [0, *(node + 1 for node in self.path)][: len(self.tokens)]
        logits = self.step.logits[0, rows]
        p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        of_tokens: list[float] = p[range(len(rows)), list(self.tokens)].tolist()
        return tuple(of_tokens)
