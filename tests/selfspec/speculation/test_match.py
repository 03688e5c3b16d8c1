"""Matching under shared noise: the text is plain decoding's with the same seed, whatever was drafted."""

from __future__ import annotations

import pytest
import torch
from amount import some
from every_drafter import table
from models import run, small
from scipy import stats as scipy_stats
from toys import Scripted, Toy

from selfspec.basics.errors import SelfspecError
from selfspec.drafters import (
    PlainDrafter,
)
from selfspec.drafters.autoregressive import _drawn
from selfspec.models.low_precision import fake
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafts import Draft
from selfspec.speculation.sampling import Sampler

VOCABULARY, PROMPT, ROOM = 7, [3, 1, 4], 8
SEEDS = some(1000, 200)


class Garbage(Toy):
    """Any tree of any tokens, and any q: what a drafter of the worst kind could propose."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def number(self, below):
        return int(torch.randint(below, (1,), generator=self.generator))

    def draft(self, seq):
        tokens, parents, depths = [], [], []
        for _ in range(self.number(7)):
            parent = self.number(len(tokens) + 1) - 1
            depth = 1 if parent < 0 else depths[parent] + 1
            if depth < seq.remaining and (parent < 0 or tokens[parent] not in seq.ends):
                tokens.append(self.number(VOCABULARY))
                parents.append(parent)
                depths.append(depth)
        q = torch.rand(max(len(tokens), 1), VOCABULARY, generator=self.generator).softmax(-1)
        rows = tuple(self.number(2) * (i + 1) - 1 for i in range(len(tokens)))
        return Draft(tuple(tokens), tuple(parents), q, rows)


DRAFTERS = {
    **table(VOCABULARY, 2),
    "one-hot": lambda runtime: Scripted(lambda tokens: [sum(tokens) % 7, len(tokens) % 7, 3], 3),
}


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(VOCABULARY, 2, seed=4), kernel=fake)


def text(runtime, drafter, seed, **options):
    sampler = Sampler(temperature=1.2, seed=seed, **options)
    return run(runtime, drafter, PROMPT, ROOM, sampler=sampler, ends=frozenset([6]))


@pytest.fixture(scope="module")
def plain(runtime):
    return [text(runtime, PlainDrafter(), seed)[0] for seed in range(SEEDS)]


def test_seeds_give_many_texts(plain):
    assert len(set(map(tuple, plain))) > 0.4 * SEEDS


def test_any_draft_with_any_seed(runtime, plain):
    accepted = 0
    for seed in range(SEEDS):
        tokens, outcomes = text(runtime, Garbage(seed), seed)
        assert tokens == plain[seed]
        accepted += sum(outcome.accepted for outcome in outcomes)
    assert accepted > SEEDS / 2


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter(runtime, plain, name):
    drafter = DRAFTERS[name](runtime)
    for seed in range(some(150, 40)):
        assert text(runtime, drafter, seed)[0] == plain[seed]


def test_nothing_depends_on_earlier_prompts(runtime, plain):
    """Text and rounds of a seed are the same, whatever an adaptive drafter has seen before."""
    drafter = DRAFTERS["skip, adaptive"](runtime)
    first = [len(outcome.draft) for outcome in text(runtime, drafter, 5)[1]]
    for seed in range(40):
        text(runtime, drafter, seed)
    tokens, outcomes = text(runtime, drafter, 5)
    assert [len(outcome.draft) for outcome in outcomes] == first
    assert tokens == plain[5]


def test_noise_can_be_tied_without_a_seed(runtime):
    texts = {tuple(text(runtime, PlainDrafter(), None, tied=True)[0]) for _ in range(20)}
    assert len(texts) > 5


P = torch.tensor([0.0, 0.1, 0.25, 0.0, 0.6, 0.05, 0.0])


def test_draws_follow_p():
    sampler = Sampler(temperature=1.0, seed=0)
    drawn = torch.tensor([sampler.draw(P * 3, position) for position in range(20000)])
    counts = torch.bincount(drawn, minlength=7)
    assert counts[P == 0].sum() == 0
    kept = P > 0
    assert scipy_stats.chisquare(counts[kept], 20000 * P[kept].double() / P.double().sum()).pvalue > 1e-4
    # Neighbouring places share nothing.
    pairs = torch.zeros(7, 7).index_put_((drawn[:-1], drawn[1:]), torch.ones(19999), accumulate=True)
    assert scipy_stats.chi2_contingency(pairs[kept][:, kept].numpy()).pvalue > 1e-4


def test_the_noise_is_gumbels():
    """-log of the exponential noise, against the distribution function exp(-exp(-g))."""
    sampler = Sampler(temperature=1.0, seed=4)
    gumbel = torch.cat([-sampler._noise_at(position, torch.ones(500)).log() for position in range(40)])
    assert scipy_stats.kstest(gumbel.numpy(), scipy_stats.gumbel_r.cdf).pvalue > 1e-3


def test_draws_maximise_the_merits():
    sampler = Sampler(temperature=1.0, seed=4)
    for position in range(200):
        assert sampler.draw(P, position) == int(sampler.noisy_scores(P.log(), position).argmax())


def test_a_draw_is_decided_by_seed_and_place():
    def drawn(seed, places):
        sampler = Sampler(temperature=1.0, seed=seed)
        return [sampler.draw(P, place) for place in places]

    assert drawn(1, range(40)) == drawn(1, reversed(range(40)))[::-1]
    assert drawn(1, range(40)) != drawn(2, range(40))
    assert drawn(2**64 + 1, range(40)) != drawn(1, range(40))


def test_two_distributions_agree_as_often_as_promised():
    """(1 - TV) / (1 + TV) at least, and 1 - TV at most."""
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    q = torch.tensor([0.2, 0.3, 0.1, 0.4])
    distance = float((p - q).clamp(min=0).sum())
    agree = 0
    for seed in range(4000):
        sampler = Sampler(temperature=1.0, seed=seed)
        agree += sampler.draw(p, 0) == sampler.draw(q, 0)
    assert (1 - distance) / (1 + distance) - 0.03 < agree / 4000 < 1 - distance + 0.03


def test_candidates_under_tied_noise_are_the_next_best(runtime):
    """Candidates are what the noise ranks next: without replacement, in one order."""
    sampler = Sampler(temperature=1.0, seed=2)
    seq = type("Seq", (), {"sampler": sampler})()
    first, *others = sampler.noisy_scores(P.log(), 9).topk(3).indices.tolist()
    assert _drawn(P, first, 3, seq, 9) == others


def test_probabilities_that_are_not_finite_are_an_error():
    for wrong in ([0.5, float("nan")], [0.5, float("inf")], [0.0, 0.0]):
        with pytest.raises(SelfspecError, match="no token can be chosen"):
            Sampler(temperature=1.0, seed=1).draw(torch.tensor(wrong), 0)
