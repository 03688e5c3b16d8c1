"""Toy drafters that hold the interface wide open, toy vocabularies, and a sampler that branches over all outcomes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import LogitsProcessor

from selfspec.controllers import FixedK
from selfspec.proposers.base import Proposal
from selfspec.runtime.base import Runtime
from selfspec.runtime.model_verifier import ModelChecker
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import NO_DRAFT, Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.rounds import one_round
from selfspec.speculation.rules import greedy, match
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.speculation.tree_batch import PlacedDraft, lay_out
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.draft_work import Work, steps_of


@dataclass
class EndsAt(FixedK):
    """Ends drafts after a token id, too."""

    name: ClassVar[str] = "ends-at"
    token: int = 0

    def ends_draft(self, token: int) -> bool:
        return token == self.token


class Toy:
    hidden: Sequence[int] = ()
    drafts = True

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        pass

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        return [self.within(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]

    def within(self, seq: SequenceState, limit: Limit) -> Draft:
        """`draft`, told by the sequence's room how deep it may be."""
        room, seq.remaining = seq.remaining, min(seq.remaining, limit.depth + 1)
        try:
            return self.draft(seq)
        finally:
            seq.remaining = room

    def max_work(self, limit: Limit) -> Work:
        return steps_of(limit.depth)

    def draft(self, seq: SequenceState) -> Draft:
        raise NotImplementedError

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        pass

    def end(self, seq: SequenceState) -> None:
        pass


class RandomTree(Toy):
    """A random tree with random q that depend on the prefix; `shape[d]` children below each node of depth d."""

    def __init__(self, vocabulary: int, shape: tuple[int, ...] = (2, 2, 1)) -> None:
        self.vocabulary, self.shape = vocabulary, shape

    def q(self, prefix: Sequence[int]) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(repr(list(prefix)).encode()).digest()[:6], "big")
        return torch.rand(self.vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).pow(2)

    def draft(self, seq: SequenceState) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        q_row: list[int] = []
        rows: list[Tensor] = []
        level: list[tuple[int, list[int]]] = [(-1, [])]
        for width in self.shape[: seq.remaining - 1]:
            below: list[tuple[int, list[int]]] = []
            for node, path in level:
                q = self.q([*seq.tokens, *path])
                q = q / q.sum()
                rows.append(q)
                left = q.clone()
                for _ in range(width):
                    token = int(left.argmax()) if seq.sampler.greedy else seq.sampler.draw(left, len(seq.tokens))
                    left[token] = 0
                    tokens.append(token)
                    parents.append(node)
                    q_row.append(-1 if seq.sampler.greedy else len(rows) - 1)
                    if token not in seq.ends:
                        below.append((len(tokens) - 1, [*path, token]))
            level = below
        return Draft(tuple(tokens), tuple(parents), torch.stack(rows) if rows else None, tuple(q_row))


class HiddenHead(Toy):
    """A random linear head on the stream that leaves the last layer, one token ahead."""

    def __init__(self, runtime: Runtime) -> None:
        identity = runtime.skeleton.identity
        self.hidden = (runtime.layers,)
        generator = torch.Generator().manual_seed(5)
        shape = (identity.hidden or 0, identity.vocabulary or 0)
        self.head = torch.randn(shape, generator=generator, dtype=runtime.dtype)
        self.state: dict[SequenceState, Tensor] = {}

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        if prefill.hidden:
            self.state[seq] = prefill.hidden[self.hidden[0]][0, -1]

    def end(self, seq: SequenceState) -> None:
        self.state.pop(seq, None)

    def draft(self, seq: SequenceState) -> Draft:
        if seq not in self.state or seq.remaining < 2:
            return NO_DRAFT
        q = (self.state[seq] @ self.head).softmax(-1)
        if seq.sampler.greedy:
            return Draft.chain([int(q.argmax())])
        return Draft.chain([seq.sampler.draw(q, len(seq.tokens))], q=q[None])

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        last = outcome.path[-1] + 1 if outcome.path else 0
        self.state[seq] = outcome.step.hidden[self.hidden[0]][0, last]


