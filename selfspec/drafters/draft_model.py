"""Drafting with a smaller model, of the same vocabulary or of another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import Controller
from selfspec.drafters.autoregressive import Chain, ChainDrafter
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.models.vocabularies import TokenMap
from selfspec.proposers.base import ProposerChain
from selfspec.runtime.base import Runtime
from selfspec.runtime.paged import PagedCache
from selfspec.speculation.drafts import Draft
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.speculation.tree_batch import PlacedDraft
from selfspec.types.acceptance import PROBABILITY, Confidence
from selfspec.types.draft_path import FULL, DraftPath
from selfspec.types.draft_work import DRAFT_MODEL, Work, passes_of
from selfspec.types.methods import WIDEST_DRAFT

AT_ONCE = 8  # most uncached tokens that the first draft pass reads; more are read by a separate pass before it


class ModelDrafter(LayerSkipDrafter):
    """Drafter with a separate draft model, which has its own KV cache and may run on another device.

    Before a draft's first token the draft model reads the tokens missing from its cache: the prompt when the sequence
    begins, later the last token of a fully accepted draft. A prefix that the sequence shares with the previous sequence
    of its cache row is not read again. No draft exceeds the draft model's context length. `path`: the draft path of the
    draft model itself, such as int8. If the target has a paged cache, the draft model's cache has the same number of
    blocks, and its rows use the target's block tables. Each sequence's prompt is then read from its first token on.

    Raises `SelfspecError` for a draft model of another vocabulary size than the target's, and as `LayerSkipDrafter`
    does.
    """

    source = DRAFT_MODEL
    on_device = False

    def __init__(
        self,
        target: Runtime,
        runtime: Runtime,
        controller: Controller,
        *,
        path: DraftPath = FULL,
        candidates: int = 1,
        confidence: Confidence = PROBABILITY,
        proposer_chain: ProposerChain | None = None,
    ) -> None:
        ours, theirs = (model_runtime.skeleton.identity.vocabulary for model_runtime in (runtime, target))
        if ours != theirs:
            raise SelfspecError(
                f"draft model: vocabulary size {ours}; expected {theirs}, the vocabulary size of the model"
            )
        own = runtime.with_new_cache(
            rows=target.rows, pool=target.cache.pool if isinstance(target.cache, PagedCache) else None
        )
        super().__init__(
            own, path, controller, candidates=candidates, confidence=confidence, proposer_chain=proposer_chain
        )
        self.target = target
        self._cached: dict[int, list[int]] = {}  # by cache row: the cached tokens
        self._right: dict[SequenceState, int] = {}  # length of the cached prefix known to match the sequence
        self._missing: dict[SequenceState, list[int]] = {}  # tokens that the pass reads before a draft's last token

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Prefill the draft model's cache with the prompt, if it fits the context."""
        super().begin(seq, prefill)
        del self._cached.get(seq.row, [])[len(seq.tokens) :]  # warming up overwrites these keys
        self._right[seq] = 0
        if self.runtime.pool is not None:
            self._cached.pop(seq.row, None)  # another sequence may have used its blocks since
        elif self.runtime.cache.slots < self.target.cache.slots:
            self.runtime.reserve(self.target.cache.slots)
            self._cached.clear()
            self._right = dict.fromkeys(self._right, 0)
        self.runtime.skeleton.refresh()
        if len(seq.tokens) <= self.runtime.skeleton.context:
            self._read(seq)

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence; its keys stay cached for a sequence with the same prefix."""
        super().end(seq)
        self._right.pop(seq, None)
        self._missing.pop(seq, None)

    def _most_drafted(self, seq: SequenceState, max_tokens: int) -> int:
        """Return as many tokens as fit the draft model's context length."""
        return max(min(max_tokens, self.runtime.skeleton.context - len(seq.tokens)), 0)

    def _pass(self, chains: Sequence[Chain]) -> None:
        """Compute raw logits as the base class does, reading the uncached tokens first or in the same pass."""
        places = []
        for c in chains:
            missing = self._missing[c.seq] = [] if c.tokens else self._read(c.seq)
            places.append(len(c.seq.tokens) - 1 + len(c.tokens) - len(missing))
            del self._cached[c.seq.row][places[-1] :]  # the pass rewrites these keys
        super()._pass(chains)
        for c, place in zip(chains, places, strict=True):
            root = c.tokens[-1] if c.tokens else c.seq.tokens[-1]
            self._cached[c.seq.row][place:] = [*self._missing[c.seq], root, *c.lookup_tokens]
            c.logits = [row.to(self.target.device) for row in c.logits]

    def _before(self, chain: Chain) -> list[int]:
        """Return the uncached tokens before the draft's last token, `AT_ONCE` at most."""
        return self._missing[chain.seq]

    def _read(self, seq: SequenceState) -> list[int]:
        """Read all uncached tokens except the sequence's last; if at most `AT_ONCE`, return them unread instead."""
        cached, right, last = self._cached.setdefault(seq.row, []), self._right.get(seq, 0), len(seq.tokens) - 1
        while right < min(len(cached), last) and cached[right] == seq.tokens[right]:
            right += 1
        right = min(right, len(cached), last)
        missing = seq.tokens[right:last]
        if len(missing) > AT_ONCE:
            del cached[right:]
            ids = torch.tensor([missing], device=self.runtime.device)
            self.runtime.forward(ids, right, rows=slice(seq.row, seq.row + 1), logits=None, path=self._compiled)
            cached[right:] = missing
            right, missing = last, []
        self._right[seq] = right
        return missing


