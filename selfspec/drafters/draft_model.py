"""Drafting with a smaller model of the same vocabulary (Leviathan et al. 2211.17192, Chen et al. 2302.01318)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import Controller
from selfspec.drafters.autoregressive import Chain
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.proposers.chain import ProposerChain
from selfspec.runtime.base import Runtime
from selfspec.runtime.paged import PagedCache
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.confidence import PROBABILITY, Confidence
from selfspec.types.draft_path import FULL, DraftPath
from selfspec.types.draft_work import DRAFT_MODEL

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

    def _start_chain(self, seq: SequenceState, max_tokens: int) -> Chain:
        """Return a draft without tokens, limited by the draft model's context length."""
        return super()._start_chain(seq, max(min(max_tokens, self.runtime.skeleton.context - len(seq.tokens)), 0))

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
