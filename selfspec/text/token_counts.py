"""Which tokens come most often. Knows nothing of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

MULTIPLE = 16  # what a head in few bits is best over


def frequent(texts: Iterable[Iterable[int]], most: int, vocabulary: int) -> list[int]:
    """The tokens that come most often in `texts` (token ids), `most` of all `vocabulary` at most, in ascending order.

    By 16, where there are as many. Of tokens that come as often, and of those that do not come at all, the lowest: what
    a tokenizer merged first came most often where it was made.
    """
    count = min(most, vocabulary)
    count -= count % MULTIPLE if count >= MULTIPLE else 0
    counts = Counter(chain.from_iterable(texts))
    return sorted(sorted(range(vocabulary), key=lambda token: -counts[token])[:count])
