"""Sequences whose drafts are decided together: sampling keeps the law of each, and a bug in it would be seen."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from models import small
from toys import Adding, enumerate_outcomes

from selfspec.controllers import AdaptiveThreshold, BatchDraftScheduler, RateOptimal
from selfspec.drafters import LayerSkipDrafter, LookupDrafter
from selfspec.drafters.batch_policy import decide_together
from selfspec.engine.engine import Engine
from selfspec.proposers.base import ProposerChain
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafter import Limit
from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState
from selfspec.types.acceptance import AcceptanceCurve, PayoffModel
from selfspec.types.costs import PassCosts
from selfspec.types.draft_path import SkipSet

VOCABULARY = 2
PROMPTS, ROOMS = ([0, 1, 1], [1, 0]), (3, 3)
EXACT, SEEN = 1e-9, 1e-3
# A second token of each is so dear that only who has more hope goes on, which its confidence decides.
DEAR = PassCosts((0.0, 1.0, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0), (0.0, 0.05, 0.1))
BY_CONFIDENCE = PayoffModel(0.2, curve=AcceptanceCurve(accepted=[0.2, 1.0], following=[0.2, 1.0]))
LOOKUP_PRIOR = ProposerChain([Adding(VOCABULARY)], (1.0, 1.0, 1.0))
SKIP = SkipSet((0,), (1,))
DRAFTERS = {
    "rate": lambda runtime: LayerSkipDrafter(runtime, SKIP, RateOptimal(floor=0.0, payoff=BY_CONFIDENCE)),
    "candidates": lambda runtime: LayerSkipDrafter(
        runtime, SKIP, RateOptimal(floor=0.0, payoff=BY_CONFIDENCE), candidates=2
    ),
    "threshold": lambda runtime: LayerSkipDrafter(
        runtime, SKIP, AdaptiveThreshold(threshold=0.5), proposer_chain=LOOKUP_PRIOR
    ),
    "guesses": lambda runtime: LookupDrafter([Adding(VOCABULARY, 0.6)], RateOptimal(floor=0.0)),
}


class Withholding(LayerSkipDrafter):
    """Takes back a token that it is not sure of: a planted bug."""

    def propose(self, seqs, limits):
        return [draft.first(sum(c > 0.6 for c in draft.confidence)) for draft in super().propose(seqs, limits)]


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(VOCABULARY, 2, seed=4), rows=2)


def decoded(runtime, make, sampler, drafted):
    """Both texts, the two drawing from one source."""
    drafter, load = make(runtime), BatchDraftScheduler(DEAR)
    decide_together(drafter, load)
    seqs = [SequenceState(list(p), room, sampler) for p, room in zip(PROMPTS, ROOMS, strict=True)]
    with Engine(runtime, drafter) as engine:
        for seq in seqs:
            engine.join(seq)
        while engine.running:
            load.begin(len(engine.running))
            for _, outcome in engine.step():
                draft = outcome.draft
                drafted[len(draft)] += 1
                load.record_draft(draft.depth, outcome.accepted, len(outcome.tokens), nodes=len(draft))
    return tuple(tuple(seq.tokens[len(p) :]) for seq, p in zip(seqs, PROMPTS, strict=True))


def test_one_of_a_batch_that_alone_may_draft_is_weighed_with_the_others(runtime):
    """As where guides force the others' tokens: its draft passes are counted, and not taken for verification."""
    load = BatchDraftScheduler(DEAR, first=0.99)
    drafter = DRAFTERS["rate"](runtime)
    decide_together(drafter, load)
    seqs = [SequenceState(list(prompt), 3, Sampler()) for prompt in PROMPTS]
    with Engine(runtime, drafter) as engine:
        for seq in seqs:
            engine.join(seq)
        engine.step()  # first tokens
        load.begin(2)
        [draft] = drafter.propose(seqs[:1], [Limit(2, 2)])
    assert len(draft) > 0
    assert load._drafting == pytest.approx(len(draft) * DEAR.drafted(1))


def law(runtime, make):
    found, drafted = Counter(), Counter()
    for texts, weight in enumerate_outcomes(lambda sampler: decoded(runtime, make, sampler, drafted)):
        found[texts] += weight
    return found, drafted


def plain_law(runtime, prompt, room):
    """Each text's probability, by the model itself."""
    found = {}
    for text in itertools.product(range(VOCABULARY), repeat=room):
        with torch.no_grad():
            logits = runtime.model(torch.tensor([[*prompt, *text]])).logits[0].double().softmax(-1)
        chance = 1.0
        for i, token in enumerate(text):
            chance *= float(logits[len(prompt) - 1 + i, token])
        found[text] = chance
    return found


@pytest.fixture(scope="module")
def expected(runtime):
    one, other = (plain_law(runtime, p, room) for p, room in zip(PROMPTS, ROOMS, strict=True))
    return {(a, b): p * q for a, p in one.items() for b, q in other.items()}


def distance(found, expected):
    return max(abs(found.get(texts, 0.0) - chance) for texts, chance in expected.items())


@pytest.mark.parametrize("name", DRAFTERS)
def test_two_sequences_that_decide_together_keep_their_laws(runtime, expected, name):
    found, drafted = law(runtime, DRAFTERS[name])
    assert len(drafted) > 1, "some draft and some do not"
    assert sum(found.values()) == pytest.approx(1.0, abs=EXACT)
    assert distance(found, expected) < 1e-6  # the reference's norms are float32


def test_a_token_that_is_withheld_by_its_own_confidence_is_seen(runtime, expected):
    found, _ = law(runtime, lambda rt: Withholding(rt, SKIP, RateOptimal(floor=0.0, payoff=BY_CONFIDENCE)))
    assert distance(found, expected) > SEEN
