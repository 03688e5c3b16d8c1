"""Fit the acceptance curve of a trace: the acceptance rate of drafted tokens by their confidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from selfspec.types.acceptance import AcceptanceCurve

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
