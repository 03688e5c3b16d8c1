"""Draft heads over a part of the vocabulary, for models whose head takes a large share of a draft step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from selfspec.text.token_counts import frequent

from .objective import Replayed, Score

SHARES = (4, 16)  # parts of the vocabulary: its most frequent quarter, and sixteenth
WORTH_TRYING = 0.1  # the share of a draft step that the head must take


def with_smaller_head(worth: Replayed, score: Score, *, texts: Iterable[Sequence[int]], size: int) -> Score | None:
    """`score` again under a draft vocabulary, where one is predicted to be faster than with the whole of `size`.

    `texts` are the token ids whose frequencies count: none that are scored, in whose own vocabulary nothing would be
    missing. They are not read where the head is a small part of what the draft steps cost.
    """
    if not worth.head_takes(WORTH_TRYING, score.path):
        return None
    counted = list(texts)
    tried = sorted({tuple(frequent(counted, size // share, size)) for share in SHARES} - {()})
    found = worth.score_with(score.path, tried)
    return found if found is not None and found.tokens_per_second > score.tokens_per_second else None
