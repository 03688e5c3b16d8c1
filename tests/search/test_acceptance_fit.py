"""The acceptance curve of traces whose law is known."""

from __future__ import annotations

import random

import pytest
from selfspec.search.acceptance_fit import fit_curve
from selfspec.search.trace import Trace

from selfspec.types.acceptance import AcceptanceCurve, interpolate


def made(starts: int, depth: int = 4, seed: int = 0) -> Trace:
    """A token of confidence c is right with chance c; where it is wrong, the second candidate is with chance a half."""
    draw = random.Random(seed)
    confidences, runs, ranks = [], [], []
    for i in range(starts):
        drafted = [draw.random() for _ in range(min(depth, starts + 10 - i))]
        run = next((j for j, c in enumerate(drafted) if draw.random() > c), len(drafted))
        confidences.append(drafted)
        runs.append(run)
        ranks.append(1 if run < len(drafted) and draw.random() < 0.5 else 0)
    return Trace(starts, starts + 20, confidences, runs, ranks, [False] * starts)


def test_it_finds_the_law():
    curve = fit_curve([made(6000), made(6000, seed=1)], 3)
    for c in (0.1, 0.3, 0.5, 0.7, 0.9):
        place = curve.place(c)
        assert interpolate(curve.accepted, place) == pytest.approx(c, abs=0.06)
        assert interpolate(curve.candidates[0], place) == pytest.approx((1 - c) / 2, abs=0.05)
        assert interpolate(curve.candidates[1], place) == 0
        assert interpolate(curve.following, place) == pytest.approx(0.5, abs=0.1)  # which does not depend on this one's
    assert curve.accepted == sorted(curve.accepted)
    assert len(curve.candidates) == 2


def test_only_what_was_on_the_text_counts():
    """After a wrong token, and beyond the text's end, nothing is known."""
    trace = Trace(40, 60, [[0.9, 0.9, 0.9]] * 40, [1] * 40, [0] * 40, [False] * 40)
    curve = fit_curve([trace], 1)
    first, second = 40, 39  # the last start's second token lies beyond the text
    assert curve.accepted[0] == pytest.approx(first / (first + second), abs=1e-3)
    assert curve.following == [0.0, 0.0]


def test_without_drafts_it_is_a_guess():
    assert fit_curve([Trace(1, 1, [[]], [0], [0], [False])], 3) == AcceptanceCurve()
