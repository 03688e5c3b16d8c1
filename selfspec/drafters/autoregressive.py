"""Chains: drafts that a model, or a part of it, makes token by token, as a controller plays them."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.controllers import BatchDraftScheduler, Controller, DraftLoop
from selfspec.drafters.controlled import PlayedDrafter, check_candidates, guessed
from selfspec.proposers.base import NO_GUESS, Guess
from selfspec.proposers.chain import ProposerChain
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import Draft
from selfspec.speculation.sequence import SequenceState
from selfspec.types.confidence import PROBABILITY, Confidence
from selfspec.types.draft_work import DRAFT_PATH, passes_of, with_head_steps
from selfspec.types.limits import WIDEST_DRAFT


@dataclass(slots=True)
class Chain:
    """One sequence's draft under way. `rows`: scores of its tokens `[V]`, or what they were drawn from.

    `logits` `[n, V]`: raw ones from the last pass that are still to be used, the next token's first; what follows it
    holds where the draft goes on with the tokens `ahead`. `passes`: how many tokens went through each pass. `room`:
    the most tokens that the draft may have. `guessed`: what is to be verified in place of a draft along the path.
    `source`: what guessed the tokens `ahead`; `sources`: for each drafted token, the path or what had guessed it.
    `streams`: those that left the last layer before each drafted token `[.., D]`, where a head below asks for them;
    `begun`, `checked` and `told`: the tokens that were drafted before the last pass, those that it checked beside its
    own, and how strongly the head guessed each; `steps`: that the head took.
    """

    seq: SequenceState
    play: DraftLoop
    room: int
    guessed: Guess = NO_GUESS
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    source: str = ""
    sources: list[str] = field(default_factory=list)
    streams: list[Tensor] = field(default_factory=list)
    begun: int = 0
    checked: Sequence[int] = ()
    told: list[int] = field(default_factory=list)
    steps: int = 0

    def put(self, token: int, source: str) -> None:
        """The token is drafted by `source`: what was computed for another one is of no use."""
        self.tokens.append(token)
        foreseen = bool(self.ahead) and self.ahead.pop(0) == token
        self.sources.append(self.source if foreseen else source)
        if not foreseen:
            self.ahead, self.logits = [], []


class ChainDrafter(PlayedDrafter):
    """Drafts a chain for each sequence, with further candidates for each place where the controller asks for them.

    A pass gives the logits after each chain's last token, and perhaps after some that were guessed to follow it.
    `controller` ends a draft: each sequence with a seed starts it afresh, all others share what it learns. It is told
    the `confidence` in each token that was drafted. `candidates`: the most for each place, the token that the draft
    goes on from counted; 1 drafts a chain. `partial`: whether some tokens' logits are always minus infinity. Raises
    `SelfspecError` for no candidate, or more than a verification holds.
    """

    source: str = DRAFT_PATH
    partial = False

    def __init__(
        self,
        controller: Controller,
        *,
        candidates: int = 1,
        confidence: Confidence = PROBABILITY,
        ahead: ProposerChain | None = None,
    ) -> None:
        check_candidates(candidates)
        super().__init__(controller, ahead or ProposerChain())
        self.confidence = confidence
        self.candidates = candidates
        self._deepest = WIDEST_DRAFT // candidates  # so that all candidates fit into one verification

    @abstractmethod
    def _pass(self, chains: Sequence[Chain]) -> None:
        """Raw logits after each chain's last token, and after those guessed to follow it."""

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """A chain for each sequence, with further candidates where they were asked for."""
        rooms = [min(limit.depth, limit.nodes) for limit in limits]
        load = self.load if len(seqs) > 1 else None
        chains = (
            [self._begun(seq, room) for seq, room in zip(seqs, rooms, strict=True)]
            if load is None
            else self._begun_together(seqs, rooms, load)
        )
        while live := self._live(chains, load):
            start = time.perf_counter()
            self._pass(live)
            for chain in live:
                while chain.play.wants and chain.logits:
                    self._draft(chain, chain.logits.pop(0))
            if load is not None:
                load.passed(sum(chain.passes[-1] for chain in live if chain.passes), time.perf_counter() - start)
        return [self._drafted(chain, limit.nodes) for chain, limit in zip(chains, limits, strict=True)]

    def _begun(self, seq: SequenceState, room: int) -> Chain:
        """A draft that has no token yet; none is to come where the controller takes a guess as it is."""
        controller, guess = self.controller_of(seq), self.guess(seq, room)
        taken = guess.cut(controller.free(guess.chances))
        return Chain(seq, DraftLoop(controller, depth=0 if taken.tokens else min(room, self._deepest)), room, taken)

    def _begun_together(
        self, seqs: Sequence[SequenceState], rooms: Sequence[int], load: BatchDraftScheduler
    ) -> list[Chain]:
        """Drafts that have no token yet; guesses are taken as they are where the load finds them worth verifying."""
        guesses = [self.guess(seq, room) for seq, room in zip(seqs, rooms, strict=True)]
        counts = load.free([guess.chances for guess in guesses], instead=True)
        chains = []
        for seq, room, guess, count in zip(seqs, rooms, guesses, counts, strict=True):
            depth = 0 if count else min(room, self._deepest)
            play = DraftLoop(self.controller_of(seq), depth=depth, together=True)
            chains.append(Chain(seq, play, room, guess.cut(count)))
        return chains

    @staticmethod
    def _live(chains: Sequence[Chain], load: BatchDraftScheduler | None) -> list[Chain]:
        """The drafts that go on by one more pass; those that do not have ended."""
        live = [chain for chain in chains if chain.play.wants]
        if load is None or not live:
            return live
        hopes, later = zip(*(chain.play.hope(load.first) for chain in live), strict=True)
        verified = len(chains) + sum(len(chain.tokens or chain.guessed.tokens) for chain in chains)
        most = max(chain.room - len(chain.tokens) for chain in live)
        going = set(load.going(hopes, sum(later) / len(later), verified=verified, most=most))
        for i, chain in enumerate(live):
            chain.play.wants = i in going
        return [chain for i, chain in enumerate(live) if i in going]

    def _draft(self, chain: Chain, logits: Tensor) -> None:
        """Draft the chain's next token, unless none can be."""
        seq, sampler = chain.seq, chain.seq.sampler
        row, told = self._scores(chain, logits), self.confidence
        q = sampler.probs(row) if told.probability or not sampler.greedy else None
        taken = sampler.take(
            row,
            len(seq.tokens) + len(chain.tokens),
            p=q,
            with_p=told.probability != 0,
            with_gap=told.gap != 0,
            sure=not self.partial,
        )
        if taken is None:
            chain.play.wants = False
            return
        chain.put(taken.token, self.source)
        chain.rows.append(row if sampler.greedy or q is None else q)
        chain.play.see(told.of(taken.probability, taken.gap), last=taken.token in seq.ends)

    @staticmethod
    def _scores(chain: Chain, logits: Tensor) -> Tensor:
        """Processed scores `[V]` of the chain's next token."""
        prefix = ([*chain.seq.tokens, *chain.tokens] for _ in range(1))  # made only if a processor reads it
        return chain.seq.sampler.scores(logits, prefix)[0]

    def _drafted(self, chain: Chain, nodes: int) -> Draft:
        """The draft that a chain has come to, with at most `nodes` tokens."""
        sampler, tokens, rows = chain.seq.sampler, chain.tokens, chain.rows
        if not tokens:
            return guessed(chain.guessed)
        q = None if sampler.greedy else torch.stack(rows)
        work = with_head_steps(passes_of(chain.passes), chain.steps)
        draft = Draft.chain(tokens, q=q, confidence=chain.play.confidences, work=work, sources=chain.sources)
        counts = chain.play.candidates(self.candidates, nodes=nodes) if self.candidates > 1 else ()
        if all(count == 1 for count in counts):
            return draft
        if sampler.greedy:
            return draft.with_candidates(_likeliest(rows, tokens, counts), source=self.source)
        first = len(chain.seq.tokens)
        others = (
            _drawn(sampler_row, token, count, chain.seq, first + i)
            for i, (sampler_row, token, count) in enumerate(zip(rows, tokens, counts, strict=True))
        )
        return draft.with_candidates(list(others), source=self.source)


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
