from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selfspec.search.space import Space, parse_keep

from selfspec.basics.errors import SelfspecError
from selfspec.facts.skip import SkipSet


@given(st.integers(1, 8), st.sampled_from(["sublayer", "layer"]), st.data())
def test_points_and_skip_sets_are_the_same_thing(layers, granularity, data):
    keep = data.draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))
    space = Space(layers, tuple(keep), granularity)
    bits = tuple(data.draw(st.lists(st.booleans(), min_size=len(space), max_size=len(space))))
    skip = space.skip(bits)
    assert space.bits(skip) == bits
    assert not keep & {*skip.attention, *skip.mlp}
    assert len(space) == (layers - len(keep)) * (2 if granularity == "sublayer" else 1)


def test_the_nearest_point_skips_no_more_than_asked():
    space = Space(4, keep=(0,), granularity="layer")
    assert space.nearest(SkipSet((0, 1, 2), (0, 2, 3))) == SkipSet((2,), (2,))


def test_variables_are_in_the_order_they_are_run():
    assert Space(3, keep=(1,)).variables == (SkipSet((0,)), SkipSet((), (0,)), SkipSet((2,)), SkipSet((), (2,)))


def test_keep():
    assert parse_keep("") == ()
    assert parse_keep(" 15,0 , 0") == (0, 15)
    for wrong in ("a", "1;2", "-1", "1.5", "9999999"):
        with pytest.raises(SelfspecError, match="want layer numbers such as 0,15"):
            parse_keep(wrong)


@pytest.mark.parametrize(
    ("keep", "message"),
    [((4,), "layer 4 does not exist; the model has 4 layers"), ((0, 1, 2, 3), "every layer is kept")],
)
def test_impossible_spaces_are_refused(keep, message):
    with pytest.raises(SelfspecError, match=message):
        Space(4, keep)
