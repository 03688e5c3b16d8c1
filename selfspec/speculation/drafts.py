"""What travels between drafters, verifiers and the loop: sequences, drafts (chains and trees) and outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from selfspec.speculation.sampling import Sampler
from selfspec.speculation.step import Step


@dataclass(slots=True)
class SequenceState:
    """One sequence while it is decoded. Only the loop changes it.

    `tokens`: prompt and emitted tokens. `room`: tokens it may still emit, at least 1 while it runs; a draft is at
    most `room - 1` deep. `row`: its cache row. `ends`: end-of-sequence tokens.
    """

    tokens: list[int]
    room: int
    sampler: Sampler
    ends: frozenset[int] = frozenset()
    row: int = 0


@dataclass(frozen=True)
class Draft:
    """Proposed tokens: a tree whose root is the last committed token; a chain is a tree without siblings.

    `tokens[i]` hangs below `parents[i]` (-1: the root; parents come first). `q_row[i]` names the row of `q`
    `[m, V]` it was drawn from; -1: chosen deterministically. Siblings on one row were drawn in order, without
    replacement; siblings are verified in order, and deterministic ones come first. `confidence[i]`, of the first
    nodes at least, is optional.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: Tensor | None = None
    q_row: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.parents) == len(self.q_row):
            raise ValueError("a draft needs a parent and a q_row for each token")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a draft's parents must come before their children")
        if max(self.q_row, default=-1) >= (0 if self.q is None else len(self.q)):
            raise ValueError("a draft's q_row names a row that q does not have")

    @classmethod
    def chain(cls, tokens: Sequence[int], *, q: Tensor | None = None, confidence: Sequence[float] = ()) -> Draft:
        """A chain: with `q` `[n, V]`, token i was drawn from row i; without, chosen deterministically."""
        n = len(tokens)
        rows = tuple(range(n)) if q is not None else (-1,) * n
        return cls(tuple(tokens), tuple(range(-1, n - 1)), q, rows, tuple(confidence))

    def with_leaves(self, leaves: Sequence[Sequence[int]]) -> Draft:
        """This chain with further candidates `leaves[i]` beside its token i, drawn from the same row, or chosen alike.

        The chain's tokens stay the first nodes.
        """
        beside = [(i, token) for i, tokens in enumerate(leaves) for token in tokens]
        return Draft(
            (*self.tokens, *(token for _, token in beside)),
            (*self.parents, *(self.parents[i] for i, _ in beside)),
            self.q,
            (*self.q_row, *(self.q_row[i] for i, _ in beside)),
            self.confidence,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        """Whether no token has a sibling."""
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
        )

    def layout(self, root: int, start: int, *, device: torch.device) -> tuple[Tensor, int | Tensor, Tensor | None]:
        """Tokens `[1, n]`, positions and mask `[1, n, S]` of the pass that verifies this draft below token `root`.

        The root stands at position and slot `start`, token i at slot `start + 1 + i`. A chain needs no mask.
        """
        tokens = torch.tensor([[root, *self.tokens]], device=device)
        if self.is_chain:
            return tokens, start, None
        positions = torch.tensor([[start, *(start + depth for depth in self.depths)]], device=device)
        above = [[False] * len(self)]  # for the root, then each token: which tokens it sees
        for node, parent in enumerate(self.parents):
            seen = list(above[parent + 1])
            seen[node] = True
            above.append(seen)
        mask = torch.ones((1, 1 + len(self), start + 1 + len(self)), dtype=torch.bool)
        mask[0, :, start + 1 :] = torch.tensor(above)
        return tokens, positions, mask.to(device)


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What verification made of a draft: the accepted nodes in order, and the tokens emitted (accepted and next).

    `step` holds the logits and hidden rows of all of the pass (the root's row, then each token's), rejected ones
    too.
    """

    draft: Draft
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    step: Step

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
