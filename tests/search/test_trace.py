"""Walks over traces written by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from selfspec.search.trace import Trace, WalkStep, steps, walk

from selfspec.controllers import AdaptiveThreshold, FixedK, StaticThreshold
from selfspec.types.draft_work import NO_WORK, steps_of


def trace(runs, *, confidence=0.9, depth=3, room=None, ranks=None, unfinished=False):
    """A first token and a text of `len(runs)` tokens whose drafts are `depth` deep as far as there is room."""
    n = len(runs) + 1
    room = n if room is None else room + 1
    confidences = [[confidence] * min(depth, room - i - 1) for i in range(n)]
    return Trace(n, room, confidences, [0, *runs], [0, *(ranks or [0] * len(runs))], [unfinished] * n)


def counts(walk):
    """The counts of all rounds but the first, which emits a token without a draft."""
    s = walk.stats
    return s.rounds - 1, s.drafted, s.nodes, s.accepted, s.tokens - 1


def rounds(walk):
    """The rounds but the first."""
    return walk.rounds - Counter({(NO_WORK, 1): 1})


def test_the_first_round_drafts_nothing():
    (only,) = walk([Trace(1, 9, [[0.9] * 8], [8], [0], [False])], FixedK(8))
    assert only.stats.tokens == 1
    assert only.rounds == {(NO_WORK, 1): 1}
    assert next(iter(steps(trace([0]), FixedK(2)))) == WalkStep((), 0, 0, False, 1, NO_WORK)
    assert list(steps(Trace(0, 9, [], [], [], []), FixedK(2))) == []


def test_a_draft_that_is_always_right():
    (only,) = walk([trace([3, 3, 3, 3, 3, 2, 1, 0])], FixedK(3))
    assert counts(only) == (2, 6, 6, 6, 8)
    assert rounds(only) == {(steps_of(3), 4): 2}


def test_a_draft_that_is_always_wrong():
    (only,) = walk([trace([0] * 4)], FixedK(2))
    assert counts(only) == (4, 2 + 2 + 1 + 0, 5, 0, 4)
    assert rounds(only) == {(steps_of(2), 3): 2, (steps_of(1), 2): 1, (NO_WORK, 1): 1}


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
    assert rounds(walk([only], FixedK(9))[0]) == {(steps_of(9), 10): 3}
    assert rounds(walk([only], FixedK(9), candidates=16)[0]) == {(steps_of(4), 65): 3}


def test_a_round_says_what_it_verified():
    controller = AdaptiveThreshold()
    found = list(steps(trace([1, 0, 0, 1], ranks=[1, 0, 0, 0], room=9, depth=2), controller, candidates=2))
    assert found[1:] == [
        WalkStep([0.9, 0.9], 1, 4, True, 3, steps_of(2)),
        WalkStep([0.9, 0.9], 1, 4, False, 1, steps_of(2)),
    ]


def test_nothing_is_counted_after_the_end_of_the_text():
    (only,) = walk([trace([2, 1], room=9)], FixedK(3))
    assert counts(only) == (1, 3, 3, 2, 2)


def test_a_share_of_a_text_ends_with_a_whole_round():
    whole = trace([2, 2, 2, 2, 2, 2])
    share = Trace(7, 7, whole.confidences[:3], whole.runs[:3], whole.ranks[:3], whole.unfinished[:3])
    assert counts(walk([share], FixedK(2))[0]) == (1, 2, 2, 2, 3)
    rest = Trace(7, 7, whole.confidences[3:], whole.runs[3:], whole.ranks[3:], whole.unfinished[3:])
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
    assert walk([short], FixedK(2))[0].stats.tokens == 1 + 5
    with pytest.raises(ValueError, match="too short for this controller"):
        walk([short], FixedK(3))
