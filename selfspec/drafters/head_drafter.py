"""Drafting by draft heads that read the target's hidden states (EAGLE, Medusa and similar), alone or below a path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from selfspec.controllers import Controller
from selfspec.draft_modules.heads import Head
from selfspec.drafters.autoregressive import Chain, ChainDrafter
from selfspec.proposers.base import AcceptanceStats, Proposal, ProposerChain
from selfspec.speculation.drafts import Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sampling import best_and_share
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import PROBABILITY, Confidence
from selfspec.types.draft_work import Work, steps_of
from selfspec.types.methods import WIDEST_DRAFT

FIRST = tuple(0.05 + 0.09 * i for i in range(11))  # prior chance to be right, by the head's probability in tenths
USUAL = 1.3  # prior rate of the head: expected tokens in the time of a draft pass over one token
FADING = 0.9  # decay of the average rate
FORGETTING = 0.02  # drift of an unused head's rate towards the prior
LIKELY = 0.8  # assumed chance that the head's next lookup token is right, before a head step computes it


@dataclass(slots=True)
class _Pairs:
    """One sequence's pairs of a token and the hidden states before that token, as far as the head has not read them.

    `start`: the number of pairs that the head has read. `state`: the head's state after the last read pair. `chances`:
    acceptance rates of the head's lookup tokens in this text; `mean_rate`: average expected tokens of a draft pass with
    the head's lookup tokens, in the time of a draft pass over one token.
    """

    start: int = 0
    tokens: list[int] = field(default_factory=list)
    streams: list[Tensor] = field(default_factory=list)
    state: Any = None
    chances: AcceptanceStats = field(default_factory=lambda: AcceptanceStats(FIRST))
    mean_rate: float = USUAL

    def add(self, tokens: Sequence[int], streams: Tensor) -> None:
        """Append pairs of tokens `[n]` and hidden states `[n, D * layers]`."""
        self.tokens += tokens
        self.streams.append(streams)


class HeadTexts:
    """A head's input for each sequence: pairs of a committed token and the target's hidden states."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self._pairs: dict[SequenceState, _Pairs] = {}

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Start a sequence; `prefill` holds the hidden states of all prompt tokens but the last.

        The head reads the prompt here, as no draft shall be charged with that.
        """
        longest = len(seq.tokens) + seq.remaining + WIDEST_DRAFT
        self.head.reserve(min(longest, self.head.target.cache.slots))
        pairs = self._pairs[seq] = _Pairs()
        if prefill.hidden:
            pairs.add(seq.tokens[1:], self.streams_of(prefill)[0])
            self.catch_up(seq)

    def streams_of(self, step: ForwardOutput) -> Tensor:
        """Return the hidden states of a pass that the head reads, `[B, n, D * layers]`."""
        streams = [step.hidden[layer] for layer in self.head.layers]
        return streams[0] if len(streams) == 1 else torch.cat(streams, -1)

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Append the committed tokens, each with the hidden states of the verification row that predicted it."""
        rows = [0, *(node + 1 for node in outcome.path)][: len(outcome.tokens)]
        self._pairs[seq].add(outcome.tokens, self.streams_of(outcome.step)[0, rows])

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence."""
        self._pairs.pop(seq, None)

    def get_pairs(self, seq: SequenceState) -> _Pairs | None:
        """Return a sequence's pairs; None if `begin` was not called for the sequence."""
        return self._pairs.get(seq)

    def catch_up(self, seq: SequenceState, tokens: Sequence[int] = (), streams: Sequence[Tensor] = ()) -> Tensor | None:
        """Let the head read the sequence's unread pairs, then a draft's pairs; return the logits after the last pair.

        `tokens`, `streams`: the draft's tokens, and the hidden states before each of them. The logits cover the head's
        vocabulary; None if there is no pair to read. The draft's pairs are read again once they are committed.
        """
        pairs = self._pairs[seq]
        read, all_streams = [*pairs.tokens, *tokens], [*pairs.streams, *streams]
        if not read:
            return None
        logits, pairs.state = self.head.read(
            seq.row, pairs.start, torch.tensor(read, device=self.head.target.device), torch.cat(list(all_streams))
        )
        pairs.start += len(pairs.tokens)
        pairs.tokens, pairs.streams = [], []
        return logits

    def draft_step(self, seq: SequenceState, token: int, place: int, *, drafted: int = 0) -> Tensor:
        """Return the logits over the head's vocabulary after `token`, the `place`-th token (from 1) the head proposed.

        `drafted`: the number of draft tokens that `catch_up` read, which stand before the head's tokens.
        """
        pairs = self._pairs[seq]
        logits, pairs.state = self.head.draft_step(seq.row, pairs.start + drafted, place, token, pairs.state)
        return logits


