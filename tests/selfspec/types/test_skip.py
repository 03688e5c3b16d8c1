from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.basics.errors import SelfspecError
from selfspec.types.skip import SkipSet


@given(st.lists(st.booleans(), max_size=80).filter(lambda bits: len(bits) % 2 == 0))
def test_bits_and_back(bits):
    skip = SkipSet.from_bits(bits)
    assert skip.bits(len(bits) // 2) == tuple(bits)
    assert len(skip) == sum(bits)


def test_indices_are_sorted_and_equal_sets_are_equal():
    assert SkipSet((3, 1), (2, 0)) == SkipSet((1, 3), (0, 2))
    assert hash(SkipSet((3, 1))) == hash(SkipSet((1, 3)))


@pytest.mark.parametrize("indices", [(-1,), (1, 1), (1.5,), (True,), ("2",)])
def test_bad_indices_are_refused(indices):
    with pytest.raises(SelfspecError, match=r"skip\.mlp"):
        SkipSet((), indices)


def test_numpy_indices_are_indices():
    assert SkipSet(np.array([2, 1])) == SkipSet((1, 2))
    with pytest.raises(SelfspecError, match="'x' is no layer index"):
        SkipSet("x")


def test_an_index_beyond_the_model_is_refused_with_what_there_is():
    with pytest.raises(SelfspecError, match="layer 4 does not exist; the model has 4 layers, so 0 to 3"):
        SkipSet((4,)).check(4)
    with pytest.raises(SelfspecError, match="two bits a layer"):
        SkipSet.from_bits([True])


def test_rows_draw_the_map():
    assert SkipSet((1,), (0, 2)).rows(3) == ("#.#", ".#.")
