"""A smaller model of the same vocabulary drafts (Leviathan et al. 2211.17192, Chen et al. 2302.01318)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import Controller
from selfspec.drafters.autoregressive import Chain
from selfspec.drafters.layer_skip import LayerSkipDrafter
from selfspec.proposers.chain import ProposerChain
from selfspec.runtime.forward import Runtime
from selfspec.runtime.paged import PagedCache
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.types.confidence import PROBABILITY, Confidence
from selfspec.types.draft_path import FULL, DraftPath
from selfspec.types.draft_work import DRAFT_MODEL

AT_ONCE = 8  # tokens that the draft model's cache may lack, to be read with its first drafted one


class ModelDrafter(LayerSkipDrafter):
    """Drafts with another model, whose keys and values are in a cache of its own, on a device of its own.

    What its cache lacks of a text is read before a draft's first token: the prompt when the text begins, later the last
    token of a draft that was accepted whole. Keys of what a text shares with the one before it in its row are kept. No
    draft goes beyond the draft model's own context. `path`: what the draft model itself runs along, such as in 8 bits.
    Where the target's cache is a pool of blocks, its own is one of as many, whose rows have the target's tables; each
    text is then read from its beginning.

    Raises `SelfspecError` for a draft model whose tokens are not as many as the target's, and as `LayerSkipDrafter`
    does.
    """

    source = DRAFT_MODEL

    def __init__(
        self,
        target: Runtime,
        runtime: Runtime,
        controller: Controller,
        *,
        path: DraftPath = FULL,
        candidates: int = 1,
        confidence: Confidence = PROBABILITY,
        ahead: ProposerChain | None = None,
    ) -> None:
        ours, theirs = (of.skeleton.identity.vocabulary for of in (runtime, target))
        if ours != theirs:
            raise SelfspecError(
                f"the draft model has {ours} tokens, the model {theirs}; expected one of the same tokenizer"
            )
        own = runtime.with_new_cache(
            rows=target.rows, pool=target.cache.pool if isinstance(target.cache, PagedCache) else None
        )
        super().__init__(own, path, controller, candidates=candidates, confidence=confidence, ahead=ahead)
        self.target = target
        self._held: dict[int, list[int]] = {}  # by row: the tokens whose keys the cache holds
        self._right: dict[SequenceState, int] = {}  # how many of them are known to be the text's
        self._missing: dict[SequenceState, list[int]] = {}  # what the pass under way reads before a chain's last token

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """The draft model reads the prompt."""
        super().begin(seq, prefill)
        self._right[seq] = 0
        if self.runtime.pool is not None:
            self._held.pop(seq.row, None)  # its blocks may have been another's since
        elif self.runtime.cache.slots < self.target.cache.slots:
            self.runtime.reserve(self.target.cache.slots)
            self._held.clear()
            self._right = dict.fromkeys(self._right, 0)
        self.runtime.skeleton.refresh()
        if len(seq.tokens) <= self.runtime.skeleton.context:
            self._read(seq)

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence; its keys stay, for a text that begins as it does."""
        super().end(seq)
        self._right.pop(seq, None)
        self._missing.pop(seq, None)

    def _begun(self, seq: SequenceState, room: int) -> Chain:
        """A draft that stays within the draft model's context."""
        return super()._begun(seq, max(min(room, self.runtime.skeleton.context - len(seq.tokens)), 0))

    def _pass(self, chains: Sequence[Chain]) -> None:
        """Raw logits as of any path, after what the cache lacked was read."""
        places = []
        for c in chains:
            missing = self._missing[c.seq] = [] if c.tokens else self._read(c.seq)
            places.append(len(c.seq.tokens) - 1 + len(c.tokens) - len(missing))
            del self._held[c.seq.row][places[-1] :]  # until they are written
        super()._pass(chains)
        for c, place in zip(chains, places, strict=True):
            root = c.tokens[-1] if c.tokens else c.seq.tokens[-1]
            self._held[c.seq.row][place:] = [*self._missing[c.seq], root, *c.ahead]
            c.logits = [row.to(self.target.device) for row in c.logits]

    def _before(self, chain: Chain) -> list[int]:
        """Tokens before the chain's last whose keys the cache lacks, few of them."""
        return self._missing[chain.seq]

    def _read(self, seq: SequenceState) -> list[int]:
        """Read what the cache lacks of the text but its last token; where that is little, it is what is given."""
        held, right, last = self._held.setdefault(seq.row, []), self._right.get(seq, 0), len(seq.tokens) - 1
        while right < min(len(held), last) and held[right] == seq.tokens[right]:
            right += 1
        right = min(right, len(held), last)
        missing = seq.tokens[right:last]
        if len(missing) > AT_ONCE:
            del held[right:]
            ids = torch.tensor([missing], device=self.runtime.device)
            self.runtime.forward(ids, right, rows=slice(seq.row, seq.row + 1), logits=None, path=self._compiled)
            held[right:] = missing
            right, missing = last, []
        self._right[seq] = right
        return missing
