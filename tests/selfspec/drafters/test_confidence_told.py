"""The confidence that a drafter tells: of the probability and the gap that the draft's own logits give."""

from __future__ import annotations

import math

import pytest
import torch
from models import run, small
from transformers import SuppressTokensLogitsProcessor

from selfspec.controllers import FixedK
from selfspec.drafters import LayerSkipDrafter
from selfspec.models.low_precision import fake
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.sampling import Sampler, gap
from selfspec.types.acceptance import Confidence
from selfspec.types.draft_path import DraftPath, SkipSet

VOCABULARY, PROMPT = 11, [1, 4, 2, 9]
PATH = DraftPath(SkipSet((1,)), int8=SkipSet((0, 2), (0, 1, 2)), head="int8")
TOLD = {
    "probability": Confidence(),
    "gap": Confidence(bias=-0.4, probability=0, gap=0.9),
    "both": Confidence(bias=0.2, probability=0.6, gap=0.7),
    "probability, scaled": Confidence(bias=0.5, probability=0.6),
}
SAMPLERS = {
    "greedy": lambda: Sampler(),
    "match": lambda: Sampler(temperature=0.8, seed=3),
    "sampled": lambda: Sampler(temperature=0.8, seed=3, tied=False),
    "greedy, processed": lambda: Sampler(processors=[SuppressTokensLogitsProcessor([2, 5])]),
    "match, top-k": lambda: Sampler(temperature=0.8, top_k=3, seed=3),
}


class Noting(LayerSkipDrafter):
    """Notes processed scores and position of each token that is drafted."""

    noted = ()

    def _draft(self, chain, logits):
        seq = chain.seq
        place = len(seq.tokens) + len(chain.tokens)
        scores = seq.sampler.scores(logits, iter([[*seq.tokens, *chain.tokens]]))[0]
        super()._draft(chain, logits)
        self.noted = (*self.noted, (scores, place, chain.tokens[-1], chain.loop.confidences[-1]))


def by_hand(sampler, scores, place, token):
    """Probability and gap."""
    p = scores.double().softmax(-1)
    merits = scores.double()
    if sampler.tied:
        merits = p.log() - sampler._noise_at(place, scores).double().log()
    first, second = merits.sort(descending=True).values[:2].tolist()
    return float(p[token]), first - second


@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("how", SAMPLERS)
def test_the_drafters_confidence_is_that_of_its_logits(how, told):
    runtime = LeanRuntime(small(VOCABULARY, seed=2), kernel=fake)
    sampler, confidence = SAMPLERS[how](), TOLD[told]
    drafter = Noting(runtime, PATH, FixedK(3), confidence=confidence)
    run(runtime, drafter, PROMPT, 20, sampler=sampler)
    assert len(drafter.noted) > 10
    for scores, place, token, seen in drafter.noted:
        assert seen == pytest.approx(confidence.estimate(*by_hand(sampler, scores, place, token)), abs=1e-9)


def test_a_vocabulary_of_one_token_has_no_other():
    runtime = LeanRuntime(small(VOCABULARY, seed=2), kernel=fake)
    for make in SAMPLERS.values():
        drafter = Noting(runtime, DraftPath(PATH.skip, (3,)), FixedK(3), confidence=TOLD["both"])
        run(runtime, drafter, PROMPT, 8, sampler=make())
        assert all(0 <= seen <= 1 for *_, seen in drafter.noted)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_token_is_the_one_that_is_drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    for place in range(20):
        scores = torch.randn(50, generator=generator) * 3
        scores[torch.randint(50, (10,), generator=generator)] = -math.inf
        sampler = Sampler(temperature=1.0, seed=seed)
        token, _, apart = sampler.take(scores, place, with_gap=True)
        assert token == sampler.draw(sampler.probs(scores), place)
        merits = sampler.noisy_scores(scores, place)
        assert token == int(merits.argmax())
        first, second = merits.topk(2).values.tolist()
        assert apart == pytest.approx(first - second, abs=1e-4)
        assert sampler.take(scores, place) == (token, 0.0, 0.0)
        assert Sampler().take(scores, place).token == int(scores.argmax())


def test_gaps():
    assert gap(torch.tensor([1.0, 4.0, 3.5]), 1) == pytest.approx(0.5)
    assert gap(torch.tensor([2.0, 2.0]), 0) == 0
    assert gap(torch.tensor([2.0, -math.inf]), 0) == math.inf
    assert gap(torch.tensor([2.0]), 0) == math.inf
