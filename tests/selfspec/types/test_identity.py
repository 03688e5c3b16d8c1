"""Bits per weight that a draft step reads: by hand, and what must hold for any path."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.basics.errors import SelfspecError
from selfspec.types.draft_path import FULL, MODES, DraftPath, SkipSet
from selfspec.types.identity import Identity, bits_per_weight, bits_read, extra_share

# An attention of 2 * 8 * (8 + 4) = 192 weights, an MLP of 3 * 8 * 16 = 384, a head of 10 * 8 = 80.
MODEL = Identity(layers=2, hidden=8, heads=4, kv_heads=2, intermediate=16, vocabulary=10)
WEIGHTS = 2 * (192 + 384) + 80


@pytest.mark.parametrize(
    ("path", "bits"),
    [
        (FULL, 32 * WEIGHTS),
        (DraftPath.skipping((0,)), 32 * (WEIGHTS - 192)),
        (DraftPath.skipping((0, 1), (0, 1)), 32 * 80),
        (DraftPath(int8=SkipSet((), (1,))), 32 * (WEIGHTS - 384) + 8 * 384),
        (DraftPath(int4=SkipSet((0,), (1,))), 32 * (WEIGHTS - 576) + 4.5 * 576),
        (DraftPath(head="int8"), 32 * (WEIGHTS - 80) + 8 * 80),
        (DraftPath(head="int4", vocabulary=(1, 2, 5)), 32 * (WEIGHTS - 80) + 4.5 * 0.3 * 80),
    ],
)
def test_by_hand(path, bits):
    assert bits_per_weight(path, MODEL) == pytest.approx(bits / WEIGHTS)


@pytest.mark.parametrize(
    ("path", "dtype", "bits"),
    [
        (FULL, None, 0),
        (DraftPath.skipping((0, 1), (0, 1)), None, 0),
        (DraftPath(int8=SkipSet((), (1,))), "float32", 8 * 384),
        (DraftPath(int4=SkipSet((0,), (1,)), head="int8"), "bfloat16", 4.5 * 576 + 8 * 80),
        (DraftPath(head="int4", vocabulary=(1, 2, 5)), None, 4.5 * 0.3 * 80),
        (DraftPath(vocabulary=(1, 2, 5)), "bfloat16", 16 * 0.3 * 80),
    ],
)
def test_what_is_held_beside_the_model_by_hand(path, dtype, bits):
    full = 16 if dtype == "bfloat16" else 32
    assert extra_share(path, MODEL, dtype=dtype) == pytest.approx(bits / WEIGHTS / full)
    assert extra_share(path, MODEL.model_copy(update={"heads": None}), dtype=dtype) is None


@given(
    st.lists(st.sampled_from(MODES), min_size=4, max_size=4),
    st.integers(0, 3),
    st.sampled_from(MODES[:-1]),
    st.sampled_from([16.0, 32.0]),
)
def test_a_cheaper_mode_reads_less(modes, where, head, full):
    path = DraftPath.from_modes(modes, head=head)
    bits = bits_per_weight(path, MODEL, full=full)
    assert 0 < bits <= full
    assert (bits == full) == (not path.cheaper)
    if modes[where] != "skip":
        modes[where] = MODES[MODES.index(modes[where]) + 1]
        assert bits_per_weight(DraftPath.from_modes(modes, head=head), MODEL, full=full) < bits


@pytest.mark.parametrize("size", ["hidden", "heads", "kv_heads", "intermediate", "vocabulary"])
def test_a_size_that_is_not_known(size):
    model = MODEL.model_copy(update={size: None})
    assert bits_per_weight(FULL, model) is None
    assert bits_read(FULL, model) is None


def test_a_layer_that_is_not_there():
    with pytest.raises(SelfspecError, match="layer 2 does not exist"):
        bits_per_weight(DraftPath.skipping((2,)), MODEL)


@pytest.mark.parametrize(
    ("dtype", "full"), [(None, 32), ("float32", 32), ("bfloat16", 16), ("float16", 16), ("float64", 64), ("other", 32)]
)
def test_in_a_dtype(dtype, full):
    assert bits_read(FULL, MODEL, dtype=dtype).plain == full
    assert bits_read(FULL, MODEL, dtype=dtype).draft == pytest.approx(full)


def test_in_words():
    said = bits_read(DraftPath.skipping((0, 1), (0, 1)), MODEL, dtype="bfloat16").summary
    assert said == "a draft step reads 1.04 bits per weight, a plain step 16"
