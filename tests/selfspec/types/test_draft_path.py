from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.basics.errors import SelfspecError
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.types.acceptance import Confidence
from selfspec.types.draft_path import FULL, MODES, SIGNS, DraftPath, SkipSet, as_path

modes = st.lists(st.sampled_from(MODES), max_size=24).filter(lambda chosen: len(chosen) % 2 == 0)
vocabularies = st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=5, unique=True).map(tuple)
paths = st.builds(
    lambda chosen, head, words: (DraftPath.from_modes(chosen, head=head, vocabulary=words), chosen),
    modes,
    st.sampled_from(MODES[:-1]),
    vocabularies,
)


@given(paths)
def test_modes_and_back(made):
    path, chosen = made
    layers = len(chosen) // 2
    assert path.modes(layers) == tuple(chosen)
    assert DraftPath.from_modes(path.modes(layers), head=path.head, vocabulary=path.vocabulary) == path
    assert path.low_precision == ("int8" in chosen or "int4" in chosen or path.head != "full")
    assert path.cheaper == (path.low_precision or "skip" in chosen)
    assert "".join(path.rows(layers)) == "".join(SIGNS[mode] for mode in chosen)


@given(paths, st.none() | st.just(Confidence(gap=1.5)))
def test_a_profile_says_it_and_gives_it_back(made, confidence):
    path, _ = made
    spec = LayerSkipSpec.from_path(path, confidence=confidence)
    again = LayerSkipSpec.model_validate_json(spec.model_dump_json(exclude_none=True))
    assert again == spec
    assert (again.path, again.confidence, again.drafts) == (path, confidence, path.cheaper)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (FULL, "everything in full"),
        (DraftPath.skipping((1,)), "1 sub-layer skipped"),
        (DraftPath(SkipSet((1,)), int8=SkipSet((0, 2)), int4=SkipSet((), (1,)), head="int4"),
         "2 sub-layers in int8, 1 in int4, 1 skipped, the head in int4"),
        (DraftPath(head="int8"), "the head in int8"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_said(path, said):
    assert path.summary == said


def test_what_is_no_path():
    for first, second in (("skip", "int8"), ("skip", "int4"), ("int8", "int4")):
        with pytest.raises(SelfspecError, match=f"attention of layer 2 is both {first} and {second}"):
            DraftPath(**{first: SkipSet((1, 2)), second: SkipSet((2,))})
        with pytest.raises(SelfspecError, match=f"mlp of layer 0 is both {first} and {second}"):
            _ = LayerSkipSpec.model_validate({first: {"mlp": [0]}, second: {"mlp": [0]}}).path
    with pytest.raises(SelfspecError, match="head 'skip': expected full, int8, int4"):
        DraftPath(head="skip")
    with pytest.raises(SelfspecError, match=r"int4\.mlp: layer 3 does not exist"):
        DraftPath(int4=SkipSet((), (3,))).check(3)
    with pytest.raises(SelfspecError, match=r"int8\.attention"):
        _ = LayerSkipSpec.model_validate({"int8": {"attention": [1, 1]}}).path


def test_a_skip_set_is_a_path_too():
    assert as_path(SkipSet((1,), (2,))) == DraftPath.skipping((1,), (2,))
    assert as_path(FULL) is FULL


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
