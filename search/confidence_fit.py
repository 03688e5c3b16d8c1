"""Fit the confidence of drafted tokens to their probability, the gap of the two best logits, or both.

The inputs are chosen by the log loss of a logistic regression on a trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from selfspec.controllers import FixedK
from selfspec.types.confidence import MIN_GAP, MIN_PROBABILITY, PROBABILITY, Confidence
from selfspec.types.draft_path import DraftPath

from .acceptance_fit import drafted
from .replay import Replay
from .trace import Trace

FEWEST = 60  # the fewest drafted tokens for a fit; a tenth of this is the fewest wrong, or right, ones
BETTER = 0.98  # times the log loss of the best single feature, below which both features are used
LARGEST = 30.0  # bound on a feature's absolute value
GAP = Confidence(probability=0.0, gap=1.0)  # g / (1 + g) for a gap g
DIGITS = 4

Floats = NDArray[np.float64]


def fit_confidence(replay: Replay, path: DraftPath, *, draft: int, share: float) -> Confidence:
    """Fit the confidence to drafts of `draft` tokens along a path, from a `share` of the replay's starts.

    The replay's confidence is the probability afterwards. The fit is the probability itself where tokens are too few.
    """
    controller = FixedK(min(draft, replay.depth))
    traces: dict[Confidence, list[Trace]] = {}
    for confidence in (PROBABILITY, GAP):
        replay.confidence = confidence
        traces[confidence] = replay.trace(path, [controller], share=share)
    replay.confidence = PROBABILITY
    return choose_confidence(*features(traces[PROBABILITY], traces[GAP]))


def features(by_probability: Sequence[Trace], by_gap: Sequence[Trace]) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return the log-odds, the log gap and the correctness of every drafted token that follows no wrong one.

    The traces are of the same drafts, one with probabilities as confidences, the other with `GAP`.
    """
    p, right = _token_arrays(by_probability)
    gap_confidence, _ = _token_arrays(by_gap)
    p, gap_confidence = (
        np.clip(p, MIN_PROBABILITY, 1 - MIN_PROBABILITY),
        np.clip(gap_confidence, MIN_GAP, 1 - MIN_PROBABILITY),
    )
    gap = np.log(np.maximum(gap_confidence / (1 - gap_confidence), MIN_GAP))
    return np.log(p / (1 - p)).clip(-LARGEST, LARGEST), gap.clip(-LARGEST, LARGEST), right


def _token_arrays(traces: Sequence[Trace]) -> tuple[Floats, NDArray[np.bool_]]:
    tokens = [token for trace in traces for token in drafted(trace)]
    return np.array([t.confidence for t in tokens], dtype=float), np.array([t.accepted for t in tokens], dtype=bool)


def choose_confidence(odds: Floats, gap: Floats, right: NDArray[np.bool_]) -> Confidence:
    """Return the confidence with the least log loss; both features are used only where they are clearly better.

    It is the share of right tokens where hardly any is wrong, or hardly any right, or where no feature helps. It is the
    probability where there are fewer than `FEWEST` tokens.
    """
    if len(right) < FEWEST:
        return PROBABILITY
    share = (right.sum() + 0.5) / (len(right) + 1)
    always = Confidence(bias=round(math.log(share / (1 - share)), DIGITS), probability=0.0)
    if not FEWEST / 10 <= (~right).sum() <= len(right) - FEWEST / 10:
        return always
    tried = [((odds,), (1, 0)), ((gap,), (0, 1)), ((odds, gap), (1, 1))]
    fits = [(_fitted(columns, right), reads) for columns, reads in tried]
    singles = [((loss, weights), reads) for (loss, weights), reads in fits[:2] if weights[1] > 0]
    if not singles:
        return always
    best = min(singles, key=lambda fit: fit[0][0])
    (loss, weights), _ = fits[2]
    if min(weights[1:]) > 0 and loss < BETTER * best[0][0]:
        best = fits[2]
    (_, (bias, *each)), reads = best
    values = iter(each)
    probability, apart = (next(values) if read else 0.0 for read in reads)
    return Confidence(bias=round(bias, DIGITS), probability=round(probability, DIGITS), gap=round(apart, DIGITS))


def _fitted(columns: Sequence[Floats], right: NDArray[np.bool_]) -> tuple[float, tuple[float, ...]]:
    """Return the mean log loss of a logistic regression on the columns, and its bias and weights."""
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

    x = np.stack(columns, axis=1)
    model = LogisticRegression(C=1e3, max_iter=1000).fit(x, right)
    weights = (float(model.intercept_[0]), *map(float, model.coef_[0]))
    return log_loss(weights[0] + x @ np.array(weights[1:]), right), weights


def log_loss(odds: Floats, right: NDArray[np.bool_]) -> float:
    """Return the mean of -log of the probability that log-odds assign to the outcomes."""
    return float(np.mean(np.logaddexp(0, np.where(right, -odds, odds)))) if len(odds) else math.nan
