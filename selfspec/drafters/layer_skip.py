"""Self-speculative drafting (Draft & Verify, Zhang et al. 2309.08168): the model drafts along a cheaper path."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from selfspec.controllers import Controller
from selfspec.controllers.draft_loop import DraftLengths
from selfspec.drafters.autoregressive import Chain, ChainDrafter
from selfspec.drafters.head_drafter import HeadBelow
from selfspec.proposers.base import Proposal, ProposerChain
from selfspec.proposers.lookup import Lookup
from selfspec.runtime.base import Runtime
from selfspec.runtime.device_rounds import LENGTHS, RoundPlan
from selfspec.runtime.device_trees import TREE_ROWS
from selfspec.speculation.drafter import Limit
from selfspec.speculation.drafts import Draft, Outcome
from selfspec.speculation.forward_output import ForwardOutput
from selfspec.speculation.sequence import SequenceState
from selfspec.speculation.tree_batch import PlacedDraft
from selfspec.types.acceptance import PROBABILITY, Confidence
from selfspec.types.controller import StoppingRule
from selfspec.types.draft_path import DraftPath, SkipSet, as_path
from selfspec.types.draft_work import Work, passes_of, with_head_steps


class LayerSkipDrafter(ChainDrafter):
    """Drafter along a draft path of the target, which reads the target's keys and values of all committed tokens.

    Drafted tokens write their keys and values to cache slots that verification overwrites. All sequences of a batch
    draft in lockstep. `path`: a draft path, or a skip set of skipped sub-layers. `controller`, `confidence` and
    `candidates` are those of `ChainDrafter`. `proposer_chain`: proposers of lookup tokens. A pass along the path checks
    lookup tokens together with the token that it must read, so the same tokens are drafted in fewer passes. If the
    controller sends lookup tokens directly to verification, that round drafts nothing along the path. `below`: a draft
    head that proposes lookup tokens too.

    Rounds may run on the device (`plan_round`) without a draft head and with no other proposer than `Lookup`, if the
    controller has a `StoppingRule`. Tokens are drafted there one by one. Further candidates of each position, and then
    lookup tokens, fill what is left of `TREE_ROWS`; in a batch with a scheduler there are none of either.

    Raises `SelfspecError` for a path that does not fit the model (`Runtime.compile`), and if `candidates` is below 1 or
    more than a verification pass holds.
    """

    on_device = True  # whether rounds may run on the device

    def __init__(
        self,
        runtime: Runtime,
        path: DraftPath | SkipSet,
        controller: Controller,
        *,
        candidates: int = 1,
        confidence: Confidence = PROBABILITY,
        proposer_chain: ProposerChain | None = None,
        below: HeadBelow | None = None,
    ) -> None:
        super().__init__(controller, candidates=candidates, confidence=confidence, proposer_chain=proposer_chain)
        self.runtime = runtime
        self.path = as_path(path)
        words = self.path.vocabulary
        self.partial = words is not None
        self.candidates = candidates if words is None else min(candidates, len(words))
        self._compiled = runtime.compile(self.path)
        self.below = below
        if below is not None:
            self.hidden = below.texts.head.layers
        widest = len((self.proposer_chain if below is None else below).prices)
        self._lengths: dict[SequenceState, DraftLengths] = {}
        self._max_work = [self._all_of(n, widest) for n in range(self._deepest + 1)]

    @property
    def native(self) -> bool:
        """Whether each pass along the path is one native call."""
        return self._compiled.native is not None

    def _most_work(self, tokens: int) -> Work:
        """Return the work of one draft pass for each token, each pass of maximum width."""
        return self._max_work[tokens]

    def _all_of(self, tokens: int, widest: int) -> Work:
        """Return the most work that `tokens` drafted tokens can take."""
        widths = [min(widest, tokens - i) for i in range(tokens)]
        return with_head_steps(passes_of(widths), 0 if self.below is None else sum(widths))

    def plan_round(self, seqs: Sequence[SequenceState], limit: Limit, *, ahead: bool) -> RoundPlan | None:
        """Return what the next round drafts on the device; None: it has to be drafted on the host.

        Each sequence's controller ends its draft; the longest is as long as any controller lets its drafts be. With a
        scheduler `load`, it chooses one length for all of several sequences instead.
        """
        proposers = self.proposer_chain.proposers
        if not self.on_device or self.below is not None or not all(type(each) is Lookup for each in proposers):
            return None
        load, controllers = self.load if len(seqs) > 1 else None, [self.controller_of(seq) for seq in seqs]
        rules = [controller.stopping(LENGTHS[-1]) if load is None else _least(controller) for controller in controllers]
        stopping = [rule for rule in rules if rule is not None]
        if len(stopping) < len(seqs):
            return None
        most, on_read, candidates, lookup = min(limit.depth, limit.nodes), None, 1, None
        if load is None:
            each = [self._lengths[seq].choose(rule, LENGTHS, most) for seq, rule in zip(seqs, stopping, strict=True)]
            length = max(each)
            left = min(limit.nodes, TREE_ROWS - 1)
            candidates = max(1, min(self.candidates, left // max(length, 1)))
            branch = max(0, left - length * candidates) if length else 0
            lookup = branch if proposers else None
        else:
            firsts = [self.first_chance(seq, load.first) for seq in seqs]
            pairs = [c.acceptance_chances((), first) for c, first in zip(controllers, firsts, strict=True)]
            hopes, later = zip(*pairs, strict=True)
            allowed = [n for n in LENGTHS if n <= min(most, max(rule.most for rule in stopping))]
            length = load.common_length(hopes, sum(later) / len(later), allowed)
            on_read = partial(load.record_common, length)
        return RoundPlan(
            length, self._compiled, stopping, self.confidence, self.source, on_read, candidates, lookup, Lookup.name
        )

    def begin(self, seq: SequenceState, prefill: ForwardOutput) -> None:
        """Start the sequence, also in the draft head below the path, if there is one."""
        super().begin(seq, prefill)
        self._lengths[seq] = DraftLengths()
        self.runtime.warm_up(self._compiled, seq.row, len(seq.tokens), hidden=self.hidden)
        if self.below is not None:
            self.below.texts.begin(seq, prefill)

    def observe(self, seq: SequenceState, outcome: Outcome) -> None:
        """Report the accepted tokens to the controller, and the committed tokens to a draft head below the path."""
        super().observe(seq, outcome)
        if (lengths := self._lengths.get(seq)) is not None:
            lengths.observe(len(outcome.draft.confidence), sum(calls for _, calls in outcome.draft.work))
        if self.below is not None:
            self.below.texts.observe(seq, outcome)

    def end(self, seq: SequenceState) -> None:
        """Forget the sequence."""
        super().end(seq)
        self._lengths.pop(seq, None)
        if self.below is not None:
            self.below.texts.end(seq)

    def _pass(self, chains: Sequence[Chain]) -> None:
        """Compute the raw logits after each draft's last token and after its lookup tokens, in one pass."""
        placed, firsts = [], []
        for c in chains:
            proposal = self._look_up(c)
            c.lookup_tokens, c.source = list(proposal.tokens), proposal.source
            c.passes.append(1 + len(c.lookup_tokens))
            root, before = c.tokens[-1] if c.tokens else c.seq.tokens[-1], self._before(c)
            run, start = [*before, root, *c.lookup_tokens], len(c.seq.tokens) - 1 + len(c.tokens) - len(before)
            placed.append(PlacedDraft(c.seq.row, run[0], start, Draft.chain(run[1:])))
            firsts.append(len(before))
        steps = self.runtime.forward_drafts(
            placed, path=self._compiled, hidden=() if self.below is None else self.hidden
        )
        for c, step, first in zip(chains, steps, firsts, strict=True):
            assert step.logits is not None
            c.logits = [step.logits[0, i : i + 1] for i in range(first, first + c.passes[-1])]
            if self.below is not None:
                c.streams.append(self.below.texts.streams_of(step)[0])

    def _before(self, chain: Chain) -> list[int]:
        """Return the uncached tokens before the draft's last token: none, since the path reads the target's cache."""
        return []

    def _look_up(self, chain: Chain) -> Proposal:
        """Return the lookup tokens that the draft's next pass checks."""
        remaining = self._most_checked(chain)
        if self.below is not None and chain.passes:  # keep the hidden states before tokens that were drafted
            chain.streams[-1] = chain.streams[-1][: len(chain.tokens) - chain.pass_start]
            self.below.learn(chain)
        proposal = self.proposer_state(chain.seq).look_up(chain.tokens, remaining)
        if self.below is not None:
            chain.probability_bins.clear()
            proposal = self.below.look_up(chain, proposal, remaining)
            chain.pass_start, chain.checked = len(chain.tokens), proposal.tokens
        return proposal


def _least(controller: Controller) -> StoppingRule:
    """Return the part of a controller's rule that holds where a scheduler decides for the whole batch."""
    return StoppingRule(tuple(controller.min_confidence(n) for n in range(1, LENGTHS[-1] + 1)))