class CrossVocabularyDrafter(ChainDrafter):
    """Drafter with a draft model of another vocabulary, whose logits are restricted to the shared tokens.

    `target`: the verified model; `runtime`: the draft model; `words`: the tokens that their vocabularies share. Before
    each draft the text is tokenised again for the draft model, whose KV cache is kept for the unchanged prefix. As q is
    known for every token, sampling stays exact. No token is drafted while the text ends within a multi-byte character,
    nor beyond the draft model's context length.
    """

    source = DRAFT_MODEL
    partial = True

    def __init__(
        self,
        target: Runtime,
        runtime: Runtime,
        words: TokenMap,
        controller: Controller,
        *,
        path: DraftPath = FULL,
        candidates: int = 1,
        confidence: Confidence = PROBABILITY,
        proposer_chain: ProposerChain | None = None,
    ) -> None:
        super().__init__(
            controller,
            candidates=min(candidates, len(words.ours)),
            confidence=confidence,
            proposer_chain=proposer_chain,
        )
        self.target, self.words = target, words
        self.runtime = runtime.with_new_cache(rows=target.rows)
        self.path = path
        self._compiled = self.runtime.compile(path)
        self._size = target.skeleton.identity.vocabulary or int(words.ours.max()) + 1
        self._ours, self._theirs = words.ours.to(target.device), words.theirs.to(runtime.device)
        self._target_to_draft = dict(zip(words.ours.tolist(), words.theirs.tolist(), strict=True))
        self._cached: dict[int, list[int]] = {}  # by cache row: the cached tokens
        self._texts: dict[SequenceState, list[int]] = {}  # texts of current drafts in the draft model's tokens

    def _most_work(self, tokens: int) -> Work:
        """Return the work of one draft pass for each token, each pass of maximum width."""
        widest = len(self.proposer_chain.prices)
        return passes_of(min(widest, tokens - i) for i in range(tokens))

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence; its keys stay cached for a sequence with the same prefix."""
        super().end(seq)
        self._texts.pop(seq, None)

    def _most_drafted(self, seq: SequenceState, max_tokens: int) -> int:
        """Tokenise the text for the draft model; return as many tokens as fit that model's context length."""
        self.runtime.skeleton.refresh()
        text = self._texts[seq] = (self.words.read(seq.tokens) or []) if max_tokens else []
        return max(min(max_tokens, self.runtime.skeleton.context - len(text)), 0) if text else 0

    def _pass(self, chains: Sequence[Chain]) -> None:
        """Compute the raw logits after each draft's last token and its lookup tokens, over the target's vocabulary.

        Tokens that the vocabularies do not share get minus infinity.
        """
        texts = [self._text(chain) for chain in chains]
        self._reserve(max(map(len, texts)))
        runs = [self._run(chain, text) for chain, text in zip(chains, texts, strict=True)]
        placed = [
            PlacedDraft(c.seq.row, run[0], start, Draft.chain(run[1:]))
            for c, (start, run) in zip(chains, runs, strict=True)
        ]
        steps = self.runtime.forward_drafts(placed, path=self._compiled)
        for c, (start, run), step in zip(chains, runs, steps, strict=True):
            assert step.logits is not None
            self._cached[c.seq.row][start:] = run
            c.passes.append(1 + len(c.lookup_tokens))
            rows = range(len(run) - 1 - len(c.lookup_tokens), len(run))
            c.logits = [self._translated(step.logits[0, i]) for i in rows]

    def _translated(self, logits: Tensor) -> Tensor:
        """Map the draft model's logits `[V']` to the target's vocabulary `[1, V]`."""
        shared = logits[self._theirs].to(self.target.device)
        row = shared.new_full((1, self._size), -math.inf)
        row[0, self._ours] = shared
        return row

    def _run(self, chain: Chain, text: Sequence[int]) -> tuple[int, list[int]]:
        """Return the position of the first uncached token, and the tokens from there on, then the lookup tokens.

        All tokens are in the draft model's vocabulary.
        """
        proposal = self.proposer_state(chain.seq).look_up(chain.tokens, self._most_checked(chain))
        chain.lookup_tokens, chain.source = (
            list(takewhile(self._target_to_draft.__contains__, proposal.tokens)),
            proposal.source,
        )
        start, run = self._missing(chain.seq.row, text)
        return start, [*run, *(self._target_to_draft[token] for token in chain.lookup_tokens)]

    def _text(self, chain: Chain) -> list[int]:
        """Return the text and the drafted tokens in the draft model's vocabulary."""
        return [*self._texts[chain.seq], *(self._target_to_draft[token] for token in chain.tokens)]

    def _reserve(self, length: int) -> None:
        """Ensure that the cache has slots for a text of `length` tokens and its draft."""
        needed = length + WIDEST_DRAFT + 2
        if self.runtime.cache.slots < needed:
            self.runtime.reserve(max(needed + length // 2, self.target.cache.slots))
            self._cached.clear()  # growing keeps committed slots only, and this cache has no committed slots

    def _missing(self, row: int, text: Sequence[int]) -> tuple[int, list[int]]:
        """Return the position of the first uncached token in a row, and the tokens from there on.

        If more than `AT_ONCE` tokens are uncached, all but the last token are read into the cache first.
        """
        cached = self._cached.setdefault(row, [])
        right, last = 0, min(len(cached), len(text) - 1)
        while right < last and cached[right] == text[right]:
            right += 1
        del cached[right:]
        if len(text) - right > AT_ONCE:
            ids = torch.tensor([text[right:-1]], device=self.runtime.device)
            self.runtime.forward(ids, right, rows=slice(row, row + 1), logits=None, path=self._compiled)
            cached[right:] = text[right:-1]
            right = len(text) - 1
        return right, list(text[right:])
