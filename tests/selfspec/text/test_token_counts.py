"""Which tokens come most often."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from selfspec.text.token_counts import MULTIPLE, frequent

TEXTS = [[5, 5, 5, 2, 2, 9], [9, 9, 7]]


def test_the_most_frequent_tokens():
    assert frequent(TEXTS, 1, 12) == [5]
    assert frequent(TEXTS, 2, 12) == [5, 9]
    assert frequent(TEXTS, 4, 12) == [2, 5, 7, 9]


def test_what_texts_do_not_hold_is_taken_from_the_lowest():
    assert frequent(TEXTS, 6, 12) == [0, 1, 2, 5, 7, 9]
    assert frequent([], 3, 12) == [0, 1, 2]


def test_as_many_as_products_in_few_bits_like_but_no_more_than_there_are():
    assert len(frequent(TEXTS, 3 * MULTIPLE + 5, 1000)) == 3 * MULTIPLE
    assert frequent(TEXTS, 99, 12) == list(range(12))


@given(st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=5), st.integers(1, 60), st.randoms())
def test_no_token_left_out_comes_more_often(texts: list[list[int]], most: int, draw: random.Random):
    taken = frequent(texts, most, 41)
    assert taken == sorted({*taken})
    flat = [token for text in texts for token in text]
    left = {*range(41)} - {*taken}
    assert not left or min(flat.count(token) for token in taken) >= max(flat.count(token) for token in left)
    draw.shuffle(flat)
    assert frequent([flat], most, 41) == taken
