"""What is drafted by several sequences together: as much as pays, by who has most hope, down to nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import BatchDraftScheduler
from selfspec.controllers.batch_scheduler import most_paying_sequences
from selfspec.types.costs import PassCosts

FLAT = PassCosts((0.0, *[1.0] * 64), (0.0, *[0.2] * 64))  # a pass costs what it costs, however wide
STEEP = PassCosts(tuple(float(n) for n in range(65)), tuple(0.3 * n for n in range(65)))  # all is by the token


def begun(prices, rows):
    load = BatchDraftScheduler(prices)
    load.begin(rows)
    return load


def going(load, hopes, later, *, verified, most):
    """The sequences that draft another token, of `most` that each may draft."""
    chances = [[hope * later**d for d in range(most)] for hope in hopes]
    return [i for i, length in enumerate(load.draft_lengths(chances, verified=verified)) if length]


def test_where_passes_cost_the_same_however_wide_all_draft():
    assert going(begun(FLAT, 4), [0.9, 0.5, 0.9, 0.6], 0.8, verified=4, most=8) == [0, 1, 2, 3]


def test_where_every_token_costs_as_much_nobody_drafts():
    assert going(begun(STEEP, 4), [0.9, 0.95, 0.9, 0.99], 0.9, verified=4, most=8) == []


def test_one_length_for_all_is_as_long_as_pays():
    """A longer draft pays where later tokens are as sure, and costs are those of all sequences together."""
    lengths = (1, 2, 4, 6, 8, 12)
    assert begun(FLAT, 4).common_length([0.9] * 4, 0.95, lengths) == 12
    assert begun(FLAT, 4).common_length([0.9] * 4, 0.3, lengths) == 2
    assert begun(STEEP, 4).common_length([0.9] * 4, 0.95, lengths) == 0
    assert begun(FLAT, 4).common_length([0.9] * 4, 0.95, ()) == 0


def test_those_with_most_hope_draft():
    """Up to eight tokens a pass costs nothing more, beyond as much as it brings."""
    wide = PassCosts((0.0, *[1.0] * 8, *(1.0 + n for n in range(1, 57))), (0.0, *[0.001] * 64))
    assert going(begun(wide, 6), [0.1, 0.9, 0.5, 0.8, 0.2, 0.3], 0.5, verified=6, most=1) == [1, 3]


def test_a_dear_row_is_taken_where_cheap_ones_follow():
    """The ninth token doubles the pass, those after it are free: one more does not pay, eight do."""
    stairs = PassCosts((0.0, *[1.0] * 2, *[2.5] * 30), (0.0, *[0.001] * 32))
    load = begun(stairs, 2)
    assert going(load, [0.95, 0.95], 0.95, verified=2, most=1) == []
    assert going(load, [0.95, 0.95], 0.95, verified=2, most=8) == [0, 1]


def test_a_rate_that_drafts_have_raised_asks_for_more():
    load = begun(FLAT, 1)
    assert going(load, [0.25], 0.5, verified=1, most=1) == [0]
    for _ in range(300):
        load.record_draft(4, 4, 5, nodes=4)
        load.record_pass(1)
        load.begin(1)
    assert load.rate > 2
    assert going(load, [0.25], 0.5, verified=1, most=1) == []


def test_a_rate_is_known_by_how_many_there_are():
    load = begun(FLAT, 1)
    for _ in range(300):
        load.record_draft(4, 4, 5, nodes=4)
        load.begin(1)
    load.begin(2)
    assert load.rate == pytest.approx(2.0)  # plainly: two tokens a second


def test_those_that_are_still_read_will_be_decoded_beside():
    """Alone, a sequence may spend half a pass on half a token; not where three more begin in a moment."""
    load = begun(FLAT, 1)
    assert going(load, [0.4], 0.1, verified=1, most=1) == [0]
    load.begin(1, reading=3)
    assert load.rate == 4.0
    assert going(load, [0.4], 0.1, verified=1, most=1) == []


def test_first_tokens_are_judged_by_those_lately_and_then_forgotten():
    load = begun(FLAT, 1)
    usual = load.first
    for _ in range(50):
        load.record_draft(1, 0, 1, nodes=1)
        load.begin(1)
    assert load.first < 0.3
    for _ in range(1000):
        load.begin(1)
    assert load.first == pytest.approx(usual)


def test_free_guesses_are_verified_while_they_bring_more_than_their_rows_take():
    load = begun(PassCosts((0.0, *[1.0] * 4, *(1.0 + 0.5 * n for n in range(1, 61))), FLAT.draft), 2)
    assert load.lookup_lengths([[0.9, 0.9, 0.1], [0.2]]) == [2, 0]
    assert load.lookup_lengths([[0.2, 0.9], [0.1]]) == [2, 0]  # two rows are free
    assert load.lookup_lengths([[], []]) == [0, 0]
    full = begun(load.prices, 4)  # of which one alone looks tokens up: no row is free
    assert full.lookup_lengths([[0.2, 0.9]]) == [0]


def test_lookup_tokens_take_the_place_of_drafts_where_the_round_is_then_worth_more():
    load = begun(FLAT, 2)
    assert load.lookup_lengths([[0.6], [0.9, 0.9, 0.9]], instead=True) == [1, 3]
    for _ in range(300):
        going(load, [0.9, 0.9], 0.95, verified=2, most=4)
        for _ in range(2):
            load.record_draft(4, 3, 4, nodes=4)
        load.record_pass(2)
        load.begin(2)
    assert load.lookup_lengths([[0.6], []], instead=True) == [0, 0]
    assert load.lookup_lengths([[], [0.99] * 5], instead=True) == [0, 5]


def test_a_sequence_that_does_not_draft_saves_no_draft_pass_of_the_others():
    """Its lookup tokens must bring what its draft would, as long as the others draft."""
    load = begun(FLAT, 8)
    for _ in range(100):
        going(load, [0.95] * 8, 0.95, verified=8, most=4)
        for _ in range(8):
            load.record_draft(4, 4, 5, nodes=4)
        load.record_pass(8)
        load.begin(8)
    chances = [[0.8, 0.8, 0.8]] + [[]] * 7
    assert load.lookup_lengths(chances, instead=True) == [0] * 8
    assert load.lookup_lengths([[0.8, 0.8, 0.8]] * 8, instead=True) == [3] * 8


def rounds(load, rows, number, *, plain=1.0, spent=0.2, verifying=0.0, nodes=2):
    """So many rounds in which each of `rows` drafts a token along the path, or none where `nodes` is 0."""
    for _ in range(number):
        load.begin(rows)
        if nodes:
            load.record_pass(rows, spent)
        for _ in range(rows):
            load.record_draft(1 if nodes else 0, 1 if nodes else 0, 2 if nodes else 1, nodes=nodes // rows)
        load.record_duration(plain + (spent + verifying if nodes else 0.0))
    load.begin(rows)


def test_what_plain_rounds_take_is_learnt():
    """Twice as long as priced, with longer texts, say: then a draft pass may take twice as long, too."""
    load = BatchDraftScheduler(FLAT)
    load.begin(2)
    assert load.rate == 2.0
    assert going(load, [0.2, 0.2], 0.1, verified=2, most=1) == []
    rounds(load, 2, 200, plain=2.0, nodes=0)
    assert load.rate == pytest.approx(1.0, abs=0.1)
    assert going(load, [0.2, 0.2], 0.1, verified=2, most=1) == [0, 1]


@pytest.mark.parametrize(("spent", "verifying", "go"), [(0.2, 0.0, True), (1.5, 0.0, False)])
def test_what_draft_passes_take_is_learnt(spent, verifying, go):
    load = BatchDraftScheduler(FLAT, first=0.9)
    rounds(load, 2, 100, spent=spent, verifying=verifying)
    load._speeds.clear()  # what rounds brought is not at stake
    assert bool(going(load, [0.5, 0.5], 0.1, verified=2, most=1)) is go


def test_what_verifying_takes_is_learnt():
    slope = PassCosts((0.0, *(1.0 + 0.2 * n for n in range(64))), FLAT.draft)
    load = BatchDraftScheduler(slope)
    load.begin(2)
    assert load.lookup_lengths([[0.5], [0.5]]) == [1, 1]
    rounds(load, 2, 200, plain=1.2, verifying=1.2)
    load._speeds.clear()
    assert load._wider(2, 2) > 2 * 0.4
    assert load.lookup_lengths([[0.5], [0.5]]) == [0, 0]


def test_chance_in_the_time_of_short_drafts_does_not_end_drafting():
    """Rounds with a token more are up to a tenth longer or shorter by chance, which is ten times what it takes."""
    slope = PassCosts((0.0, *(1.0 + 0.01 * n for n in range(64))), FLAT.draft)
    load = BatchDraftScheduler(slope)
    for number in range(300):
        load.begin(2)
        load.record_draft(0, 1, 2, nodes=1)
        load.record_draft(0, 0, 1, nodes=0)
        load.record_duration(1.02 + (0.1 if number % 2 else -0.1))
    load.begin(2)
    assert load._wider(2, 8) == pytest.approx(0.08, rel=0.2)
    assert going(load, [0.9, 0.9], 0.9, verified=2, most=4) == [0, 1]


def drafts_of(load, rows, number):
    """Tokens that are drafted in each of so many rounds, where verifying another takes as long as a plain one does."""
    found = []
    for _ in range(number):
        load.begin(rows)
        drafting = going(load, [0.9] * rows, 0.9, verified=rows, most=1)
        if drafting:
            load.record_pass(len(drafting), 0.2)
        for i in range(rows):
            load.record_draft(int(i in drafting), int(i in drafting), 1 + (i in drafting), nodes=int(i in drafting))
        load.record_duration(1.0 + (0.2 + len(drafting) if drafting else 0.0))
        found.append(len(drafting))
    return found


def test_a_plain_pass_that_was_timed_too_dear_does_not_make_wider_ones_free():
    """No factor mends a price of nothing. What is learnt is of as many sequences, and is tried again in the end."""
    load = BatchDraftScheduler(PassCosts((0.0, 0.3, 0.6, *[3.0] * 62), FLAT.draft), first=0.9)
    rounds(load, 4, 2, nodes=0)
    assert drafts_of(load, 4, 2) == [4, 0]
    later = drafts_of(load, 4, 300)
    assert 0 < sum(later) < 0.1 * 4 * len(later)
    assert drafts_of(load, 3, 1) == [3]


def test_guesses_that_are_wrong_however_sure_are_given_up_and_tried_again():
    steep = PassCosts((0.0, *(1.0 + 0.3 * n for n in range(64))), FLAT.draft)
    load = BatchDraftScheduler(steep)
    for _ in range(60):
        load.begin(2)
        counts = load.lookup_lengths([[0.95, 0.95], []])
        load.record_draft(0, 0, 1, nodes=counts[0])
        load.record_draft(0, 0, 1, nodes=0)
    assert load.lookup_lengths([[0.95, 0.95], []]) == [0, 0]
    for _ in range(300):
        load.begin(2)
        load.record_draft(0, 0, 1, nodes=0)
        load.record_draft(0, 0, 1, nodes=0)
    load.begin(2)
    assert load.lookup_lengths([[0.95, 0.95], []])[0] > 0


@given(
    st.lists(st.floats(0, 1), max_size=8),
    st.floats(0, 1),
    st.integers(1, 12),
    st.lists(st.floats(0.001, 2), min_size=12, max_size=12),
)
def test_whatever_prices_are_the_choice_is_one(hopes, later, most, steps):
    seconds = tuple(sum(steps[:n]) for n in range(13))
    drafting = going(begun(PassCosts(seconds, seconds), 8), hopes, later, verified=len(hopes), most=most)
    least = min((hopes[i] for i in drafting), default=1.0)
    assert all(hope <= least for i, hope in enumerate(hopes) if i not in drafting)


def test_prices_between_what_was_timed_are_lines_that_never_fall():
    """A pass over eight tokens took less than one over four, which was disturbed then."""
    prices = PassCosts.from_measurements({1: 1.0, 4: 4.0, 8: 3.0, 16: 8.0}, {1: 0.5, 2: 0.75}, most=16)
    assert prices.verified(2) == pytest.approx(1 + 2 / 3)
    assert prices.verified(4) == prices.verified(8) == 3.0
    assert prices.verified(12) == pytest.approx(5.5)
    assert prices.verified(32) == pytest.approx(8.0 + 16 * 5.0 / 8)
    assert prices.drafted(4) == pytest.approx(1.25)


def test_too_few_prices_are_refused():
    with pytest.raises(SelfspecError, match="expected at least those over 0, 1 and 2 tokens"):
        PassCosts((0.0, 1.0), (0.0, 1.0, 2.0))


def test_a_draft_is_longer_where_a_sequence_is_surer():
    """Each verified token takes as long as three quarters of a token bring, with the margin; draft passes nothing."""
    slope = PassCosts((0.0, *(1.0 + 0.3 * n for n in range(64))), (0.0, *[1e-6] * 64))
    load = begun(slope, 2)
    assert load.rate == pytest.approx(2 / 1.3)
    assert load.draft_lengths([[0.95, 0.9, 0.85, 0.5], [0.8, 0.5]], verified=2) == [3, 1]
    assert load.later == pytest.approx((0.9 / 0.95 + 0.5 / 0.8) / 2)


def test_the_number_of_sequences_from_which_drafts_stop_paying():
    """Up to eight tokens a pass takes as long as over one, then a second a token: two each must fit into eight."""
    eight = PassCosts((0.0, *[1.0] * 8, *(1.0 + n for n in range(1, 57))), (0.0, *[0.01] * 64))
    assert most_paying_sequences(eight, 0.9, most=64) == 7
    assert most_paying_sequences(STEEP, 0.9, most=64) == 0
    assert most_paying_sequences(FLAT, 0.9, most=5) == 5
