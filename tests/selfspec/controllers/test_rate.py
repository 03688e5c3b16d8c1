"""The rate-optimal controller against every way to draft, where that can be computed."""

from __future__ import annotations

import itertools
import random

import pytest
from pydantic import ValidationError

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK, RateOptimal
from selfspec.types.acceptance import AcceptanceCurve, KeyCosts, PayoffModel, estimate_payoff, interpolate
from selfspec.types.draft_path import SkipSet
from selfspec.types.methods import MOST_ROWS

STEPS = (0.0, 1.0, 1.1, 1.15, 1.2, 1.6, 1.65, 1.7, 1.75, 1.8, *([2.2] * (MOST_ROWS - 9)))


def flat(chance: float, *others: float) -> AcceptanceCurve:
    candidates = [[other] * 2 for other in others]
    return AcceptanceCurve(confidence=[0.0, 1.0], accepted=[chance] * 2, following=[chance] * 2, candidates=candidates)


def length(controller: RateOptimal) -> int:
    n = 1
    while controller.go_on([0.5] * n):
        n += 1
    return n


@pytest.mark.parametrize("chance", [0.5, 0.7, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("draft", [0.05, 0.2, 0.4])
@pytest.mark.parametrize(
    "rounds", [STEPS, tuple(1 + 0.02 * (w - 1) for w in range(MOST_ROWS + 1))], ids=["steps", "line"]
)
def test_it_drafts_what_theory_says_is_best(chance, draft, rounds):
    """Every token accepted alike: at the best length's own rate (Leviathan et al.'s formula) it drafts that length."""

    def speed(k: int) -> float:
        return (1 - chance ** (k + 1)) / (1 - chance) / (k * draft + rounds[k + 1])

    best = max(range(1, 13), key=speed)
    controller = RateOptimal(rate=max(speed(best), 1.0), floor=0.0, payoff=PayoffModel(draft, rounds, flat(chance)))
    if speed(best) > 1:
        assert speed(length(controller)) == pytest.approx(speed(best), rel=1e-9)
    else:
        assert length(controller) == 1


def test_candidates_are_the_best_of_all_choices():
    """By trying every number for every place."""
    draw = random.Random(3)
    for _ in range(40):
        rows = itertools.accumulate([1.0, *(draw.choice((0.0, 0.01, 0.05, 0.2)) for _ in range(MOST_ROWS))])
        rounds = (0.0, *rows)[: MOST_ROWS + 1]
        chances = sorted((draw.random() * 0.3 for _ in range(2)), reverse=True)
        curve, rate = flat(draw.uniform(0.3, 0.9), *chances), draw.uniform(1, 1.5)
        controller = RateOptimal(rate=rate, floor=0.0, payoff=PayoffModel(0.3, rounds, curve))
        n = draw.randint(1, 4)

        def worth(counts, curve=curve, rate=rate, rounds=rounds, chances=chances, n=n):
            value = sum(curve.accepted[0] ** i * sum(chances[: count - 1]) for i, count in enumerate(counts))
            return value - rate * (rounds[1 + sum(counts)] - rounds[1 + n])

        found = controller.candidates([0.5] * n, 3)
        assert worth(found) == pytest.approx(max(map(worth, itertools.product(range(1, 4), repeat=n))))


def test_it_learns_that_drafts_are_wrong():
    controller = RateOptimal(rate=1.2, payoff=PayoffModel(0.2, STEPS, flat(0.9, 0.05)))
    before = length(controller)
    for _ in range(200):
        controller.observe([0.5] * 3, 0, candidates=4)
    assert length(controller) == 1 < before
    assert controller.rate == 1.0
    assert interpolate(controller.learnt().curve.accepted, controller.learnt().curve.place(0.5)) < 0.5
    assert length(controller.start()) == before


def test_it_learns_where_drafts_are_right():
    """Only at the confidences that were seen."""
    curve = AcceptanceCurve(
        confidence=[0.1, 0.5, 0.9], accepted=[0.3, 0.3, 0.3], following=[0.3, 0.3, 0.3], candidates=[]
    )
    controller = RateOptimal(payoff=PayoffModel(0.2, STEPS, curve))
    for _ in range(300):
        controller.observe([0.9, 0.9, 0.9], 3)
    learnt = controller.learnt().curve
    assert learnt.accepted[2] > 0.6
    assert learnt.accepted[:2] == [0.3, 0.3]


def test_the_rate_follows_what_rounds_bring():
    """A round of two drafted tokens and one more candidate, one accepted: 2 tokens in 2 * .2 + rounds[4]."""
    controller = RateOptimal(rate=1.0, memory=0.0, payoff=PayoffModel(0.2, STEPS, flat(0.5)))
    controller.observe([0.5, 0.5], 1, candidates=3)
    assert controller.rate == pytest.approx(2 / (0.4 + STEPS[4]))
    controller.observe([0.5, 0.5], 1, candidates=3, other=True)
    assert controller.rate == pytest.approx(3 / (0.4 + STEPS[4]))


def test_where_rows_cost_more_with_the_context_drafts_are_shorter():
    payoff = PayoffModel(0.1, curve=flat(0.9, 0.3), context=100, per_key=KeyCosts(plain=0.0005, row=0.0005))
    controller = RateOptimal(rate=2.0, k_max=30, payoff=payoff)

    def drafted(keys):
        controller.set_context(keys)
        return length(controller), controller.candidates([0.95, 0.5], 3), controller.lookup_length([0.8] * 9)

    short, candidates, lookup = drafted(100)
    longer, fewer, none = drafted(4000)
    assert 1 <= longer < short
    assert sum(fewer) < sum(candidates)
    assert none < lookup
    assert drafted(150) == (short, candidates, lookup)


def test_the_rate_to_be_reached_follows_the_context():
    """Where drafting can bring less, it goes on for less: a rate of short texts would end drafts after a token."""
    payoff = PayoffModel(
        0.2, curve=flat(0.95), context=100, per_key=KeyCosts(plain=0.00005, row=0.00001, draft=0.00004)
    )
    controller = RateOptimal(rate=2.6, k_max=12, payoff=payoff)
    short = length(controller)
    controller.set_context(8000)
    assert controller._local.pace < 0.9
    assert length(controller) > short / 3
    for _ in range(100):
        controller.observe([0.5] * 4, 4)
    assert controller.rate * controller._local.pace == pytest.approx(
        5 / (4 * controller._local.payoff.draft + controller._local.payoff.rounds[5]), rel=0.15
    )
    controller.set_context(100)
    assert controller._local.pace == 1


def test_between_knots_it_is_a_line():
    curve = AcceptanceCurve(confidence=[0.2, 0.6], accepted=[0.5, 0.9], following=[0.5, 0.5], candidates=[])
    at = [interpolate(curve.accepted, curve.place(c)) for c in (0.0, 0.2, 0.3, 0.6, 1.0)]
    assert at == pytest.approx([0.5, 0.5, 0.6, 0.9, 0.9])


def test_a_guess_is_cheaper_the_more_is_skipped():
    assert (
        estimate_payoff(SkipSet((0, 1), (0,)), 2).draft
        < estimate_payoff(SkipSet((0,), (1,)), 2).draft
        < estimate_payoff(SkipSet(), 2).draft
        == 1
    )


def test_it_rests_on_what_it_is_told():
    controller = RateOptimal(k_max=5, payoff=PayoffModel(0.2, STEPS, flat(0.9)))
    payoff = PayoffModel(0.3, STEPS, flat(0.4))
    assert controller.with_payoff(payoff) == RateOptimal(k_max=5, payoff=payoff)
    told = controller.with_payoff(payoff, rate=1.5)
    assert told == RateOptimal(k_max=5, rate=1.5, payoff=payoff)
    assert told.learnt() == payoff
    told.observe([0.5], 0)
    assert told.learnt() != payoff
    assert told.start().learnt() == payoff
    assert told.start().rate == 1.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confidence": [0.5, 0.5]}, "expected rising numbers"),
        ({"accepted": [0.1, 0.2, 0.3]}, "accepted: 3 chances for 2 confidences"),
        ({"candidates": [[0.1, 0.2], [0.1, 0.2, 0.3]]}, "candidates.1: 3 chances for 2"),
        ({"beside": [[0.1, 0.2]]}, "beside\n  Extra inputs"),
        ({"accepted": [0.1, 1.2]}, "less than or equal to 1"),
    ],
)
def test_wrong_curves_are_refused(change, message):
    with pytest.raises((ValidationError, SelfspecError), match=message):
        AcceptanceCurve(**{**AcceptanceCurve().model_dump(), **change})


