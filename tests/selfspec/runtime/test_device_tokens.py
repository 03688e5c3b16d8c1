"""What the device decides about tokens, beside what samplers, confidences and controllers decide on the host."""

from __future__ import annotations

import random

import pytest
import torch

from selfspec.controllers import AdaptiveThreshold, FixedK, RateOptimal
from selfspec.runtime.device_tokens import choose, confidences, drawn, goes_on, leading
from selfspec.speculation.sampling import Sampler
from selfspec.types.acceptance import PROBABILITY, Confidence

TIED, UNTIED = Sampler(temperature=1.2, seed=3), Sampler(temperature=1.2, seed=3, tied=False)


@pytest.mark.parametrize("sampler", [Sampler(), TIED, UNTIED], ids=["greedy", "match", "untied"])
@pytest.mark.parametrize(
    "confidence",
    [
        PROBABILITY,
        Confidence(bias=0.3, probability=0.5, gap=0.7),
        Confidence(probability=0, gap=2),
        Confidence(bias=-1),
    ],
    ids=["probability", "both", "gap", "bias"],
)
def test_tokens_and_confidences_are_the_samplers(sampler, confidence):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 50, generator=generator, dtype=torch.float64) * 3
    rows[5, 1:] = -torch.inf  # one token alone is possible
    noise = torch.stack([sampler.noise_of(place, row) for place, row in enumerate(rows)]) if sampler.tied else None
    numbers = torch.tensor(sampler.upcoming(len(rows)), dtype=torch.float64) if sampler is UNTIED else None
    chosen = choose(rows, noise, numbers)
    taken = [sampler.take(row, place, with_p=True, with_gap=True) for place, row in enumerate(rows)]
    assert chosen.tokens.tolist() == [one.token for one in taken]
    assert chosen.possible.all()
    expected = [confidence.estimate(one.probability, one.gap) for one in taken]
    assert confidences(chosen, confidence).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("noise", "numbers"),
    [(None, None), (torch.ones(3, 5, dtype=torch.float64), None), (None, torch.full((3,), 0.5, dtype=torch.float64))],
    ids=["greedy", "match", "untied"],
)
def test_where_no_token_is_possible(noise, numbers):
    scores = torch.randn(3, 5, dtype=torch.float64)
    scores[1], scores[2] = -torch.inf, torch.nan
    assert choose(scores, noise, numbers).possible.tolist() == [True, False, False]


def test_a_draw_at_the_very_end_of_the_sum_has_probability():
    p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 3.0]])
    assert drawn(p, torch.ones(2, dtype=torch.float64))[0].tolist() == [1, 2]  # 1 is beyond what a number can be
    assert drawn(p, torch.zeros(2, dtype=torch.float64))[0].tolist() == [0, 2]


@pytest.mark.parametrize("controller", [FixedK(5), AdaptiveThreshold(), RateOptimal()], ids=lambda one: one.name)
def test_drafting_goes_on_where_the_controller_goes_on(controller):
    chance = random.Random(0)
    for _ in range(50):
        rule = controller.stopping(12)
        curve = () if rule.curve is None else (*rule.curve.knots, *rule.curve.accepted, *rule.curve.following)
        numbers = torch.tensor([*rule.least, *rule.prices, *curve], dtype=torch.float64)
        given = [chance.random() ** 0.2 for _ in range(8)]
        knots = 0 if rule.curve is None else len(rule.curve.knots)
        (going,) = goes_on(torch.tensor([given], dtype=torch.float64), numbers[None], knots)
        assert going.tolist() == [controller.go_on(given[: n + 1]) for n in range(8)]
        controller.observe(given, chance.randrange(9))


def test_the_leading_values_that_hold():
    assert leading(torch.tensor([[True, True, False, True], [False, True, True, True], [True] * 4])).tolist() == [
        2,
        0,
        4,
    ]
