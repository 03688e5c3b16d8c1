"""The draft length of captured rounds: what recent drafts had, within what is allowed."""

from __future__ import annotations

import random

import pytest

from selfspec.controllers import AdaptiveThreshold, FixedK, RateOptimal, StaticThreshold
from selfspec.controllers.draft_loop import DraftLengths
from selfspec.types.acceptance import AcceptanceCurve, PayoffModel

LENGTHS = (2, 4, 6, 8, 12)


@pytest.mark.parametrize(("k", "length"), [(1, 2), (2, 2), (3, 4), (4, 4), (7, 8), (12, 12), (30, 12)])
def test_a_fixed_length_is_known_before_the_first_draft(k, length):
    assert DraftLengths().choose(FixedK(k).stopping(12), LENGTHS, 64) == length


def test_drafts_that_end_early_shorten_the_next_ones():
    lengths, rule = DraftLengths(), StaticThreshold(0.5, 12).stopping(12)
    chosen = [lengths.choose(rule, LENGTHS, 64)]
    for drafted, computed in ((1, 4), (1, 4), (1, 2), (2, 2), (2, 2), (4, 4), (6, 6), (12, 12), (0, 0)):
        lengths.observe(drafted, computed)
        chosen.append(lengths.choose(rule, LENGTHS, 64))
    assert chosen == [4, 2, 2, 2, 2, 4, 6, 8, 12, 12]


def test_no_draft_exceeds_what_is_allowed():
    rule = FixedK(8).stopping(12)
    assert [DraftLengths().choose(rule, LENGTHS, most) for most in (0, 1, 2, 5, 8, 64)] == [0, 0, 2, 4, 8, 8]


@pytest.mark.parametrize(
    "controller",
    [
        FixedK(5),
        StaticThreshold(0.6, 7),
        AdaptiveThreshold(),
        RateOptimal(),
        RateOptimal(
            payoff=PayoffModel(0.3, curve=AcceptanceCurve(confidence=[0, 0.4, 1], accepted=[0.1, 0.7, 1],
                               following=[0.4, 0.6, 0.95], candidates=[]))
        ),
    ],
    ids=lambda controller: controller.name,
)  # fmt: skip
def test_a_stopping_rule_is_what_the_controller_decides(controller):
    """Before anything was observed and after, for random confidences."""
    chance = random.Random(0)
    for _ in range(200):
        rule, confidences = controller.stopping(12), []
        for n in range(12):
            confidences.append(chance.random() ** 0.3)
            reached = confidences[-1] >= rule.least[n]
            if rule.curve is not None:
                curve = AcceptanceCurve(
                    confidence=list(rule.curve.knots), accepted=[0.0] * len(rule.curve.knots), candidates=[],
                    following=[0.0] * len(rule.curve.knots),
                )  # fmt: skip
                product = 1.0
                for confidence in confidences:
                    i, share = curve.place(confidence)
                    low, high = rule.curve.accepted[i : i + 2]
                    product *= low + share * (high - low)
                low, high = rule.curve.following[i : i + 2]
                reached = reached and product * (low + share * (high - low)) > rule.prices[n]
            assert controller.go_on(confidences) == reached
            if not reached:
                break
        controller.observe(confidences, chance.randrange(len(confidences) + 1))
