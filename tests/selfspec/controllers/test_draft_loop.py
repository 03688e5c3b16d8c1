"""Drafts played on confidences written by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import EndsAt

from selfspec.controllers import CONTROLLERS, AdaptiveThreshold, DraftLoop, FixedK, RateOptimal, StaticThreshold
from selfspec.types.acceptance import AcceptanceCurve, PayoffModel
from selfspec.types.methods import MOST_ROWS


def seen(play, confidences):
    """What the play says after each token, until it wants no more."""
    return [play.record(confidence) for confidence in confidences if play.wants]


def rate_optimal(draft, row):
    """A draft step and a further row take so long; of confidence c, a token is right with chance c, the next half."""
    curve = AcceptanceCurve(following=[0.5, 0.5], candidates=[[0.4, 0.0]])
    rounds = tuple(1 + row * (rows - 1) for rows in range(MOST_ROWS + 1))
    return RateOptimal(floor=0.0, payoff=PayoffModel(draft, rounds, curve))


@pytest.mark.parametrize(
    ("controller", "confidences", "wants"),
    [
        (FixedK(3), [0.9, 0.0, 0.9, 0.9], [True, True, False]),
        (FixedK(1), [0.9], [False]),
        (StaticThreshold(0.5), [0.9, 0.5, 0.4, 0.9], [True, True, False]),
        (StaticThreshold(0.5, k_max=2), [0.9, 0.9, 0.9], [True, False]),
        (AdaptiveThreshold(threshold=0.6), [0.7, 0.6, 0.59], [True, True, False]),
        # half as likely as all before it, the next token must bring the quarter of a step that it takes
        (rate_optimal(draft=0.25, row=0.0), [0.9, 0.8, 0.7, 0.9], [True, True, True, False]),
        (rate_optimal(draft=0.25, row=0.0), [0.9, 0.8, 0.69, 0.9], [True, True, False]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_when_another_token_is_wanted(controller, confidences, wants):
    play = DraftLoop(controller, depth=9)
    assert play.wants
    assert seen(play, confidences) == wants
    assert play.confidences == confidences[: len(wants)]


def test_it_goes_by_what_the_controller_has_observed():
    controller = AdaptiveThreshold(threshold=0.6, step=0.1)
    controller.observe([0.9, 0.9], 0)  # the threshold rises by a tenth of the step
    assert seen(DraftLoop(controller, depth=9), [0.62, 0.605]) == [True, False]
    assert seen(DraftLoop(controller.start(), depth=9), [0.62, 0.605]) == [True, True]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "in a batch"])
def test_a_token_can_end_a_draft(together):
    play = DraftLoop(EndsAt(9, token=5), depth=9, together=together)
    assert [play.record(0.9, token) for token in (3, 4, 5)] == [True, True, False]
    assert DraftLoop(EndsAt(9, token=5), depth=9).record(0.9)  # a replay knows no tokens


def test_no_more_than_there_is_room_for():
    assert seen(DraftLoop(FixedK(9), depth=2), [0.9, 0.9, 0.9]) == [True, False]
    assert not DraftLoop(FixedK(9), depth=0).wants
    assert not DraftLoop(FixedK(9), depth=-1).wants


def test_nothing_follows_the_last():
    play = DraftLoop(FixedK(9), depth=9)
    assert play.record(0.9)
    assert not play.record(0.9, last=True)
    assert not play.wants
    assert play.candidates(2, nodes=64) == [2, 2]


@pytest.mark.parametrize(
    ("most", "nodes", "counts"),
    [
        (3, 64, [3, 3, 3, 3]),
        (3, 12, [3, 3, 3, 3]),
        (3, 11, [3, 3, 3, 2]),
        (3, 9, [3, 3, 2, 1]),
        (3, 4, [1, 1, 1, 1]),
        (3, 2, [1, 1, 1, 1]),  # drafted tokens stay
        (1, 64, [1, 1, 1, 1]),
    ],
)
def test_the_last_places_give_up_their_candidates_first(most, nodes, counts):
    play = DraftLoop(FixedK(4), depth=9)
    assert play.candidates(most, nodes=nodes) == []
    seen(play, [0.5] * 9)
    assert play.candidates(most, nodes=nodes) == counts


def test_candidates_where_they_are_worth_their_rows():
    """A row takes a tenth: the first place's second candidate brings .24, that of the second .4 as much."""
    play = DraftLoop(rate_optimal(draft=0.0, row=0.1), depth=9)
    assert seen(play, [0.4, 0.4]) == [True, False]
    assert play.candidates(2, nodes=64) == [2, 1]


@given(
    name=st.sampled_from(sorted(CONTROLLERS)),
    observed=st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=9), max_size=9),
    confidences=st.lists(st.floats(0, 1), min_size=64, max_size=64),
    depth=st.integers(-1, 64),
    most=st.integers(1, 9),
    nodes=st.integers(0, 64),
)
def test_every_play(name, observed, confidences, depth, most, nodes):
    """It keeps to its limits, and playing it again gives the same."""
    controller = CONTROLLERS[name]()
    for draft in observed:
        controller.observe(draft, len(draft) // 2)
    play, again = DraftLoop(controller, depth=depth), DraftLoop(controller, depth=depth)
    assert seen(play, confidences) == seen(again, confidences)
    drafted = len(play.confidences)
    assert not play.wants
    assert min(depth, 1) <= drafted <= max(depth, 0)
    counts = play.candidates(most, nodes=nodes)
    assert counts == again.candidates(most, nodes=nodes)
    assert len(counts) == drafted
    assert all(1 <= count <= most for count in counts)
    assert sum(counts) <= max(nodes, drafted)
