"""Draft heads over a part of the vocabulary, for models whose head takes a large share of a draft step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from selfspec.text.token_counts import frequent

from .objective import ReplayObjective, Score

SHARES = (4, 16)  # divisors of the vocabulary: its most frequent quarter, and sixteenth
WORTH_TRYING = 0.1  # the least share of a draft step in the head


def with_smaller_head(
    objective: ReplayObjective, score: Score, *, texts: Iterable[Sequence[int]], size: int
) -> Score | None:
    """Score the path of `score` with smaller draft vocabularies; return the best if faster than `score`, else None.

    `size`: the vocabulary size. `texts`: the token ids whose frequencies count. They must not be the scored texts,
    whose tokens would all be in the draft vocabulary. They are not read where the head is a small part of a draft step.
    """
    if not objective.head_share_reaches(WORTH_TRYING, score.path):
        return None
    counted = list(texts)
    tried = sorted({tuple(frequent(counted, size // share, size)) for share in SHARES} - {()})
    best = objective.score_with(score.path, tried)
    return best if best is not None and best.tokens_per_second > score.tokens_per_second else None
