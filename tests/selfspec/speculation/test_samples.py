"""Two thousand short samples of a two-layer model, drafted and plain: one distribution, and a wrong one is seen."""

from __future__ import annotations

import pytest
from agreement import draw, no_residual, p_values, smallest
from models import small
from toys import RandomTree

from selfspec.controllers import StaticThreshold
from selfspec.drafters import LayerSkipDrafter, PlainDrafter
from selfspec.models.low_precision import fake
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.acceptance import Confidence
from selfspec.types.draft_path import DraftPath, SkipSet

pytestmark = pytest.mark.long("statistics of what enumeration proves")

PROMPT, LENGTH, N = [3, 1, 4], 4, 1400
SAMPLING = {"temperature": 0.9, "top_k": 9}


@pytest.fixture(scope="module")
def runtime():
    return LeanRuntime(small(11, 2, seed=2), kernel=fake)


@pytest.fixture(scope="module")
def plain(runtime):
    return draw(runtime, PlainDrafter(), PROMPT, LENGTH, range(N), **SAMPLING)


DRAFTERS = {
    "layer skip": lambda runtime: LayerSkipDrafter(runtime, SkipSet((1,), (0,)), StaticThreshold(0.3, 3)),
    "candidates": lambda runtime: LayerSkipDrafter(runtime, SkipSet((1,), (0,)), StaticThreshold(0.3, 2), candidates=3),
    "few bits": lambda runtime: LayerSkipDrafter(
        runtime,
        DraftPath(SkipSet((1,)), int8=SkipSet((0,), (0, 1)), head="int8"),
        StaticThreshold(0.4, 3),
        confidence=Confidence(gap=1.0),
    ),
    "random tree": lambda runtime: RandomTree(11, (2, 1, 1)),
}


@pytest.mark.parametrize("rule", ["token", pytest.param("block", marks=pytest.mark.proof)])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafted_samples_are_plain_ones(runtime, plain, name, rule):
    drafted = draw(runtime, DRAFTERS[name](runtime), PROMPT, LENGTH, range(N, 2 * N), rule=rule, **SAMPLING)
    assert smallest(p_values(plain, drafted)) > 1e-3


def test_two_halves_of_plain_samples_agree(plain):
    assert smallest(p_values(plain[: N // 2], plain[N // 2 :])) > 1e-3


def test_a_wrong_rule_is_seen(runtime, plain):
    drafter = DRAFTERS["random tree"](runtime)
    drafted = draw(runtime, drafter, PROMPT, LENGTH, range(N, 2 * N), rule=no_residual, **SAMPLING)
    assert smallest(p_values(plain, drafted)) < 1e-6
