"""A draft model of another vocabulary (Timor et al. 2502.05202, token-level intersection)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from selfspec.controllers import Controller
from selfspec.drafters.autoregressive import Chain, ChainDrafter
from selfspec.models.vocabularies import Words
from selfspec.proposers.chain import ProposerChain
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import Draft
from selfspec.speculation.sequence import SequenceState
from selfspec.speculation.tree_batch import Placed
from selfspec.types.confidence import PROBABILITY, Confidence
from selfspec.types.draft_path import FULL, DraftPath
from selfspec.types.draft_work import DRAFT_MODEL, Work, passes_of
from selfspec.types.limits import WIDEST_DRAFT

AT_ONCE = 8  # tokens of the text that its cache may lack, to be read with a draft's first token


class TranslatedDrafter(ChainDrafter):
    """Drafts with another model whose tokens are others: those that both have, by its probabilities for these alone.

    Every draft begins with the text read anew in the draft model's tokens, of whose keys its cache keeps those of the
    beginning that stayed the same. As q is known for every token, sampling stays exact. Nothing is drafted while a
    text ends within a character, nor beyond the draft model's context.
    """

    source = DRAFT_MODEL
    partial = True

    def __init__(
        self,
        target: Runtime,
        runtime: Runtime,
        words: Words,
        controller: Controller,
        *,
        path: DraftPath = FULL,
        candidates: int = 1,
        confidence: Confidence = PROBABILITY,
        ahead: ProposerChain | None = None,
    ) -> None:
        super().__init__(controller, candidates=min(candidates, len(words.ours)), confidence=confidence, ahead=ahead)
        self.target, self.words = target, words
        self.runtime = runtime.with_new_cache(rows=target.rows)
        self.path = path
        self._compiled = self.runtime.compile(path)
        self._size = target.skeleton.identity.vocabulary or int(words.ours.max()) + 1
        self._ours, self._theirs = words.ours.to(target.device), words.theirs.to(runtime.device)
        self._of = dict(zip(words.ours.tolist(), words.theirs.tolist(), strict=True))
        self._held: dict[int, list[int]] = {}  # by row: the tokens whose keys the cache holds
        self._texts: dict[SequenceState, list[int]] = {}  # of drafts under way

    def max_work(self, limit: Limit) -> Work:
        """As many passes as the draft may be deep, each as wide as guesses make it."""
        tokens, widest = max(min(limit.depth, limit.nodes, self._deepest), 0), len(self.ahead.prices)
        return passes_of(min(widest, tokens - i) for i in range(tokens))

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence; its keys stay, for a text that begins as it does."""
        super().end(seq)
        self._texts.pop(seq, None)

    def _begun(self, seq: SequenceState, room: int) -> Chain:
        """A draft that stays within the draft model's context, after the text in its tokens."""
        self.runtime.skeleton.refresh()
        text = self._texts[seq] = self.words.read(seq.tokens) or []
        left = self.runtime.skeleton.context - len(text) if text else 0
        return super()._begun(seq, max(min(room, left), 0))

    def _pass(self, chains: Sequence[Chain]) -> None:
        """Raw logits after each chain's last token and what is guessed to follow it, in the target's tokens.

        Minus infinity for those that are not shared.
        """
        texts = [self._text(chain) for chain in chains]
        self._reserve(max(map(len, texts)))
        runs = [self._run(chain, text) for chain, text in zip(chains, texts, strict=True)]
        placed = [
            Placed(c.seq.row, run[0], at, Draft.chain(run[1:])) for c, (at, run) in zip(chains, runs, strict=True)
        ]
        steps = self.runtime.over(placed, path=self._compiled)
        for c, (at, run), step in zip(chains, runs, steps, strict=True):
            assert step.logits is not None
            self._held[c.seq.row][at:] = run
            c.passes.append(1 + len(c.ahead))
            rows = range(len(run) - 1 - len(c.ahead), len(run))
            c.logits = [self._translated(step.logits[0, i]) for i in rows]

    def _translated(self, logits: Tensor) -> Tensor:
        """Logits `[1, V]` of the target's tokens from the draft model's `[V']`."""
        shared = logits[self._theirs].to(self.target.device)
        row = shared.new_full((1, self._size), -math.inf)
        row[0, self._ours] = shared
        return row

    def _run(self, chain: Chain, text: Sequence[int]) -> tuple[int, list[int]]:
        """From which place on the cache lacks the text's keys, and the tokens from there, with what is guessed."""
        guess = self.reading(chain.seq).guess(chain.tokens, chain.room - len(chain.tokens) - 1)
        chain.ahead, chain.source = list(takewhile(self._of.__contains__, guess.tokens)), guess.source
        at, run = self._missing(chain.seq.row, text)
        return at, [*run, *(self._of[token] for token in chain.ahead)]

    def _text(self, chain: Chain) -> list[int]:
        """The text and what is drafted, in the draft model's tokens."""
        return [*self._texts[chain.seq], *(self._of[token] for token in chain.tokens)]

    def _reserve(self, length: int) -> None:
        """Room for texts of that length and the rest of their drafts."""
        needed = length + WIDEST_DRAFT + 2
        if self.runtime.cache.slots < needed:
            self.runtime.reserve(max(needed + length // 2, self.target.cache.slots))
            self._held.clear()  # nothing is committed there, so nothing is taken along

    def _missing(self, row: int, text: Sequence[int]) -> tuple[int, list[int]]:
        """From which place on a row lacks the text's keys, and the tokens from there, few of them."""
        held = self._held.setdefault(row, [])
        right, last = 0, min(len(held), len(text) - 1)
        while right < last and held[right] == text[right]:
            right += 1
        del held[right:]
        if len(text) - right > AT_ONCE:
            ids = torch.tensor([text[right:-1]], device=self.runtime.device)
            self.runtime.forward(ids, right, rows=slice(row, row + 1), logits=None, path=self._compiled)
            held[right:] = text[right:-1]
            right = len(text) - 1
        return right, list(text[right:])
