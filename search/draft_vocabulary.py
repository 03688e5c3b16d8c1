"""Draft vocabularies smaller than the model's, for models whose LM head takes a large share of a draft step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from selfspec.text.token_counts import frequent

from .objective import ReplayObjective, Score

SHARES = (4, 16)  # the most frequent quarter and sixteenth of the vocabulary are tried
WORTH_TRYING = 0.1  # the head's least share of a draft step for which smaller vocabularies are tried


def with_smaller_head(
    objective: ReplayObjective, score: Score, *, texts: Iterable[Sequence[int]], size: int
) -> Score | None:
    """Score the path of `score` with smaller draft vocabularies; return the best score if faster than `score`.

    Returns None if no score is faster, and also, without reading `texts`, if the head takes less than `WORTH_TRYING` of
    a draft step. `size`: the size of the model's vocabulary. `texts`: token ids, whose most frequent tokens make the
    draft vocabularies. `texts` must differ from the texts that `objective` scores on: vocabularies counted on the
    scored texts could hold all tokens of these texts, so the score would be higher than on other texts.
    """
    if not objective.head_share_reaches(WORTH_TRYING, score.path):
        return None
    counted = list(texts)
    tried = sorted({tuple(frequent(counted, size // share, size)) for share in SHARES} - {()})
    best = objective.score_with(score.path, tried)
    return best if best is not None and best.tokens_per_second > score.tokens_per_second else None