class Lockstep(Toy):
    """The model itself, two tokens ahead for all sequences in two passes along a path, whatever is asked of it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.path = runtime, runtime.compile(DraftPath(SkipSet((0,), (0,))))

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        tokens: list[list[int]] = [[] for _ in seqs]
        rows: list[list[Tensor]] = [[] for _ in seqs]
        for _ in range(2):
            placed = [
                PlacedDraft(seq.row, [*seq.tokens, *new][-1], len(seq.tokens) + len(new) - 1)
                for seq, new in zip(seqs, tokens, strict=True)
            ]
            laid = lay_out(placed, spare=self.runtime.cache.spare, device=self.runtime.device)
            logits = self.runtime.forward(
                laid.tokens, laid.positions, path=self.path, slots=laid.slots, mask=laid.mask, rows=laid.rows
            ).logits
            assert logits is not None
            for i, seq in enumerate(seqs):
                if len(tokens[i]) < limits[i].depth and not (tokens[i] and tokens[i][-1] in seq.ends):
                    place = len(seq.tokens) + len(tokens[i])
                    prefix = ([*seq.tokens, *tokens[i]],)
                    q = seq.sampler.probs(seq.sampler.scores(logits[laid.batch_rows[i]], prefix)[0])
                    tokens[i].append(int(q.argmax()) if seq.sampler.greedy else seq.sampler.draw(q, place))
                    rows[i].append(q)
        return [
            Draft.chain(new, q=None if seq.sampler.greedy else torch.stack(q)) if new else NO_DRAFT
            for seq, new, q in zip(seqs, tokens, rows, strict=True)
        ]


def target_distributions(outcome: Outcome) -> Tensor | None:
    """The target's distributions `[len(path) + 1, V]` for the path's tokens and the next token, not residual ones."""
    return None if outcome.p is None else outcome.p[[0, *(node + 1 for node in outcome.path)]]


class Staged(Toy):
    """A round within a round: another model checks what a free drafter proposes, and what it emits is the draft.

    The inner round's p, before any residual, is the outer round's q.
    """

    def __init__(self, runtime: Runtime, proposals: Toy, depth: int = 3) -> None:
        self.runtime, self.proposals, self.depth = runtime, proposals, depth
        self.checker = ModelChecker(runtime)
        self.inner: dict[SequenceState, SequenceState] = {}
        self._held = ExitStack()

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        if not self.inner:
            self._held.enter_context(self.runtime.session(0))
        rule = None if seq.rule in (None, greedy, match) else seq.rule
        self.inner[seq] = SequenceState(list(seq.tokens), seq.remaining, seq.sampler, seq.ends, seq.row, rule)
        self.runtime.cache.clear(seq.row)
        self.runtime.reserve(len(seq.tokens) + seq.remaining + 2 * self.depth)
        self.proposals.begin(self.inner[seq], prefill)

    def end(self, seq: SequenceState) -> None:
        if (inner := self.inner.pop(seq, None)) is not None:
            self.proposals.end(inner)
        if not self.inner:
            self._held.close()

    def draft(self, seq: SequenceState) -> Draft:
        if seq.remaining < 2:
            return NO_DRAFT
        inner, cache = self.inner[seq], self.runtime.cache
        inner.tokens, inner.remaining = list(seq.tokens), min(self.depth, seq.remaining - 1)
        known, end = min(cache.length[seq.row], len(seq.tokens) - 1), len(seq.tokens) - 1
        if known < end:  # what was committed since; the last token is the inner round's own
            rows = slice(seq.row, seq.row + 1)
            self.runtime.forward(torch.tensor([seq.tokens[known:end]]), known, rows=rows, logits=None)
        cache.length[seq.row] = end
        (outcome,) = one_round(self.checker, self.proposals, [inner], [Limit(inner.remaining - 1)])
        return self.made(outcome)

    def made(self, outcome: Outcome) -> Draft:
        """The draft that an inner round comes to."""
        laws = target_distributions(outcome)
        return Draft.chain(outcome.tokens, q=None if laws is None else laws[: len(outcome.tokens)])

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Of what the inner round kept, no more keys are right than tokens were accepted."""
        before = len(seq.tokens) - len(outcome.tokens)
        cache = self.runtime.cache
        cache.length[seq.row] = min(cache.length[seq.row], before + len(outcome.path))


class Scripted(Toy):
    """Proposes what `script` says of the tokens so far, at most `k`: an oracle, or one that is always wrong."""

    def __init__(self, script: Callable[[Sequence[int]], Sequence[int]], k: int = 4) -> None:
        self.script, self.k = script, k

    def draft(self, seq: SequenceState) -> Draft:
        drafted: list[int] = []
        for token in self.script(seq.tokens)[: min(self.k, seq.remaining - 1)]:
            drafted.append(token)
            if token in seq.ends:
                break
        return Draft.chain(drafted)


def oracle(prompt: Sequence[int], text: Sequence[int], k: int = 4) -> Scripted:
    """Proposes the text itself."""
    return Scripted(lambda tokens: text[len(tokens) - len(prompt) :], k)


