"""The acceptance curve of traces whose law is known.

What says best how likely a drafted token is right, on made-up figures and on a model's own drafts.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from models import plain, small
from selfspec.search.fits import FEWEST, GAP, choose_confidence, features, fit_confidence, fit_curve, log_loss
from selfspec.search.replay import Replay
from selfspec.search.replay_state import TargetText
from selfspec.search.trace import Trace

from selfspec.controllers import FixedK
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.acceptance import PROBABILITY, AcceptanceCurve, interpolate
from selfspec.types.draft_path import DraftPath


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


SKIP = DraftPath.skipping((1,), (2,))


def drawn(kind, n=4000, seed=0):
    """Log-odds and log gaps, one of which, or both, decide whether a token is right."""
    random = np.random.default_rng(seed)
    odds, gap = random.normal(1, 2, n), random.normal(0, 1.5, n)
    real = {"probability": 0.8 * odds, "gap": 1 + 1.5 * gap, "both": 0.8 * odds + 1.2 * gap, "neither": np.ones(n)}[
        kind
    ]
    return odds, gap, random.random(n) < 1 / (1 + np.exp(-real))


@pytest.mark.parametrize("kind", ["probability", "gap", "both"])
def test_what_decides_is_found(kind):
    found = choose_confidence(*drawn(kind))
    assert found.inputs == kind
    weights = {"probability": (0.8, 0), "gap": (0, 1.5), "both": (0.8, 1.2)}[kind]
    assert (found.probability, found.gap) == pytest.approx(weights, abs=0.15)


def test_it_is_the_share_of_being_right():
    odds, gap, right = drawn("gap")
    found = choose_confidence(odds, gap, right)
    estimates = np.array([found.estimate(1 / (1 + math.exp(-o)), math.exp(g)) for o, g in zip(odds, gap, strict=True)])
    for low in (0.2, 0.5, 0.8):
        part = (estimates >= low) & (estimates < low + 0.15)
        assert right[part].mean() == pytest.approx(estimates[part].mean(), abs=0.06)


def test_without_enough_to_tell_it_is_the_probability():
    odds, gap, right = drawn("gap", FEWEST - 1)
    assert choose_confidence(odds, gap, right) == PROBABILITY


def test_where_nothing_tells_it_is_the_share_of_all_that_are_right():
    """A token of low probability is as likely right as any other, and no threshold may end drafts after it."""
    odds, gap, right = drawn("gap")
    few = np.ones_like(right)
    few[:5] = False
    for wrong, why in ((few, "hardly any is wrong"), (~right, "what is surer is not right less often")):
        found = choose_confidence(odds if wrong is few else gap, gap, wrong)
        assert found.inputs == "nothing", why
        assert found.estimate(1e-6, 1e-6) == found.estimate(0.99, 9.0) == pytest.approx(wrong.mean(), abs=1e-3)


def test_log_loss():
    assert log_loss(np.zeros(4), np.array([True, False, True, True])) == pytest.approx(math.log(2))
    assert log_loss(np.array([20.0, -20.0]), np.array([True, False])) == pytest.approx(0, abs=1e-8)


@pytest.fixture(scope="module")
def replay():
    model = small(vocabulary=64)
    texts = [
        TargetText((*p, *plain(LeanRuntime(model), p, 40)), len(p), 40) for p in ([1, 2, 3], [4, 5], [7], [3, 3, 9])
    ]
    with Replay(model, texts, depth=3) as replay:
        yield replay


def test_features_are_the_drafts_own(replay):
    """Of each text's first start: the probability of the likeliest token, and its distance from the next."""
    traces = {}
    for told in (PROBABILITY, GAP):
        replay.confidence = told
        traces[told] = replay.trace(SKIP, [FixedK(1)])
    replay.confidence = PROBABILITY
    odds, gap, right = features(traces[PROBABILITY], traces[GAP])
    assert len(odds) == len(gap) == len(right) == sum(len(trace.runs) - 1 for trace in traces[GAP])
    model = replay._runtime.model
    text, runtime = replay.texts[0], LeanRuntime(model)
    with runtime.session(len(text.tokens)):
        ids = torch.tensor([text.tokens[: text.prompt_length]])
        runtime.forward(ids[:, :-1], 0, logits=None)
        last = runtime.forward(ids[:, -1:], text.prompt_length - 1, path=runtime.compile(SKIP)).logits[0, 0]
    best, second = last.topk(2).values.tolist()
    probability = float(last.softmax(-1).max())
    assert gap[0] == pytest.approx(math.log(best - second), abs=1e-6)
    assert odds[0] == pytest.approx(math.log(probability / (1 - probability)), abs=1e-6)
    assert right[0] == (int(last.argmax()) == text.tokens[text.prompt_length])


def test_a_replay_tells_the_probability_again_afterwards(replay):
    found = fit_confidence(replay, SKIP, draft=2, share=0.5)
    assert replay.confidence == PROBABILITY
    assert found == fit_confidence(replay, SKIP, draft=2, share=0.5)
