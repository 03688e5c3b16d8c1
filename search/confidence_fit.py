"""What says best how likely a drafted token is right: its probability, the gap of the two best logits, or both.

Chosen by how well each foretells it on a trace: by log loss, of a logistic regression.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from selfspec.controllers import FixedK
from selfspec.types.confidence import CLOSEST, PROBABILITY, SUREST, Confidence
from selfspec.types.draft_path import DraftPath

from .acceptance_fit import drafted
from .replay import Replay
from .trace import Trace

FEWEST = 60  # drafted tokens, less than which tell nothing; a tenth as many wrong ones tell which are wrong
BETTER = 0.98  # of the log loss of fewer features, at the most, for more of them to be read
LARGEST = 30.0  # of a feature
GAP = Confidence(probability=0.0, gap=1.0)  # g / (1 + g), of a gap g
DIGITS = 4

Floats = NDArray[np.float64]


def fit_confidence(replay: Replay, path: DraftPath, *, draft: int, share: float) -> Confidence:
    """The best, of drafts of `draft` tokens along a path from a `share` of the replay's starts.

    The replay tells the probability afterwards. Where there are too few tokens to tell, it is the probability itself.
    """
    controller = FixedK(min(draft, replay.depth))
    traces: dict[Confidence, list[Trace]] = {}
    for told in (PROBABILITY, GAP):
        replay.confidence = told
        traces[told] = replay.trace(path, [controller], share=share)
    replay.confidence = PROBABILITY
    return chosen(*features(traces[PROBABILITY], traces[GAP]))


def features(by_probability: Sequence[Trace], by_gap: Sequence[Trace]) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Of all drafted tokens whose draft was right up to them: log-odds, log gap, and whether they were right.

    The traces are of the same drafts, one telling probabilities, the other what `GAP` does.
    """
    p, right = _of(by_probability)
    told, _ = _of(by_gap)
    p, told = np.clip(p, SUREST, 1 - SUREST), np.clip(told, CLOSEST, 1 - SUREST)
    gap = np.log(np.maximum(told / (1 - told), CLOSEST))
    return np.log(p / (1 - p)).clip(-LARGEST, LARGEST), gap.clip(-LARGEST, LARGEST), right


def _of(traces: Sequence[Trace]) -> tuple[Floats, NDArray[np.bool_]]:
    seen = [token for trace in traces for token in drafted(trace)]
    return np.array([t.confidence for t in seen], dtype=float), np.array([t.accepted for t in seen], dtype=bool)


def chosen(odds: Floats, gap: Floats, right: NDArray[np.bool_]) -> Confidence:
    """The confidence with the least log loss; of more features only where they bring clearly more.

    It is the share of all tokens that are right where hardly any is wrong, or no feature tells which.
    """
    if len(right) < FEWEST:
        return PROBABILITY
    share = (right.sum() + 0.5) / (len(right) + 1)
    always = Confidence(bias=round(math.log(share / (1 - share)), DIGITS), probability=0.0)
    if not FEWEST / 10 <= (~right).sum() <= len(right) - FEWEST / 10:
        return always
    tried = [((odds,), (1, 0)), ((gap,), (0, 1)), ((odds, gap), (1, 1))]
    found = [(_fitted(columns, right), reads) for columns, reads in tried]
    singles = [((loss, weights), reads) for (loss, weights), reads in found[:2] if weights[1] > 0]
    if not singles:
        return always
    best = min(singles, key=lambda one: one[0][0])
    (loss, weights), _ = found[2]
    if min(weights[1:]) > 0 and loss < BETTER * best[0][0]:
        best = found[2]
    (_, (bias, *each)), reads = best
    values = iter(each)
    probability, apart = (next(values) if read else 0.0 for read in reads)
    return Confidence(bias=round(bias, DIGITS), probability=round(probability, DIGITS), gap=round(apart, DIGITS))


def _fitted(columns: Sequence[Floats], right: NDArray[np.bool_]) -> tuple[float, tuple[float, ...]]:
    """The mean log loss of a logistic regression on the columns, and its bias and weights."""
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

    x = np.stack(columns, axis=1)
    model = LogisticRegression(C=1e3, max_iter=1000).fit(x, right)
    weights = (float(model.intercept_[0]), *map(float, model.coef_[0]))
    return log_loss(weights[0] + x @ np.array(weights[1:]), right), weights


def log_loss(odds: Floats, right: NDArray[np.bool_]) -> float:
    """The mean of -log of the chance that log-odds give to what was."""
    return float(np.mean(np.logaddexp(0, np.where(right, -odds, odds)))) if len(odds) else math.nan
