"""Which sequences draft how many tokens: the best of all allocations; one sequence decides as its controller does."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from selfspec.controllers import DraftLoop, RateOptimal
from selfspec.controllers.batch_scheduler import PRIOR_DRAFTS, AcceptanceHistory, allocate_tokens
from selfspec.types.acceptance import AcceptanceCurve, PayoffModel

SECONDS = st.floats(0, 1)
ROW = st.lists(st.floats(0, 1), max_size=3).map(lambda chances: sorted(chances, reverse=True))


def worth(counts, chances, rate, draft, verify):
    """Expected tokens less the rate times the seconds that they take."""
    passes = [sum(count > d for count in counts) for d in range(max(counts, default=0))]
    tokens = sum(sum(row[:count]) for row, count in zip(chances, counts, strict=True))
    return tokens - rate * (sum(map(draft, passes)) + verify(sum(counts)))


@given(st.lists(ROW, max_size=3), st.floats(0.01, 5), SECONDS, SECONDS, st.lists(SECONDS, min_size=9, max_size=9))
def test_no_other_allocation_is_better_whatever_verification_takes(chances, rate, start, each, steps):
    def draft(tokens):
        return start + each * tokens if tokens else 0.0

    def verify(tokens):
        return sum(steps[:tokens])

    counts = allocate_tokens(chances, rate, draft, verify)
    every = itertools.product(*(range(len(row) + 1) for row in chances))
    best = max(worth(other, chances, rate, draft, verify) for other in every)
    assert worth(counts, chances, rate, draft, verify) == pytest.approx(best, abs=1e-9)
    assert all(count <= len(row) for count, row in zip(counts, chances, strict=True))


@given(st.lists(ROW, max_size=5), st.floats(0.01, 5), st.lists(SECONDS, min_size=6, max_size=6))
def test_whatever_draft_passes_take_no_draft_is_too_long_and_nothing_is_lost(chances, rate, passes):
    draft, verify = passes.__getitem__, (0.1).__mul__
    counts = allocate_tokens(chances, rate, draft, verify)
    assert all(count <= len(row) for count, row in zip(counts, chances, strict=True))
    assert worth(counts, chances, rate, draft, verify) >= -1e-9


def test_a_sequence_that_is_surer_gets_what_another_does_not():
    """A pass takes nothing, and each verified token as long as 0.6 tokens bring."""
    counts = allocate_tokens([[0.9, 0.81, 0.73, 0.66], [0.7, 0.49], [0.5]], 1.0, lambda n: 0.0, lambda n: 0.6 * n)
    assert counts == [4, 1, 0]


def test_a_further_pass_is_worth_it_for_several_sequences_only():
    """Passes take as long as 1.2 tokens bring, however many sequences draft in them."""
    sure = [0.95, 0.9]
    assert allocate_tokens([sure], 1.0, lambda n: 1.2, lambda n: 0.0) == [0]
    assert allocate_tokens([sure, sure], 1.0, lambda n: 1.2, lambda n: 0.0) == [2, 2]


def test_rows_that_cost_nothing_are_filled_and_no_more():
    """Verification takes longer from the fifth further token on, by more than a token brings."""
    counts = allocate_tokens([[0.9, 0.8, 0.7], [0.85, 0.75, 0.65]], 1.0, lambda n: 0.1, lambda n: 2.0 * max(n - 4, 0))
    assert counts == [2, 2]


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
    st.floats(1, 4),
    st.floats(0.05, 1),
    st.lists(st.floats(0, 0.5), min_size=12, max_size=12),
)
def test_with_one_sequence_it_decides_as_the_controller_of_a_single_stream(confidences, rate, draft, steps):
    rounds = tuple(1 + sum(steps[:rows]) for rows in range(13))
    payoff = PayoffModel(draft, rounds, AcceptanceCurve(accepted=[0.2, 1.0], following=[0.4, 0.95]))
    controller, n = RateOptimal(rate=rate, k_max=8, floor=0.0, payoff=payoff), len(confidences)
    loop = DraftLoop(controller, depth=8, together=True)
    for confidence in confidences:
        loop.record(confidence)

    def verify(more):
        return rounds[1 + n + more] - rounds[1 + n]

    chances = loop.survival_chances(0.5, 8)
    assert len(chances) == 8 - n
    (count,) = allocate_tokens([chances], rate, lambda tokens: draft * tokens, verify)
    gain = max(sum(chances[:j]) - rate * (j * draft + verify(j)) for j in range(1, 9 - n))
    assume(abs(gain) > 1e-9)
    assert (count > 0) == controller.go_on(confidences)


def test_chances_of_further_tokens_end_where_the_draft_must():
    controller = RateOptimal(k_max=3, payoff=PayoffModel(curve=AcceptanceCurve(accepted=[1, 1], following=[0.5, 0.5])))
    assert DraftLoop(controller, depth=8, together=True).survival_chances(0.8, 8) == [0.8, 0.4, 0.2]
    assert DraftLoop(controller, depth=8, together=True).survival_chances(0.8, 2) == [0.8, 0.4]
    assert DraftLoop(controller, depth=1, together=True).survival_chances(0.8, 8) == [0.8]
    assert DraftLoop(controller, depth=0, together=True).survival_chances(0.8, 8) == []


def test_a_history_without_drafts_says_what_the_batch_does_and_then_its_own():
    history = AcceptanceHistory()
    assert history.chance(0.7) == pytest.approx(0.7)
    history.record(False)
    assert history.chance(0.7) == pytest.approx(0.7 * PRIOR_DRAFTS / (PRIOR_DRAFTS + 1))
    for _ in range(200):
        history.record(True)
    assert history.chance(0.7) > 0.9
    for _ in range(200):
        history.record(False)
    assert history.chance(0.7) < 0.25
    assert math.isclose(history.chance(0.0), 0.0, abs_tol=1e-6)
