"""Self-drafting (Draft & Verify, Zhang et al. 2309.08168): the model itself, along a cheaper path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.controllers import Controller, Play
from selfspec.drafters.played import PlayedDrafter, check_candidates, guessed
from selfspec.facts.confidence import PROBABILITY, Confidence
from selfspec.facts.draft_path import DraftPath, as_path
from selfspec.facts.limits import WIDEST_DRAFT
from selfspec.facts.skip import SkipSet
from selfspec.facts.work import DRAFT_PATH, Work, passes_of
from selfspec.proposers.ahead import Ahead
from selfspec.proposers.base import NO_GUESS, Guess
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import Draft
from selfspec.speculation.passes import Placed, lay_out
from selfspec.speculation.sampling import best_of, gap
from selfspec.speculation.sequence import SequenceState


@dataclass(slots=True)
class _Chain:
    """One sequence's draft under way. `rows`: scores of its tokens `[V]`, or what they were drawn from.

    `logits` `[n, V]`: raw ones from the last pass that are still to be used, the next token's first; what follows it
    holds where the draft goes on with the tokens `ahead`. `passes`: how many tokens went through each pass. `room`:
    the most tokens that the draft may have. `guessed`: what is to be verified in place of a draft along the path.
    `source`: what guessed the tokens `ahead`; `sources`: for each drafted token, the path or what had guessed it.
    """

    seq: SequenceState
    play: Play
    room: int
    guessed: Guess = NO_GUESS
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    source: str = ""
    sources: list[str] = field(default_factory=list)

    def put(self, token: int) -> None:
        """The token is drafted: what was computed for another one is of no use."""
        self.tokens.append(token)
        foreseen = bool(self.ahead) and self.ahead.pop(0) == token
        self.sources.append(self.source if foreseen else DRAFT_PATH)
        if not foreseen:
            self.ahead, self.logits = [], []


class LayerSkipDrafter(PlayedDrafter):
    """Drafts along `path`, with the model's own keys and values of all that is committed.

    Its own keys go to the slots that verification then overwrites. `path`: a draft path, or the sub-layers that it
    bypasses. `controller` ends a draft: each sequence with a seed starts it afresh, all others share what it learns.
    It is told the `confidence` in each token that was drafted. `candidates`: the most for each place, the token that
    the draft goes on from counted; 1 drafts a chain. Sequences draft in lockstep. `ahead`: guesses that a pass along
    the path is to check beside its one token; what is drafted stays what the path drafts, in fewer passes. Where the
    controller takes one as it is, nothing is drafted along the path in that round. Raises `SelfspecError` for a path
    that the model does not have (`Runtime.compile`), and for no candidate or more than a verification holds.
    """

    def __init__(
        self,
        runtime: Runtime,
        path: DraftPath | SkipSet,
        controller: Controller,
        *,
        candidates: int = 1,
        confidence: Confidence = PROBABILITY,
        ahead: Ahead | None = None,
    ) -> None:
        check_candidates(candidates)
        super().__init__(controller, ahead or Ahead())
        self.runtime = runtime
        self.path = as_path(path)
        self.confidence = confidence
        words = self.path.vocabulary
        self.candidates = candidates if words is None else min(candidates, len(words))
        self._way = runtime.compile(self.path)
        self._deepest = WIDEST_DRAFT // candidates  # so that all candidates fit into one verification
        widest = len(self.ahead.prices)
        self._dearest = [passes_of(min(widest, n - i) for i in range(n)) for n in range(self._deepest + 1)]

    def dearest(self, limit: Limit) -> Work:
        """As many passes as the draft may be deep, each as wide as it may be."""
        return self._dearest[max(min(limit.depth, limit.nodes, self._deepest), 0)]

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """A chain for each sequence, with further candidates where they were asked for."""
        chains = [self._begun(seq, min(limit.depth, limit.nodes)) for seq, limit in zip(seqs, limits, strict=True)]
        while live := [chain for chain in chains if chain.play.wants]:
            self._pass(live)
            for chain in live:
                while chain.play.wants and chain.logits:
                    self._draft(chain, chain.logits.pop(0))
        return [self._drafted(chain, limit.nodes) for chain, limit in zip(chains, limits, strict=True)]

    def _begun(self, seq: SequenceState, room: int) -> _Chain:
        """A draft that has no token yet; none is to come where the controller takes a guess as it is."""
        controller, guess = self.controller_of(seq), self.guess(seq, room)
        taken = guess.cut(controller.free(guess.chances))
        return _Chain(seq, Play(controller, depth=0 if taken.tokens else min(room, self._deepest)), room, taken)

    def _pass(self, chains: Sequence[_Chain]) -> None:
        """Raw logits after each chain's last token, and after those guessed to follow it, from one pass."""
        placed = []
        for c in chains:
            guess = self.reading(c.seq).guess(c.tokens, c.room - len(c.tokens) - 1)
            c.ahead, c.source = list(guess.tokens), guess.source
            c.passes.append(1 + len(c.ahead))
            root = c.tokens[-1] if c.tokens else c.seq.tokens[-1]
            placed.append(Placed(c.seq.row, root, len(c.seq.tokens) - 1 + len(c.tokens), Draft.chain(c.ahead)))
        laid = lay_out(placed, spare=self.runtime.cache.spare, device=self.runtime.device)
        logits = self.runtime.forward(
            laid.tokens, laid.positions, path=self._way, slots=laid.slots, mask=laid.mask, rows=laid.rows
        ).logits
        assert logits is not None
        for c, at in zip(chains, laid.at, strict=True):
            c.logits = [logits[at, i : i + 1] for i in range(c.passes[-1])]

    def _draft(self, chain: _Chain, logits: Tensor) -> None:
        """Draft the chain's next token, unless none can be."""
        seq, sampler = chain.seq, chain.seq.sampler
        row = self._scores(chain, logits)
        if not sampler.possible(row) or (self.path.vocabulary is not None and not float(row.max()) > -math.inf):
            chain.play.wants = False
            return
        position = len(seq.tokens) + len(chain.tokens)
        told = self.confidence
        q = sampler.probs(row) if told.probability or not sampler.greedy else row
        if sampler.greedy or sampler.tied:
            token, apart = sampler.best(row, position, p=q, with_gap=told.gap > 0)
        else:
            token = sampler.draw(q, position)
            apart = gap(row, best_of(row)) if told.gap else 0.0
        chain.put(token)
        chain.rows.append(row if sampler.greedy else q)
        probability = float(q[token]) if told.probability else 0.0
        chain.play.see(told.of(probability, apart), last=token in seq.ends)

    @staticmethod
    def _scores(chain: _Chain, logits: Tensor) -> Tensor:
        """Processed scores `[V]` of the chain's next token."""
        prefix = ([*chain.seq.tokens, *chain.tokens] for _ in range(1))  # made only if a processor reads it
        return chain.seq.sampler.scores(logits, prefix)[0]

    def _drafted(self, chain: _Chain, nodes: int) -> Draft:
        """The draft that a chain has come to, with at most `nodes` tokens."""
        sampler, tokens, rows = chain.seq.sampler, chain.tokens, chain.rows
        if not tokens:
            return guessed(chain.guessed)
        q = None if sampler.greedy else torch.stack(rows)
        work = passes_of(chain.passes)
        draft = Draft.chain(tokens, q=q, confidence=chain.play.confidences, work=work, sources=chain.sources)
        counts = chain.play.candidates(self.candidates, nodes=nodes) if self.candidates > 1 else ()
        if all(count == 1 for count in counts):
            return draft
        if sampler.greedy:
            return draft.with_candidates(_likeliest(rows, tokens, counts), source=DRAFT_PATH)
        first = len(chain.seq.tokens)
        others = (
            _drawn(sampler_row, token, count, chain.seq, first + i)
            for i, (sampler_row, token, count) in enumerate(zip(rows, tokens, counts, strict=True))
        )
        return draft.with_candidates(list(others), source=DRAFT_PATH)


def _drawn(q: Tensor, token: int, count: int, seq: SequenceState, position: int) -> list[int]:
    """Tokens drawn from `q` `[V]` one after the other without replacement, after `token`, to `count` with it."""
    drawn = [token]
    while len(drawn) < count:
        left = q.index_fill(0, torch.tensor(drawn, device=q.device), 0)
        if not float(left.sum()) > 0:
            break
        drawn.append(seq.sampler.draw(left, position))
    return drawn[1:]


def _likeliest(rows: Sequence[Tensor], tokens: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """For each row of scores `[V]`, the tokens with the highest but the one drafted, `count` of them with it."""
    most = min(max(counts), len(rows[0]))
    best = torch.stack(list(rows)).topk(most).indices.tolist()
    return [
        [other for other in row if other != token][: count - 1]
        for row, token, count in zip(best, tokens, counts, strict=True)
    ]
