"""Walks over traces written by hand."""

from __future__ import annotations

import pytest
from selfspec.search.trace import Trace, WalkStep, steps, walk

from selfspec.controllers import AdaptiveThreshold, FixedK, StaticThreshold
from selfspec.types.draft_work import NO_WORK, steps_of


def trace(runs, *, confidence=0.9, depth=3, room=None, ranks=None, unfinished=False):
    """A text of `len(runs)` tokens whose drafts are `depth` deep as far as there is room."""
    n = len(runs)
    room = n if room is None else room
    confidences = [[confidence] * min(depth, room - i - 1) for i in range(n)]
    return Trace(n, room, confidences, runs, ranks or [0] * n, [unfinished] * n)


def counts(walk):
    s = walk.stats
    return s.rounds, s.drafted, s.nodes, s.accepted, s.tokens


def test_a_draft_that_is_always_right():
    (only,) = walk([trace([3, 3, 3, 3, 3, 2, 1, 0])], FixedK(3))
    assert counts(only) == (2, 6, 6, 6, 8)
    assert only.rounds == {(steps_of(3), 4): 2}


def test_a_draft_that_is_always_wrong():
    (only,) = walk([trace([0] * 4)], FixedK(2))
    assert counts(only) == (4, 2 + 2 + 1 + 0, 5, 0, 4)
    assert only.rounds == {(steps_of(2), 3): 2, (steps_of(1), 2): 1, (NO_WORK, 1): 1}


def test_the_controller_ends_the_draft():
    """The token whose confidence fell is kept, and the run beyond it is not gained."""
    (only,) = walk([trace([3] * 8, confidence=0.4)], StaticThreshold(0.5, 3))
    assert counts(only) == (4, 4, 4, 4, 8)


def test_one_more_token_is_gained_where_the_text_is_among_the_candidates():
    right = {"runs": [0] * 6, "ranks": [2] * 6, "room": 20}
    assert counts(walk([trace(**right)], FixedK(2), candidates=2)[0]) == (6, 12, 24, 0, 6)
    assert counts(walk([trace(**right)], FixedK(2), candidates=3)[0]) == (3, 6, 18, 3, 6)


def test_no_more_tokens_are_verified_than_fit_into_one_pass():
    """64, at 16 candidates for each place: 4 places, although 9 are drafted where each has one."""
    only = trace([0] * 3, room=20, depth=9)
    assert walk([only], FixedK(9))[0].rounds == {(steps_of(9), 10): 3}
    assert walk([only], FixedK(9), candidates=16)[0].rounds == {(steps_of(4), 65): 3}


def test_a_round_says_what_it_verified():
    controller = AdaptiveThreshold()
    found = list(steps(trace([1, 0, 0, 1], ranks=[1, 0, 0, 0], room=9, depth=2), controller, candidates=2))
    assert found == [
        WalkStep([0.9, 0.9], 1, 4, True, 3, steps_of(2)),
        WalkStep([0.9, 0.9], 1, 4, False, 1, steps_of(2)),
    ]


def test_nothing_is_counted_after_the_end_of_the_text():
    (only,) = walk([trace([2, 1], room=9)], FixedK(3))
    assert counts(only) == (1, 3, 3, 2, 2)


def test_a_share_of_a_text_ends_with_a_whole_round():
    whole = trace([2, 2, 2, 2, 2, 2])
    share = Trace(6, 6, whole.confidences[:2], whole.runs[:2], whole.ranks[:2], whole.unfinished[:2])
    assert counts(walk([share], FixedK(2))[0]) == (1, 2, 2, 2, 3)
    rest = Trace(6, 6, whole.confidences[2:], whole.runs[2:], whole.ranks[2:], whole.unfinished[2:])
    assert share.then(rest) == whole


def test_a_controller_keeps_what_it_learnt_unless_seeded():
    controller = AdaptiveThreshold(threshold=0.5, step=1.0, inertia=0.0, floor=0.0, ceiling=1.0)
    texts = [trace([0], room=9), trace([0, 0], room=9)]
    learnt = walk(texts, controller)
    assert [w.stats.drafted for w in learnt] == [3, 1 + 1]
    afresh = walk(texts, controller, seeded=True)
    assert [w.stats.drafted for w in afresh] == [3, 3 + 1]
    assert controller.threshold == 0.5


def test_a_controller_that_would_go_on_is_refused():
    short = trace([1, 1, 1, 1, 1], depth=2, room=9, unfinished=True)
    assert walk([short], FixedK(2))[0].stats.tokens == 5
    with pytest.raises(ValueError, match="too short for this controller"):
        walk([short], FixedK(3))
