from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from selfspec.types.acceptance import PROBABILITY, Confidence

chances = st.floats(0, 1)
gaps = st.one_of(st.floats(0, allow_nan=False), st.just(math.inf))
ordinary = st.builds(Confidence, bias=st.floats(-20, 20), probability=st.floats(0, 5), gap=st.floats(0, 5))
any_weight = st.floats(allow_nan=False, allow_infinity=False)
any_positive = st.floats(0, allow_nan=False, allow_infinity=False)
extreme = st.builds(Confidence, bias=any_weight, probability=any_positive, gap=any_positive)


@given(chances, gaps)
def test_left_out_it_is_the_probability_itself(p, gap):
    assert Confidence() == PROBABILITY
    assert PROBABILITY.estimate(p, gap) == p
    assert PROBABILITY.plain
    assert PROBABILITY.inputs == "probability"


@given(st.one_of(ordinary, extreme), chances, gaps)
def test_it_is_a_chance(confidence, p, gap):
    assert 0 <= confidence.estimate(p, gap) <= 1


@given(ordinary, chances, chances, gaps, gaps)
def test_it_never_falls_with_either(confidence, p, other_p, gap, other_gap):
    low, high = sorted((p, other_p)), sorted((gap, other_gap))
    assert confidence.estimate(low[0], high[0]) <= confidence.estimate(low[1], high[1]) + 1e-12


@given(st.floats(0.001, 0.999), st.floats(0.01, 50))
def test_the_formula(p, gap):
    x = 0.3 + 0.5 * math.log(p / (1 - p)) + 1.5 * math.log(gap)
    assert Confidence(bias=0.3, probability=0.5, gap=1.5).estimate(p, gap) == pytest.approx(1 / (1 + math.exp(-x)))
    assert Confidence(bias=1e-12).estimate(p, gap) == pytest.approx(
        p
    )  # the formula with the same weights is the identity


def test_what_it_reads():
    assert Confidence(gap=1).inputs == "both"
    assert Confidence(probability=0, gap=1).inputs == "gap"
    assert Confidence(bias=1).inputs == "probability"
    assert Confidence(bias=1, probability=0).inputs == "nothing"
    assert not Confidence(bias=1).plain
    assert Confidence(probability=0, gap=1).estimate(math.nan, 2.0) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "wrong", [{"gap": -1}, {"probability": -0.1}, {"bias": math.nan}, {"gap": math.inf}, {"other": 1}], ids=str
)
def test_what_is_refused(wrong):
    with pytest.raises(ValidationError):
        Confidence(**wrong)
