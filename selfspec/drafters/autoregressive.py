"""Autoregressive drafting: a model, a draft path or a draft head drafts token by token until a controller stops it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.basics.machine import clock
from selfspec.controllers import BatchDraftScheduler, Controller, DraftLoop
from selfspec.controllers.batch_scheduler import HORIZON
from selfspec.drafters.controlled import ControlledDrafter, as_draft, check_candidates
from selfspec.proposers.base import NO_PROPOSAL, Proposal, ProposerChain
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import Draft
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import PROBABILITY, Confidence
from selfspec.types.draft_work import DRAFT_PATH, LOOKUP_WORK, Work, passes_of, with_head_steps
from selfspec.types.methods import WIDEST_DRAFT

# Most sequences of a batch whose draft passes check lookup tokens, and whose drafts have further candidates. Of one
# sequence, further tokens of a pass are nearly free; of 8, a pass over 30 tokens takes 2.3 times as long as one over 8.
FEW = 2


@dataclass(slots=True)
class Chain:
    """One sequence's draft in progress: a token sequence without branches.

    `loop`: the controller's decisions on this draft. `remaining`: the most tokens that the draft may have. `lookup`:
    lookup tokens to verify instead of drafting. `tokens`: the drafted tokens; `rows`: for each drafted token, the
    scores `[V]` in greedy decoding, else the probabilities `[V]` that it was drawn from; `sources`: for each drafted
    token, the proposer that had predicted it, else the drafter's `source`. `passes`: the number of tokens in each pass.

    `logits` `[n, V]`: unused raw logits of the last pass, the next token's first; later rows are valid only if the
    draft continues with the tokens `lookup_tokens`, which the proposer `source` predicted.

    With a draft head below a draft path: `streams`: hidden states `[.., D]` before each drafted token. `pass_start`:
    the number of tokens drafted before the last pass. `checked`: the lookup tokens in that pass. `probability_bins`:
    the head's probability of each lookup token, in tenths. `steps`: the number of head steps.
    """

    seq: SequenceState
    loop: DraftLoop
    remaining: int
    lookup: Proposal = NO_PROPOSAL
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    lookup_tokens: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    source: str = ""
    sources: list[str] = field(default_factory=list)
    streams: list[Tensor] = field(default_factory=list)
    pass_start: int = 0
    checked: Sequence[int] = ()
    probability_bins: list[int] = field(default_factory=list)
    steps: int = 0

    def append(self, token: int, source: str) -> None:
        """Append a token drafted by `source`; if the next lookup token differs, discard lookup tokens and logits."""
        self.tokens.append(token)
        foreseen = bool(self.lookup_tokens) and self.lookup_tokens.pop(0) == token
        self.sources.append(self.source if foreseen else source)
        if not foreseen:
            self.lookup_tokens, self.logits = [], []


class ChainDrafter(ControlledDrafter):
    """Base class of autoregressive drafters, which draft one token after the other for each sequence.

    One pass computes the logits after each draft's last token, and after the lookup tokens that may follow that token.
    `controller` ends a draft, by the `confidence` in each drafted token: each seeded sequence gets a fresh copy, and
    all other sequences share one controller, which learns from them all. `candidates`: the most tokens proposed at one
    position, including the drafted token; the controller asks for further candidates where they pay. `partial`: whether
    some tokens always have a logit of minus infinity. Raises `SelfspecError` if `candidates` is below 1, or more than a
    verification pass holds.
    """

    source: str = DRAFT_PATH
    partial = False

    def __init__(
        self,
        controller: Controller,
        *,
        candidates: int = 1,
        confidence: Confidence = PROBABILITY,
        proposer_chain: ProposerChain | None = None,
    ) -> None:
        check_candidates(candidates)
        super().__init__(controller, proposer_chain or ProposerChain())
        self.confidence = confidence
        self.candidates = candidates
        self._deepest = WIDEST_DRAFT // candidates  # so that all candidates fit into one verification pass
        self._few = True  # whether at most `FEW` sequences draft together, or decode, where a scheduler knows how many

    def max_work(self, limit: Limit) -> Work:
        """Return the most work that a draft within the limit can take: that of a lookup if it can do nothing else."""
        depth = max(min(limit.depth, limit.nodes, self._deepest), 0)
        able = self.proposer_chain.proposers and (self.load is not None or self.controller.looks_up)
        return LOOKUP_WORK if able and limit.lookup and not depth else self._most_work(depth)

    @abstractmethod
    def _most_work(self, tokens: int) -> Work:
        """Return the most work that a draft of `tokens` tokens can take."""

    @abstractmethod
    def _pass(self, chains: Sequence[Chain]) -> None:
        """Compute the raw logits after each draft's last token and after its lookup tokens, into `chain.logits`."""

    def propose(self, seqs: Sequence[SequenceState], limits: Sequence[Limit]) -> list[Draft]:
        """Return a draft for each sequence, with the further candidates that the controller asks for."""
        most = [
            (self._most_drafted(seq, min(limit.depth, limit.nodes)), limit.lookup)
            for seq, limit in zip(seqs, limits, strict=True)
        ]
        load = self._scheduler
        self._few = (len(seqs) if load is None else load.rows) <= FEW
        chains = (
            [self._start_chain(seq, *tokens) for seq, tokens in zip(seqs, most, strict=True)]
            if load is None
            else self._start_batch(seqs, most, load)
        )
        while live := self._live(chains, load):
            start = clock()
            self._pass(live)
            for chain in live:
                while chain.loop.wants and chain.logits:
                    self._draft(chain, chain.logits.pop(0))
            if load is not None:
                load.record_pass(sum(chain.passes[-1] for chain in live if chain.passes), clock() - start)
        return [self._drafted(chain, limit.nodes) for chain, limit in zip(chains, limits, strict=True)]

    def _most_drafted(self, seq: SequenceState, max_tokens: int) -> int:
        """Return how many of `max_tokens` tokens can be drafted after the sequence. Called once before each draft."""
        return max_tokens

    def _most_checked(self, chain: Chain) -> int:
        """Return the most lookup tokens that the draft's next pass checks; 0 in batches of more than `FEW`."""
        return chain.remaining - len(chain.tokens) - 1 if self._few else 0

    def _start_chain(self, seq: SequenceState, max_tokens: int, max_lookup: int) -> Chain:
        """Return a draft without tokens; it stays empty if the controller has lookup tokens verified instead.

        `max_tokens`: the most tokens to draft. `max_lookup`: the most lookup tokens to verify instead of drafting; it
        counts where it is more than `max_tokens`.
        """
        controller, proposal = self.controller_of(seq), self.look_up(seq, max(max_tokens, max_lookup))
        taken = proposal.cut(controller.lookup_length(proposal.chances, only=not max_tokens))
        return Chain(
            seq, DraftLoop(controller, depth=0 if taken.tokens else min(max_tokens, self._deepest)), max_tokens, taken
        )

    def _start_batch(
        self, seqs: Sequence[SequenceState], most: Sequence[tuple[int, int]], load: BatchDraftScheduler
    ) -> list[Chain]:
        """Return a draft without tokens for each sequence, or its lookup tokens where `load` expects more from them.

        `most`: `max_tokens` and `max_lookup` of each sequence, as in `_start_chain`.
        """
        proposals = [self.look_up(seq, max(tokens)) for seq, tokens in zip(seqs, most, strict=True)]
        counts = load.lookup_lengths([proposal.chances for proposal in proposals], instead=any(n for n, _ in most))
        chains = []
        for seq, (max_tokens, _), proposal, count in zip(seqs, most, proposals, counts, strict=True):
            depth = 0 if count else min(max_tokens, self._deepest)
            loop = DraftLoop(self.controller_of(seq), depth=depth, together=True)
            chains.append(Chain(seq, loop, max_tokens, proposal.cut(count)))
        return chains

    def _live(self, chains: Sequence[Chain], load: BatchDraftScheduler | None) -> list[Chain]:
        """Return the drafts that take one more pass; in a batch, the scheduler `load` ends all other drafts."""
        live = [chain for chain in chains if chain.loop.wants]
        if load is None or not live:
            return live
        verified = load.rows + sum(len(chain.tokens or chain.lookup.tokens) for chain in chains)
        chances = [chain.loop.survival_chances(self.first_chance(chain.seq, load.first), HORIZON) for chain in live]
        for chain, length in zip(live, load.draft_lengths(chances, verified=verified), strict=True):
            chain.loop.wants = length > 0
        return [chain for chain in live if chain.loop.wants]

    def _draft(self, chain: Chain, logits: Tensor) -> None:
        """Draft the next token; end the draft if no token has a finite score, or a score is not a number."""
        seq, sampler = chain.seq, chain.seq.sampler
        row, confidence = self._scores(chain, logits), self.confidence
        q = sampler.probs(row) if confidence.probability or not sampler.greedy else None
        try:
            taken = sampler.take(
                row,
                len(seq.tokens) + len(chain.tokens),
                p=q,
                with_p=confidence.probability != 0,
                with_gap=confidence.gap != 0,
                sure=not self.partial,
            )
        except SelfspecError:  # the draft's logits are not finite, as of a path that overflows
            taken = None
        if taken is None or math.isnan(taken.probability) or math.isnan(taken.gap):
            chain.loop.wants = False
            return
        chain.append(taken.token, self.source)
        chain.rows.append(row if sampler.greedy or q is None else q)
        chance = confidence.estimate(taken.probability, taken.gap)
        chain.loop.record(chance, taken.token, last=taken.token in seq.ends)

    @staticmethod
    def _scores(chain: Chain, logits: Tensor) -> Tensor:
        """Return the processed scores `[V]` of the draft's next token."""
        prefix = ([*chain.seq.tokens, *chain.tokens] for _ in range(1))  # built only if a processor reads it
        return chain.seq.sampler.scores(logits, prefix)[0]

    def _drafted(self, chain: Chain, nodes: int) -> Draft:
        """Return the finished draft, with at most `nodes` tokens: the drafted tokens and further candidates."""
        sampler, tokens, rows = chain.seq.sampler, chain.tokens, chain.rows
        if not tokens:
            return as_draft(chain.lookup)
        q = None if sampler.greedy else torch.stack(rows)
        work = with_head_steps(passes_of(chain.passes), chain.steps)
        draft = Draft.chain(tokens, q=q, confidence=chain.loop.confidences, work=work, sources=chain.sources)
        most = self.candidates if self._few else 1
        counts = chain.loop.candidates(most, nodes=nodes) if most > 1 else ()
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
    """Draw up to `count` tokens from `q` `[V]` without replacement, the first being `token`; return all but `token`."""
    drawn = [token]
    while len(drawn) < count:
        left = q.index_fill(0, torch.tensor(drawn, device=q.device), 0)
        if not float(left.sum()) > 0:
            break
        drawn.append(seq.sampler.draw(left, position))
    return drawn[1:]


def _likeliest(rows: Sequence[Tensor], tokens: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Return, for each row of scores `[V]`, the `count` - 1 top-scoring tokens other than the drafted token."""
    most = min(max(counts), len(rows[0]))
    best = torch.stack(list(rows)).topk(most).indices.tolist()
    return [
        [other for other in row if other != token][: count - 1]
        for row, token, count in zip(best, tokens, counts, strict=True)
    ]
