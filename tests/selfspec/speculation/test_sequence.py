"""What a sequence emits of what a round gives it: up to its end, and no more than it has room for."""

from __future__ import annotations

import pytest

from selfspec.speculation.sampling import Sampler
from selfspec.speculation.sequence import SequenceState


@pytest.mark.parametrize(
    ("room", "emitted", "left"), [(1, (5,), 0), (2, (5, 6), 0), (3, (5, 6, 7), 0), (9, (5, 6, 7), 6)]
)
def test_no_more_than_there_is_room_for(room, emitted, left):
    seq = SequenceState([1, 2], room, Sampler())
    assert seq.emit([5, 6, 7]) == emitted
    assert seq.tokens == [1, 2, *emitted]
    assert seq.remaining == left


def test_an_end_token_is_the_last_and_stop_is_told_of_it():
    told = []
    seq = SequenceState([1], 9, Sampler(), frozenset([6]), stop=lambda token: told.append(token) or False)
    assert seq.emit([5, 6, 7]) == (5, 6)
    assert told == [5, 6]
    assert seq.remaining == 0


def test_stop_ends_it_after_the_token_that_it_was_told():
    told = []
    seq = SequenceState([1], 9, Sampler(), frozenset([7]), stop=lambda token: told.append(token) or token == 5)
    assert seq.emit([4, 5, 6, 7]) == (4, 5)
    assert told == [4, 5]
    assert seq.remaining == 0
