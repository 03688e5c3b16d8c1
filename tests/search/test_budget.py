"""How a search's time is shared out, on a clock that only the tests move."""

from __future__ import annotations

import math

import pytest
from fake_costs import Clock
from selfspec.search.budget import SHARES, Budget, no_deadline


@pytest.fixture
def clock():
    return Clock(100.0)


def walk(budget, clock, takes):
    """Every phase in order, `takes[phase]` of what it may take; the shares that each got."""
    got = {}
    for phase in SHARES:
        got[phase] = budget.share(phase)
        clock.now += takes.get(phase, 1.0) * got[phase]
    return got


def test_phases_that_take_their_share_end_in_time(clock):
    budget = Budget(60.0, clock=clock)
    got = walk(budget, clock, {})
    assert budget.left == pytest.approx(0)
    assert budget.spent == pytest.approx(60)
    for phase, seconds in got.items():
        assert seconds == pytest.approx(60 * SHARES[phase] / sum(SHARES.values()))


def test_what_was_spent_before_the_first_phase_is_taken_from_all(clock):
    budget = Budget(60.0, clock=clock)
    clock.now += 30
    assert walk(budget, clock, {})["trials"] == pytest.approx(30 * SHARES["trials"] / sum(SHARES.values()))
    assert budget.spent == pytest.approx(60)


def test_what_a_phase_leaves_over_goes_to_those_after_it(clock):
    budget = Budget(60.0, clock=clock)
    got = walk(budget, clock, {"texts": 0.0, "costs": 0.0})
    after = sum(share for phase, share in SHARES.items() if phase not in ("texts", "costs"))
    assert got["trials"] == pytest.approx(60 * SHARES["trials"] / after)
    assert budget.spent == pytest.approx(60)


def test_a_phase_that_takes_too_long_leaves_less_to_all_after_it(clock):
    budget = Budget(60.0, clock=clock)
    got = walk(budget, clock, {"texts": 4.0})
    texts = 60 * SHARES["texts"] / sum(SHARES.values())
    after = sum(SHARES.values()) - SHARES["texts"]
    assert got["measuring"] == pytest.approx((60 - 4 * texts) * SHARES["measuring"] / after)
    assert budget.spent == pytest.approx(60)


def test_trials_get_what_the_phases_after_them_do_not_need(clock):
    budget = Budget(600.0, clock=clock)
    budget.expect({"heads": 0.0, "choosing": 10.0, "measuring": 20.0, "ending": 1000.0})
    ending = 600 * SHARES["ending"] / sum(SHARES[phase] for phase in list(SHARES)[3:])
    assert budget.share("trials") == pytest.approx(600 - 10 - 20 - ending)
    assert budget.deadline("trials").end_time == pytest.approx(clock.now + 600 - 10 - 20 - ending)


def test_needs_larger_than_the_shares_change_nothing(clock):
    budget = Budget(60.0, clock=clock)
    expected = budget.share("costs")
    budget.expect(dict.fromkeys(SHARES, 1e6))
    assert budget.share("costs") == pytest.approx(expected) == pytest.approx(budget.part("costs") * 100 / 92)


def test_a_deadline(clock):
    deadline = Budget(100.0, clock=clock).deadline("ending")
    assert deadline.left == pytest.approx(100)
    assert deadline.allows(100)
    assert not deadline.allows(100.1)
    half = deadline.part(0.5)
    clock.now += 60
    assert (half.left, half.allows()) == (0, False)
    assert deadline.left == pytest.approx(40)


def test_when_time_is_up_there_is_none(clock):
    budget = Budget(10.0, clock=clock)
    clock.now += 25
    assert (budget.left, budget.share("trials"), budget.spent) == (0, 0, 25)
    assert not budget.deadline("trials").allows(0.01)


def test_without_a_limit_there_is_time_for_anything(clock):
    budget = Budget(clock=clock)
    budget.expect({"measuring": math.inf})
    assert not budget.limited
    for deadline in (budget.deadline("texts"), budget.deadline("ending"), no_deadline(clock)):
        assert deadline.part(0.5).allows(1e12)
        assert math.isinf(deadline.left)