class HeadDrafter(ChainDrafter):
    """Drafter with a draft head, which reads the target's hidden states at first and its own states afterwards."""

    partial = True

    def __init__(
        self,
        head: Head,
        controller: Controller,
        *,
        candidates: int = 1,
        confidence: Confidence = PROBABILITY,
        proposer_chain: ProposerChain | None = None,
    ) -> None:
        super().__init__(
            controller,
            candidates=min(candidates, len(head.words)),
            confidence=confidence,
            proposer_chain=proposer_chain,
        )
        self.source = head.kind
        self._deepest = min(self._deepest, head.places)
        self.texts = HeadTexts(head)
        self.hidden = head.layers

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Start the sequence in the head, with the prompt's hidden states."""
        super().begin(seq, prefill)
        self.texts.begin(seq, prefill)

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Pass the committed tokens and their hidden states to the head."""
        super().observe(seq, outcome)
        self.texts.observe(seq, outcome)

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence."""
        super().end(seq)
        self.texts.end(seq)

    def _most_work(self, tokens: int) -> Work:
        """Return the work of one head step for each token."""
        return steps_of(tokens)

    def _pass(self, chains: Sequence[Chain]) -> None:
        """Run one head step for each draft; a draft's first step reads the pairs committed since the last draft."""
        for c in chains:
            if not c.tokens:
                logits = self.texts.catch_up(c.seq)
            else:
                logits = self.texts.draft_step(c.seq, c.tokens[-1], len(c.tokens))
            if logits is None:
                c.loop.wants = False
                continue
            c.passes.append(1)
            c.logits = [self.texts.head.to_full_vocabulary(logits).unsqueeze(0)]


class HeadBelow:
    """A draft head that proposes lookup tokens, which a draft pass checks together with the token that it must read.

    `prices[i]`: cost of a draft pass over i + 1 tokens, relative to a draft pass over one token; `step`: cost of a head
    step in the same unit.
    """

    def __init__(self, head: Head, prices: Sequence[float], step: float) -> None:
        self.texts = HeadTexts(head)
        self.prices, self.step = tuple(prices), step

    def look_up(self, chain: Chain, other: Proposal, max_tokens: int) -> Proposal:
        """Return at most `max_tokens` lookup tokens of the head for the next draft pass, or the proposal `other`.

        `other`: the proposers' lookup tokens, returned if their expected tokens per time reach the head's average, or
        if the head proposes nothing. The head proposes tokens as long as each is expected to increase the tokens per
        time.
        """
        seq = chain.seq
        pairs = self.texts.get_pairs(seq)
        max_tokens = min(max_tokens, len(self.prices) - 1, self.texts.head.places)
        if pairs is None or max_tokens < 1:
            return other
        if self._rate(other) >= pairs.mean_rate:
            pairs.mean_rate += FORGETTING * (USUAL - pairs.mean_rate)  # so that the head is tried again
            return other
        drafted = len(chain.tokens)
        logits = self.texts.catch_up(seq, chain.tokens, chain.streams)
        if logits is None:
            return other
        chain.steps += 1
        tokens, chances = list[int](), list[float]()
        reach = expected = 1.0
        time = self.prices[0] + self.step
        while len(tokens) < max_tokens:
            picked = self._pick(chain, tokens, logits)
            if picked is None:
                break
            token, probability = picked
            chance = pairs.chances(round(10 * probability))
            more = self.prices[len(tokens) + 1] - self.prices[len(tokens)]
            if reach * chance * time <= more * expected:
                break
            chain.probability_bins.append(round(10 * probability))
            tokens.append(token)
            chances.append(chance)
            reach *= chance
            expected, time = expected + reach, time + more
            if len(tokens) == max_tokens or LIKELY * reach * time <= (self.step + more) * expected or token in seq.ends:
                break
            logits = self.texts.draft_step(seq, token, len(tokens), drafted=drafted)
            chain.steps += 1
            time += self.step
        pairs.mean_rate = FADING * pairs.mean_rate + (1 - FADING) * expected / time
        return Proposal(tokens, chances, self.texts.head.kind) if tokens else other

    def _rate(self, proposal: Proposal) -> float:
        tokens = reach = 1.0
        for chance in proposal.chances:
            reach *= chance
            tokens += reach
        return tokens / self.prices[len(proposal.chances)]

    def _pick(self, chain: Chain, predicted: Sequence[int], logits: Tensor) -> tuple[int, float] | None:
        """Return the head's most probable token and its probability; None if processors mask all of the head's tokens.

        With tied sampling and any processor, return the token that the noise selects, and its probability.
        """
        seq, head = chain.seq, self.texts.head
        if not seq.sampler.processors:  # greedy decoding, or temperature 1
            index, share = best_and_share(logits)
            return (head.token_ids[index], share) if share > 0 else None
        logits, before = head.to_full_vocabulary(logits), [*chain.tokens, *predicted]
        row = seq.sampler.scores(logits.unsqueeze(0), ([*seq.tokens, *before] for _ in range(1)))[0]
        if not seq.sampler.tied:
            token, share = best_and_share(row)
            return (token, share) if share > 0 else None
        taken = seq.sampler.take(row, len(seq.tokens) + len(before), with_p=True, sure=False)
        return None if taken is None else (taken.token, taken.probability)

    def learn(self, chain: Chain) -> None:
        """Update the head's acceptance rates by the lookup tokens that the draft's last pass checked."""
        pairs = self.texts.get_pairs(chain.seq)
        if pairs is None:
            return
        for strength, predicted, token in zip(
            chain.probability_bins, chain.checked, chain.tokens[chain.pass_start :], strict=False
        ):
            pairs.chances.record(strength, predicted == token)
            if predicted != token:
                break
