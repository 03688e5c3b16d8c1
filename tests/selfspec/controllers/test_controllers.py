from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import (
    CONTROLLERS,
    AdaptiveThreshold,
    Controller,
    FixedK,
    StaticThreshold,
    make_controller,
    parse_controller,
    register,
)
from selfspec.types.acceptance import PayoffModel
from selfspec.types.controller import ControllerSpec


def drafted(controller, confidences):
    """How many tokens are drafted when they come with these confidences."""
    for count in range(1, len(confidences) + 1):
        if not controller.go_on(confidences[:count]):
            return count
    return len(confidences)


def test_fixed_drafts_k():
    assert drafted(FixedK(3), [0.0] * 9) == 3


def test_static_keeps_the_token_that_fell_below():
    assert drafted(StaticThreshold(0.5, 9), [0.9, 0.5, 0.4, 0.9]) == 3
    assert drafted(StaticThreshold(0.5, 2), [0.9, 0.9, 0.9]) == 2


def test_adaptive_follows_the_papers_update():
    """By hand: m = .5 m + .5 a from the first observation on; the threshold moves by (1 - .9) * step."""
    controller = AdaptiveThreshold(threshold=0.6, step=0.1, target=0.9)
    controller.observe([0.9] * 4, 4)  # m = 1
    assert controller.acceptance == 1.0
    assert controller.threshold == pytest.approx(0.59)
    controller.observe([0.9] * 4, 2)  # m = .75
    assert controller.acceptance == pytest.approx(0.75)
    assert controller.threshold == pytest.approx(0.60)
    controller.observe([], 0)
    assert controller.acceptance == pytest.approx(0.75)


@pytest.mark.parametrize(("accepted", "limit"), [(0, 0.95), (4, 0.05)])
def test_adaptive_stays_within_its_clamps(accepted, limit):
    controller = AdaptiveThreshold()
    for _ in range(500):
        controller.observe([0.5] * 4, accepted)
    assert controller.threshold == limit


def test_adaptive_starts_afresh():
    controller = AdaptiveThreshold(threshold=0.4)
    controller.observe([0.5], 0)
    assert controller.threshold != 0.4
    assert controller.start() == AdaptiveThreshold(threshold=0.4)


@pytest.mark.parametrize("name", CONTROLLERS)
def test_every_controller(name):
    """The conformance suite: it ends every draft, carries its state, and is made again from its spec."""
    controller = make_controller(ControllerSpec(name=name))
    for accepted in (3, 0, 1, 2):
        assert drafted(controller, [1.0] * 1000) <= 64
        controller.observe([0.9, 0.5, 0.2], accepted)
        again = make_controller(controller.spec(), controller.learnt())
        for confidence in (0.0, 0.3, 0.59, 0.6, 0.61, 0.9, 1.0):
            drafts = [[confidence] * n for n in range(1, 70)]
            assert [again.go_on(draft) for draft in drafts] == [controller.go_on(draft) for draft in drafts]
            counts = [controller.candidates(draft, 3) for draft in drafts]
            assert [again.candidates(draft, 3) for draft in drafts] == counts
            for draft, count in zip(drafts, counts, strict=True):
                assert len(count) == len(draft)
                assert set(count) <= {1, 2, 3}
                assert controller.candidates(draft, 1) == [1] * len(draft)
    assert (controller.learnt() is not None) == controller.asks_payoff
    assert controller.start().spec() == make_controller(ControllerSpec(name=name)).spec()


@pytest.mark.parametrize("controller", [FixedK(3), StaticThreshold(0.5), AdaptiveThreshold(0.4)])
def test_most_controllers_ask_for_no_outlook(controller):
    assert not controller.asks_payoff
    assert controller.with_payoff(PayoffModel(), rate=2.0) is controller
    assert controller.learnt() is None


def test_text_form():
    assert parse_controller("fixed") == ControllerSpec(name="fixed")
    assert make_controller(parse_controller("fixed:k=6")) == FixedK(6)
    assert make_controller(parse_controller("adaptive:threshold=.4, k_max=8")).spec().options["k_max"] == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "controller 'nothing' is not known; known: fixed, static, adaptive, rate"),
        ("fixed:j=3", "has no option 'j'; it has: k"),
        ("fixed:k=4,k=9", "k is given twice"),
        ("fixed:k", "expected option=number, got 'k'"),
        ("fixed:k=x", "expected option=number, got 'k=x'"),
        ("fixed:k=nan", "expected option=number"),
        ("fixed:k=0", "k 0.0: expected a whole number from 1 to 64"),
        ("fixed:k=2.5", "expected a whole number"),
        ("static:threshold=-1", "expected a number from 0 to 1"),
        ("adaptive:threshold=0.99", "is not between floor"),
        ("rate:rate=0.5", "rate 0.5: expected 1"),
        ("rate:strength=-1", "strength -1.0: expected 0 or more rounds"),
        ("rate:outlook=1", "has no option 'outlook'; it has: rate, k_max, floor, strength, memory"),
    ],
)
def test_wrong_text_is_refused(text, message):
    with pytest.raises(SelfspecError, match=message):
        parse_controller(text)


@dataclass
class Single(Controller):
    """Drafts one token."""

    name: ClassVar[str] = "single"

    def go_on(self, confidences):
        return False

    def min_confidence(self, drafted):
        return math.inf


def test_a_registered_controller_is_known_by_its_name(monkeypatch):
    monkeypatch.setattr("selfspec.controllers.CONTROLLERS", dict(CONTROLLERS))
    register(Single)
    register(Single)  # as in a re-run notebook
    assert make_controller(parse_controller("single")) == Single()


def test_a_name_belongs_to_one_class():
    @dataclass
    class Other(FixedK):
        name: ClassVar[str] = "static"

    with pytest.raises(
        SelfspecError, match="'static': it is selfspec.controllers.thresholds.StaticThreshold; expected"
    ):
        register(Other)
    assert CONTROLLERS["static"] is StaticThreshold


def test_a_controller_without_a_name_is_refused():
    with pytest.raises(SelfspecError, match=r"Controller: no name; expected the class variable name"):
        register(Controller)


@given(st.text("fixedstaicpr:=,.k_0123456789-e ", max_size=30))
def test_any_text_is_a_controller_or_one_line(text):
    try:
        make_controller(parse_controller(text))
    except SelfspecError as error:
        assert "\n" not in str(error)


@given(st.lists(st.tuples(st.integers(1, 14), st.floats(0, 1)), max_size=60), st.lists(st.integers(0, 6), max_size=60))
def test_no_controller_goes_on_below_its_lowest(shown, accepted):
    """Whatever it has learnt: below `lowest` it stops, and at `lowest` it goes on in some state."""
    for kind in CONTROLLERS.values():
        controller = kind()
        for drafted, confidence in shown:
            assert not controller.go_on([confidence] * drafted) or confidence >= controller.min_confidence(drafted)
            for count in accepted[:drafted]:
                controller.observe([confidence] * 6, count)
        assert not controller.go_on([1.0] * 64)
        assert controller.min_confidence(64) > 1
