"""Fits to traces: the acceptance curve, and the confidence, which is the chance that a drafted token is right.

The inputs are those whose logistic regression on a trace has the lowest log loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from selfspec.controllers import FixedK
from selfspec.types.acceptance import MIN_GAP, MIN_PROBABILITY, PROBABILITY, AcceptanceCurve, Confidence
from selfspec.types.draft_path import DraftPath

from .replay import Replay
from .trace import Trace

KNOTS, ROWS = 12, 16  # the most knots of a curve, and the fewest drafted tokens for each knot
DIGITS = 4

Floats = NDArray[np.float64]


class Drafted(NamedTuple):
    """A drafted token, within the text, whose predecessors in its draft all match the text.

    `accepted`: whether the token matches the text. `rank`: if it does not, which other candidate for its position does
    (1: the second candidate; 0: no known candidate, or the token itself matches). `following`: 1 if the next token of
    the draft matches too, else 0 (-1: there is no next token). `place`: the token's position in the draft, from 1.
    """

    confidence: float
    accepted: bool
    rank: int
    following: int
    place: int


def fit_curve(traces: Sequence[Trace], candidates: int) -> AcceptanceCurve:
    """Fit the acceptance curve of traces by isotonic regression.

    `candidates`: the largest number of candidates for each position, the drafted token included. Only drafted tokens
    count whose predecessors in the draft all match the text. If no token counts, the default curve is returned.
    """
    tokens = sorted(token for trace in traces for token in drafted(trace))
    if not tokens:
        return AcceptanceCurve()
    c, hit, rank, following, _ = (np.array(values, dtype=float) for values in zip(*tokens, strict=True))
    parts = np.array_split(np.arange(len(c)), max(1, min(KNOTS, len(c) // ROWS)))
    knots = np.array([c[part].mean() for part in parts]).round(DIGITS)
    knots, first = np.unique(knots, return_index=True)
    if len(knots) < 2:
        knots = np.array([0.0, 1.0])
    going = (hit > 0) & (following >= 0)  # right tokens with a next drafted token

    def at_knots(confidences: Floats, values: Floats, *, rising: bool) -> list[float]:
        if not len(confidences):
            return [0.5] * len(knots)
        distinct, which, counts = np.unique(confidences, return_inverse=True, return_counts=True)
        shares = np.bincount(which, weights=values) / counts
        smooth = np.interp(c, distinct, isotonic_regression(shares, weights=counts, increasing=rising).x)
        means = [float(smooth[part].mean()) for part in parts]
        chosen = [means[i] for i in first] if len(first) == len(knots) else [means[0]] * len(knots)
        return [round(min(max(value, 0.0), 1.0), DIGITS) for value in chosen]

    return AcceptanceCurve(
        confidence=knots.tolist(),
        accepted=at_knots(c, hit, rising=True),
        following=at_knots(c[going], following[going], rising=True),
        candidates=[at_knots(c, (rank == r).astype(float), rising=False) for r in range(1, candidates)],
    )


def drafted(trace: Trace) -> Iterator[Drafted]:
    """Yield the drafted tokens, from every start of `trace`, that follow no wrong token."""
    for start, (confidences, run, rank) in enumerate(zip(trace.confidences, trace.runs, trace.ranks, strict=True)):
        within = min(len(confidences), trace.tokens - start)
        for i in range(min(run + 1, within)):
            after = int(i + 1 < run) if i + 1 < within else -1
            yield Drafted(confidences[i], i < run, rank if i == run else 0, after, i + 1)


FEWEST = 60  # the fewest drafted tokens for a fit; a tenth of this is the fewest wrong, and right, tokens
BETTER = 0.98  # both features are used if their log loss is below this share of the best single feature's
LARGEST = 30.0  # bound on a feature's absolute value
GAP = Confidence(probability=0.0, gap=1.0)  # g / (1 + g) for a gap g


def fit_confidence(replay: Replay, path: DraftPath, *, draft: int, share: float) -> Confidence:
    """Fit the confidence to drafts of `draft` tokens along a path, from a `share` of the replay's starts.

    Returns `PROBABILITY` (the token's probability is its confidence) if there are too few drafted tokens. Sets
    `replay.confidence` to `PROBABILITY`.
    """
    controller = FixedK(min(draft, replay.depth))
    traces: dict[Confidence, list[Trace]] = {}
    for confidence in (PROBABILITY, GAP):
        replay.confidence = confidence
        traces[confidence] = replay.trace(path, [controller], share=share)
    replay.confidence = PROBABILITY
    return choose_confidence(*features(traces[PROBABILITY], traces[GAP]))


def features(by_probability: Sequence[Trace], by_gap: Sequence[Trace]) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return the log-odds, the log gap and the correctness of every drafted token that follows no wrong token.

    Both arguments are traces of the same drafts: one has probabilities as confidences, the other the confidence `GAP`.
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
    """Return the confidence with the least log loss, by one feature or, if clearly better, both features.

    `odds`: log-odds of the token's probability. `gap`: log of the gap between the two best logits. `right`: whether the
    token is right. If hardly any token is wrong or hardly any is right, or if no feature helps, the confidence is the
    share of right tokens, the same for every token. With fewer than `FEWEST` tokens it is the token's probability.
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
    """Fit a logistic regression of `right` on `columns`; return its mean log loss, and (bias, *weights)."""
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

    x = np.stack(columns, axis=1)
    model = LogisticRegression(C=1e3, max_iter=1000).fit(x, right)
    weights = (float(model.intercept_[0]), *map(float, model.coef_[0]))
    return log_loss(weights[0] + x @ np.array(weights[1:]), right), weights


def log_loss(odds: Floats, right: NDArray[np.bool_]) -> float:
    """Return the mean log loss: -log of the probability that the log-odds `odds` give to the outcomes `right`."""
    return float(np.mean(np.logaddexp(0, np.where(right, -odds, odds)))) if len(odds) else math.nan