def always_wrong(prompt: Sequence[int], text: Sequence[int], vocabulary: int, k: int = 3) -> Scripted:
    """Proposes, of each next token, another one."""
    return Scripted(lambda tokens: [(t + 1) % vocabulary for t in text[len(tokens) - len(prompt) :]], k)


class Enumerating(Sampler):
    """A sampler whose coins and draws follow `script`, then take the first outcome; it notes the ones not taken."""

    def __init__(self, script: Sequence[int] = (), processors: Sequence[LogitsProcessor] = ()) -> None:
        super().__init__(temperature=1.0, processors=processors)
        self.script = list(script)
        self.taken: list[int] = []
        self.others: list[list[int]] = []
        self.weight = 1.0

    def _branch(self, chances: Sequence[float]) -> int:
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        place = len(self.taken)
        choice = self.script[place] if place < len(self.script) else possible[0]
        self.taken.append(choice)
        self.others.append([i for i in possible if i != choice] if place >= len(self.script) else [])
        self.weight *= chances[choice]
        return choice

    def draw(self, p: Tensor, position: int) -> int:
        return self._branch((p / p.sum()).tolist())

    def coin(self, probability: float) -> bool:
        return self._branch([probability, 1 - probability]) == 0


class Reusing(Enumerating):
    """Coins that fall by the same uniform numbers in every round, which `new_round` begins: a planted bug."""

    def __init__(self, script: Sequence[int] = (), processors: Sequence[LogitsProcessor] = ()) -> None:
        super().__init__(script, processors)
        self.known: list[tuple[float, float]] = []  # where each number lies
        self.next = 0

    def new_round(self) -> None:
        self.next = 0

    def coin(self, probability: float) -> bool:
        if self.next == len(self.known):
            self.known.append((0.0, 1.0))
        low, high = self.known[self.next]
        fell = super().coin(min(max((probability - low) / (high - low), 0.0), 1.0))
        self.known[self.next] = (low, min(high, probability)) if fell else (max(low, probability), high)
        self.next += 1
        return fell


class Branching:
    """The noise of a replay's one row, which follows an enumerating sampler."""

    def __init__(self, sampler: Enumerating) -> None:
        self.sampler = sampler

    def coin(self, chance: Tensor, place: object) -> Tensor:
        return torch.tensor([self.sampler.coin(float(chance[0]))])

    def draw(self, weights: Tensor, place: object) -> Tensor:
        return torch.tensor([self.sampler.draw(weights[0], 0)])

    def pick(self, rows: object) -> Branching:
        return self


def enumerate_outcomes(
    run: Callable[[Sampler], tuple[int, ...]],
    kind: type[Enumerating] = Enumerating,
    processors: Sequence[LogitsProcessor] = (),
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every outcome of `run` with its probability: `run` is called once for each path through its random choices."""
    scripts: list[list[int]] = [[]]
    while scripts:
        sampler = kind(scripts.pop(), processors)
        yield run(sampler), sampler.weight
        for place in range(len(sampler.taken)):
            scripts.extend([*sampler.taken[:place], other] for other in sampler.others[place])


class Adding:
    """A proposer: each token is the sum of all before it, as sure as it is told to be."""

    def __init__(self, vocabulary: int, chance: float = 0.9) -> None:
        self.vocabulary, self.chance = vocabulary, chance

    name = "adding"

    def reader(self) -> AddingReader:
        return AddingReader(self)


class AddingReader:
    def __init__(self, of: Adding) -> None:
        self.of, self.sum = of, 0

    def append(self, token: int) -> None:
        self.sum += token

    def look_up(self, drafted: Sequence[int], most: int) -> Proposal:
        total, tokens = self.sum + sum(drafted), list[int]()
        while len(tokens) < most:
            tokens.append(total % self.of.vocabulary)
            total += tokens[-1]
        return Proposal(tokens, [self.of.chance] * most)


class Renamed:
    """A draft model's vocabulary, in which token i is order[i]; the tokens `shared` (all) may be drafted."""

    def __init__(self, order, shared=None):
        self.order = order
        self.ours = torch.tensor(sorted(range(len(order)) if shared is None else shared))
        self.theirs = torch.tensor([order[i] for i in self.ours.tolist()])

    def read(self, tokens):
        return [self.order[token] for token in tokens]


class Doubled:
    """A draft model's vocabulary, in which token i is the tokens i, i + size; each can be drafted by its first."""

    def __init__(self, size):
        self.size = size
        self.ours = self.theirs = torch.arange(size)

    def read(self, tokens):
        return [one for token in tokens for one in (token, token + self.size)]
