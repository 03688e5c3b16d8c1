"""Token frequencies, for draft vocabularies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

MULTIPLE = 16  # quantised heads are fastest with a multiple of this many tokens


def frequent(texts: Iterable[Iterable[int]], most: int, vocabulary: int) -> list[int]:
    """Return the most frequent tokens in `texts` (token ids), at most `most` of all `vocabulary`, in ascending order.

    From 16 tokens on, the count is rounded down to a multiple of 16. Among equally frequent tokens, unseen ones
    included, the lowest ids win: a tokenizer's early merges were the most frequent in its training text.
    """
    count = min(most, vocabulary)
    count -= count % MULTIPLE if count >= MULTIPLE else 0
    counts = Counter(chain.from_iterable(texts))
    return sorted(sorted(range(vocabulary), key=lambda token: -counts[token])[:count])