class TestFreeGuesses:
    """Rounds of n rows take 1 + n / 10 plain steps."""

    def controller(self, rate):
        return RateOptimal(rate=rate, payoff=PayoffModel(0.3, tuple(1 + rows / 10 for rows in range(MOST_ROWS + 1))))

    def test_they_are_taken_where_they_bring_more_than_drafting(self):
        """Four sure tokens and one more in 1.5 steps: more than three a step, less than four."""
        assert self.controller(3.0).lookup_length([1.0] * 4) == 4
        assert self.controller(4.0).lookup_length([1.0] * 4) == 0
        assert self.controller(1.0).lookup_length([]) == 0

    def test_where_nothing_else_can_be_drafted_they_are_compared_with_plain_decoding(self):
        assert self.controller(4.0).lookup_length([1.0] * 4, only=True) == 4
        assert self.controller(4.0).lookup_length([0.1, 0.9], only=True) == 0

    def test_they_are_cut_where_another_does_not_pay(self):
        assert self.controller(1.5).lookup_length([0.9, 0.9, 0.05, 0.9]) == 2
        assert self.controller(1.5).lookup_length([0.9, 0.9, 0.5, 1.0, 1.0, 1.0]) == 6

    def test_other_controllers_take_none(self):
        assert FixedK(4).lookup_length([1.0] * 9) == 0


def test_nothing_is_learnt_from_tokens_after_a_rejection():
    """Whether they would have been accepted is not known: the curve is as if they had not been drafted."""
    confidences = [0.9, 0.7, 0.2, 0.4]
    curve = AcceptanceCurve(confidence=[0.0, 0.5, 1.0], accepted=[0.3, 0.6, 0.9], following=[0.4, 0.6, 0.8],
                            candidates=[])  # fmt: skip
    for accepted in range(3):
        whole, cut = (RateOptimal(strength=2.0, payoff=PayoffModel(0.2, STEPS, curve)) for _ in range(2))
        whole.observe(confidences, accepted)
        cut.observe(confidences[: accepted + 1], accepted)
        assert whole.learnt().curve == cut.learnt().curve
        assert whole.learnt().curve != curve


@pytest.mark.parametrize("other", [0, 1, 3])
def test_all_tokens_that_a_round_brought_count(other):
    """In a tree, accepted tokens of another branch may follow those that the controller drafted."""
    controller = RateOptimal(rate=1.0, memory=0.0, payoff=PayoffModel(0.25, STEPS, flat(0.9)))
    controller.observe([0.9, 0.9], 1, candidates=2, other=other)
    assert controller.rate == pytest.approx((2 + other) / (2 * 0.25 + STEPS[3]))
