from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selfspec.search.space import Space, parse_keep, parse_modes

from selfspec.basics.errors import SelfspecError
from selfspec.types.draft_path import MODES, DraftPath, SkipSet


@given(st.integers(1, 8), st.sampled_from(["sublayer", "layer"]), st.sets(st.sampled_from(MODES[1:])), st.data())
def test_points_and_paths_are_the_same_thing(layers, granularity, modes, data):
    keep = data.draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))
    head = data.draw(st.sampled_from([("full",), ("full", "int8")]))
    modes = tuple(mode for mode in MODES if mode in {"full", "skip", *modes})
    space = Space(layers, tuple(keep), granularity, modes, head=head)
    point = tuple(data.draw(st.integers(0, len(of) - 1)) for of in space.choices)
    path = space.path(point)
    assert space.point(path) == point
    assert space.nearest(path) == path
    assert not keep & {*path.skip.attention, *path.skip.mlp}
    variables = layers - (len(keep) if modes == ("full", "skip") else 0)
    assert len(space) == variables * (2 if granularity == "sublayer" else 1) + len(head) - 1
    assert len(space.names) == len(space) == len(set(space.names))


def test_the_nearest_point_skips_no_more_than_asked():
    space = Space(4, keep=(0,), granularity="layer")
    assert space.nearest(SkipSet((0, 1, 2), (0, 2, 3))) == DraftPath.skipping((2,), (2,))


def test_everything_starts_in_few_bits_where_it_can():
    space = Space(2, keep=(1,), modes=MODES, fixed=SkipSet((), (1,)), head=("full", "int8"))
    assert space.base == "int8"
    assert space.names == ("attention 0", "mlp 0", "attention 1", "head")  # MLP 1 has no choice
    assert space.choices[2] == ("full", "int8", "int4"), "a layer that is kept is never skipped"
    assert space.path(space.start) == DraftPath(int8=SkipSet((0, 1), (0,)), head="int8")
    assert space.path(space.all_in("int4")).rows(2) == ("44", "4#")
    assert space.path(space.all_in("skip")).rows(2) == (".8", ".#")
    assert space.choose([0], rest=space.start).rows(2) == (".8", "8#")
    assert space.choose([2], rest=space.start).rows(2) == ("88", "8#"), "what it may not be it is not"


@pytest.mark.parametrize(
    ("text", "modes"),
    [("skip,full", ("full", "skip")), ("int8", ("full", "int8")), ("skip , int4", ("full", "int4", "skip"))],
)
def test_modes(text, modes):
    assert parse_modes(text) == modes


@pytest.mark.parametrize(
    ("text", "message"), [("fp8", "'fp8' is not known; known: full, int8"), ("full", "expected at least one mode")]
)
def test_wrong_modes_are_refused(text, message):
    with pytest.raises(SelfspecError, match=message):
        parse_modes(text)


def test_variables_are_in_the_order_they_are_run():
    assert Space(3, keep=(1,)).variables == (SkipSet((0,)), SkipSet((), (0,)), SkipSet((2,)), SkipSet((), (2,)))


def test_keep():
    assert parse_keep("") == ()
    assert parse_keep(" 15,0 , 0") == (0, 15)
    for wrong in ("a", "1;2", "-1", "1.5", "9999999"):
        with pytest.raises(SelfspecError, match="expected layer numbers such as 0,15"):
            parse_keep(wrong)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep": (4,)}, "layer 4 does not exist; the model has 4 layers"),
        ({"keep": (0, 1, 2, 3)}, "keep: every layer is kept"),
        ({"modes": ("full",)}, "modes: every sub-layer can only run in full here; expected skip among the modes"),
        ({"keep": (0, 1, 2, 3), "modes": ("full",)}, "modes: every sub-layer can only run in full here"),
    ],
)
def test_impossible_spaces_are_refused(given, message):
    with pytest.raises(SelfspecError, match=message):
        Space(4, **given)


def test_uniform_paths():
    space = Space(2, modes=MODES, fixed=SkipSet((), (1,)), head=("full", "int8"))
    assert [path.rows(2) for path in space.uniform] == [("88", "8#"), ("44", "4#")]
    assert {path.head for path in space.uniform} == {"int8"}
    assert Space(2).uniform == ()


def test_the_head_is_in_int8_also_beside_int4():
    space = Space(2, modes=("full", "int4", "skip"), head=("full", "int8", "int4"))
    assert [(path.rows(2), path.head) for path in space.uniform] == [(("44", "44"), "int8")]
    assert space.path(space.start).head == "int8"
    assert space.path(space.all_in("full")).head == "full"
