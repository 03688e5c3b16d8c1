"""What proposers guess, how sure they are of it, and how much of it a pass is to check."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.proposers.base import NO_PROPOSAL, AcceptanceStats, Proposal, ProposerChain
from selfspec.proposers.lookup import Lookup

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def read(text):
    reader = Lookup().reader()
    for token in text:
        reader.append(token)
    return reader


class TestLookup:
    def test_what_followed_follows(self):
        assert read([1, 2, 3, 4, 5, 1, 2]).look_up([], 3).tokens == [3, 4, 5]
        assert read([1, 2, 3, 4, 5]).look_up([1, 2], 2).tokens == [3, 4]

    def test_nothing_repeated_is_no_guess(self):
        assert read([1, 2, 3]).look_up([], 4) == NO_PROPOSAL
        assert read([1, 1]).look_up([], 0) == NO_PROPOSAL

    def test_long_matches_are_surer_than_short_ones(self):
        chances = read([*range(20), *range(20, 40), *range(12)]).look_up([], 5).chances
        assert list(chances) == sorted(chances)
        assert chances[0] > read([3, 9, 3]).look_up([], 1).chances[0]

    def test_a_text_that_repeats_is_trusted_and_one_that_never_does_is_not(self):
        trusted = read([1, 2, 3] * 20).look_up([], 1).chances[0]
        lies = [token for i in range(40) for token in (7, 10 + i)]
        assert trusted > 0.95
        assert read([*lies, 7]).look_up([], 1).chances[0] < 0.05

    @given(TEXTS, st.integers(0, 6))
    def test_guesses_follow_from_the_text_alone(self, text, most):
        """Whatever was asked before."""
        quiet, asked = Lookup().reader(), Lookup().reader()
        for token in text:
            asked.look_up([token, 2], 3)
            quiet.append(token)
            asked.append(token)
        assert quiet.look_up([], most) == asked.look_up([], most)


def test_chances_begin_as_given_and_follow_what_was_seen():
    chances = AcceptanceStats((0.5, 0.9))
    assert chances(0) == pytest.approx(0.5)
    assert chances(7) == pytest.approx(0.9), "the last counts for whatever is stronger"
    for _ in range(300):
        chances.record(0, right=True)
        chances.record(1, right=False)
    assert chances(0) > 0.98
    assert chances(1) < 0.02


class Sure:
    """Guesses the same at every place."""

    name = "some"

    def __init__(self, tokens, chances):
        self.told, self.saying = [], Proposal(tokens, chances)

    def reader(self):
        return self

    def append(self, token):
        self.told.append(token)

    def look_up(self, drafted, most):
        return Proposal(self.saying.tokens[:most], self.saying.chances[:most])


class TestAhead:
    def look_up(self, *proposers, prices=(1.0, 1.2, 1.4, 1.6), most=9):
        reading = ProposerChain(proposers, prices).new_state()
        reading.read([5, 6])
        return list(reading.look_up([], most).tokens)

    def test_as_many_as_pay(self):
        """1.9 tokens for 1.2, 2.3 for 1.4, 2.34 for 1.6."""
        assert self.look_up(Sure([1, 2, 3], [0.9, 0.45, 0.1])) == [1, 2]
        assert self.look_up(Sure([1, 2, 3], [0.9, 0.9, 0.9])) == [1, 2, 3]
        assert self.look_up(Sure([1, 2, 3], [0.15, 0.9, 0.9])) == []

    def test_a_late_gain_is_seen(self):
        assert self.look_up(Sure([1, 2, 3], [0.19, 1.0, 1.0]), prices=(1.0, 1.2, 1.21, 1.22)) == [1, 2, 3]

    def test_never_wider_than_there_are_prices_nor_than_there_is_room(self):
        assert self.look_up(Sure([*range(9)], [1.0] * 9)) == [0, 1, 2]
        assert self.look_up(Sure([*range(9)], [1.0] * 9), most=1) == [0]
        assert self.look_up(Sure([*range(9)], [1.0] * 9), most=0) == []

    def test_the_proposer_that_promises_most_is_heard(self):
        assert self.look_up(Sure([1], [0.5]), Sure([2, 3], [0.6, 0.9])) == [2, 3]
        assert self.look_up(Sure([1, 4], [0.9, 0.9]), Sure([2, 3], [0.6, 0.9])) == [1, 4]
        assert self.look_up() == []

    def test_each_token_is_told_once(self):
        proposer = Sure([1], [0.9])
        reading = ProposerChain([proposer], (1.0, 1.1)).new_state()
        for text in ([3], [3], [3, 4, 5], [3, 4, 5, 6]):
            reading.read(text)
        assert proposer.told == [3, 4, 5, 6]

    def test_tokens_before_the_text_are_looked_up(self):
        before, without = (ProposerChain([Lookup()], (1.0,) * 4).new_state(before=b) for b in ([1, 2, 3, 4], []))
        for reading in before, without:
            reading.read([9, 1, 2])
        assert list(before.lookup(2, ()).tokens) == [3, 4]
        assert without.lookup(2, ()) == NO_PROPOSAL

    def test_passes_of_a_draft(self):
        """A wrong guess ends what a pass brings; the token that was drafted in its place is already there."""
        reading = ProposerChain([Sure([1, 2, 3], [0.9, 0.9, 0.9])], (1.0, 1.1, 1.2, 1.3)).new_state()
        assert reading.passes([1, 2, 3, 1, 2, 9, 1], 20) == [(0, 4), (4, 4), (5, 4), (6, 4)]
        assert reading.passes([1, 2, 9, 1], 20) == [(0, 4), (3, 4)]
        assert reading.passes([1, 2, 9, 1], 4) == [(0, 4), (3, 1)]
        assert reading.passes([], 4) == []

    def test_what_may_be_taken_as_it_is(self):
        """Of the proposer that expects most right tokens, up to an end of sequence, and never many."""
        reading = ProposerChain([Sure([1, 2], [0.5, 0.5]), Sure([3, 4, 5], [0.6, 0.9, 0.9])], ()).new_state()
        assert reading.lookup(9, ()) == Proposal([3, 4, 5], [0.6, 0.9, 0.9], "some")
        assert reading.lookup(2, ()) == Proposal([3, 4], [0.6, 0.9], "some")
        assert reading.lookup(9, (3,)) == Proposal([1, 2], [0.5, 0.5], "some")
        assert reading.lookup(0, ()) == NO_PROPOSAL
        assert len(ProposerChain([Sure([1] * 40, [1.0] * 40)], ()).new_state().lookup(40, ()).tokens) == 15
