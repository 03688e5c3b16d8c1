"""Self-drafting (Draft & Verify, Zhang et al. 2309.08168): the model itself, along a cheaper path."""

from __future__ import annotations

from collections.abc import Sequence

from selfspec.controllers import Controller
from selfspec.drafters.autoregressive import Chain, ChainDrafter
from selfspec.drafters.head_drafter import HeadBelow
from selfspec.proposers.base import Guess
from selfspec.proposers.chain import ProposerChain
from selfspec.runtime.forward import Runtime
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.speculation.tree_batch import Placed
from selfspec.types.confidence import PROBABILITY, Confidence
from selfspec.types.draft_path import DraftPath, as_path
from selfspec.types.draft_work import Work, passes_of, with_head_steps
from selfspec.types.skip import SkipSet


class LayerSkipDrafter(ChainDrafter):
    """Drafts along `path`, with the model's own keys and values of all that is committed.

    Its own keys go to the slots that verification then overwrites. `path`: a draft path, or the sub-layers that it
    bypasses. `controller` ends a draft: each sequence with a seed starts it afresh, all others share what it learns.
    It is told the `confidence` in each token that was drafted. `candidates`: the most for each place, the token that
    the draft goes on from counted; 1 drafts a chain. Sequences draft in lockstep. `ahead`: guesses that a pass along
    the path is to check beside its one token; what is drafted stays what the path drafts, in fewer passes. Where the
    controller takes one as it is, nothing is drafted along the path in that round. `below`: a trained head that also
    guesses.

    Raises `SelfspecError` for a path that the model does not have (`Runtime.compile`), and for no candidate or more
    than a verification holds.
    """

    def __init__(
        self,
        runtime: Runtime,
        path: DraftPath | SkipSet,
        controller: Controller,
        *,
        candidates: int = 1,
        confidence: Confidence = PROBABILITY,
        ahead: ProposerChain | None = None,
        below: HeadBelow | None = None,
    ) -> None:
        super().__init__(controller, candidates=candidates, confidence=confidence, ahead=ahead)
        self.runtime = runtime
        self.path = as_path(path)
        words = self.path.vocabulary
        self.partial = words is not None
        self.candidates = candidates if words is None else min(candidates, len(words))
        self._compiled = runtime.compile(self.path)
        self.below = below
        if below is not None:
            self.hidden = below.texts.head.layers
        widest = len((self.ahead if below is None else below).prices)
        self._max_work = [self._all_of(n, widest) for n in range(self._deepest + 1)]

    @property
    def native(self) -> bool:
        """Whether its passes are one native call each."""
        return self._compiled.native is not None

    def max_work(self, limit: Limit) -> Work:
        """As many passes as the draft may be deep, each as wide as it may be."""
        return self._max_work[max(min(limit.depth, limit.nodes, self._deepest), 0)]

    def _all_of(self, tokens: int, widest: int) -> Work:
        """The most work that so many tokens can take."""
        widths = [min(widest, tokens - i) for i in range(tokens)]
        return with_head_steps(passes_of(widths), 0 if self.below is None else sum(widths))

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """A text of its own, for a head below too."""
        super().begin(seq, prefill)
        if self.below is not None:
            self.below.texts.begin(seq, prefill)

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Tell the controller what was accepted, and a head below what was committed."""
        super().observe(seq, outcome)
        if self.below is not None:
            self.below.texts.observe(seq, outcome)

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence."""
        super().end(seq)
        if self.below is not None:
            self.below.texts.end(seq)

    def _pass(self, chains: Sequence[Chain]) -> None:
        """Raw logits after each chain's last token, and after those guessed to follow it, from one pass."""
        placed, firsts = [], []
        for c in chains:
            guess = self._guess(c)
            c.ahead, c.source = list(guess.tokens), guess.source
            c.passes.append(1 + len(c.ahead))
            root, before = c.tokens[-1] if c.tokens else c.seq.tokens[-1], self._before(c)
            run, start = [*before, root, *c.ahead], len(c.seq.tokens) - 1 + len(c.tokens) - len(before)
            placed.append(Placed(c.seq.row, run[0], start, Draft.chain(run[1:])))
            firsts.append(len(before))
        steps = self.runtime.over(placed, path=self._compiled, hidden=() if self.below is None else self.hidden)
        for c, step, first in zip(chains, steps, firsts, strict=True):
            assert step.logits is not None
            c.logits = [step.logits[0, i : i + 1] for i in range(first, first + c.passes[-1])]
            if self.below is not None:
                c.streams.append(self.below.texts.streams_of(step)[0])

    def _before(self, chain: Chain) -> list[int]:
        """Tokens before the chain's last whose keys the cache lacks: none, as it is the model's own."""
        return []

    def _guess(self, chain: Chain) -> Guess:
        """What the chain's next pass is to check."""
        room = chain.room - len(chain.tokens) - 1
        if self.below is not None and chain.passes:  # of the last pass's streams, those before what was drafted
            chain.streams[-1] = chain.streams[-1][: len(chain.tokens) - chain.begun]
            self.below.learn(chain)
        guess = self.reading(chain.seq).guess(chain.tokens, room)
        if self.below is not None:
            chain.told.clear()
            guess = self.below.guess(chain, guess, room)
            chain.begun, chain.checked = len(chain.tokens), guess.tokens
        return guess
