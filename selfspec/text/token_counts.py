"""Token frequencies, for draft vocabularies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

MULTIPLE = 16  # quantised heads are fastest with a multiple of this many tokens


def frequent(texts: Iterable[Iterable[int]], most: int, vocabulary: int) -> list[int]:
    """Return the `most` most frequent token ids in `texts` (token ids), in ascending order of id.

    `vocabulary`: the number of token ids of the model. A number of 16 or more is rounded down to a multiple of 16.
    Among equally frequent tokens, such as unseen tokens, the lowest ids are chosen: a tokenizer's early merges were the
    most frequent in its training text.
    """
    count = min(most, vocabulary)
    count -= count % MULTIPLE if count >= MULTIPLE else 0
    counts = Counter(chain.from_iterable(texts))
    return sorted(sorted(range(vocabulary), key=lambda token: -counts[token])[:count])
