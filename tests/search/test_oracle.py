"""The oracle bound, against every way to stop."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from selfspec.search.continuations import DecodingSettings
from selfspec.search.oracle import oracle, oracle_bound
from selfspec.search.trace import Trace, walk

from selfspec import builtin
from selfspec.controllers import FixedK, parse_controller
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import SkipSet
from selfspec.types.draft_work import DRAFT_STEP

COSTS = CostModel(context=9, base=0.1, attention=0, mlp=0, widths=[1, 2, 8], verify=[1.0, 1.3, 1.7], round=0.05)
DRAFT = 0.4


def seconds(runs, lengths):
    """Decode with drafts of these lengths: seconds, or None where the lengths do not come out."""
    at, total = 0, 0.0
    for k in lengths:
        if at >= len(runs):
            return None
        total += 0.05 + k * DRAFT + COSTS.verification(k + 1)
        at += min(k, runs[at]) + 1
    return total if at >= len(runs) else None


def test_no_way_to_stop_is_faster():
    draw = random.Random(0)
    for _ in range(30):
        n = 5
        runs = [draw.randint(0, min(2, n - 1 - i)) for i in range(n)]
        trace = Trace(n, n, [[0.5] * min(2, n - 1 - i) for i in range(n)], runs, [0] * n, [False] * n)
        ways = (
            seconds(runs, lengths) for size in range(1, n + 1) for lengths in itertools.product(range(3), repeat=size)
        )
        best = min(way for way in ways if way is not None)
        assert oracle_bound([trace], COSTS, DRAFT).speedup == pytest.approx(n * COSTS.plain / best)


def test_a_draft_that_is_never_right_is_not_made():
    trace = Trace(4, 4, [[0.9] * 3, [0.9] * 2, [0.9], []], [0] * 4, [0] * 4, [False] * 4)
    bound = oracle_bound([trace], COSTS, DRAFT)
    assert (bound.speedup, bound.tokens_per_round) == (pytest.approx(1), 1)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_bounds_every_controller(whole, temperature):
    """On the same texts, at the same costs."""
    decoding = DecodingSettings(8, temperature)
    prompts = builtin.prompts("heldout")[:2]
    draft = LayerSkipSpec.from_path(SkipSet((5, 9), (4, 7)), parse_controller("fixed:k=4"), candidates=2)
    profile = Profile(model=whole.identity, draft=draft)
    bound = oracle(whole, profile, COSTS, prompts, decoding)
    assert bound.speedup >= 1
    assert 1 <= bound.tokens_per_round <= 8


def test_walking_is_never_faster_than_the_bound():
    draw = random.Random(1)
    runs = [draw.randint(0, min(4, 29 - i)) for i in range(30)]
    trace = Trace(30, 30, [[0.5] * min(4, 29 - i) for i in range(30)], runs, [0] * 30, [False] * 30)
    bound = oracle_bound([trace], COSTS, DRAFT).speedup
    for k in (1, 2, 3, 4):
        (done,) = walk([trace], FixedK(k))
        assert done.stats.tokens * COSTS.plain / COSTS.seconds(done.rounds, {DRAFT_STEP: DRAFT}) <= bound


def test_what_guesses_spare_raises_the_bound():
    """Two drafted tokens in one pass over two; a guess of two right tokens takes no time to draft."""
    alone = Trace(3, 3, [[0.5] * 2, [0.5], []], [2, 1, 0], [0] * 3, [False] * 3)
    plain, drafted = COSTS.plain, [0.05 + 2 * DRAFT + COSTS.verification(3), 3 * COSTS.plain]
    assert oracle_bound([alone], COSTS, DRAFT).speedup == pytest.approx(3 * plain / min(drafted))
    wide = COSTS.model_copy(update={"wider": [1.1]})
    spared = replace(alone, passes=[[(0, 2)], [(0, 1)], []], drafted=[[1, 2], [2], []])
    bound = oracle_bound([spared], wide, DRAFT).speedup
    assert bound == pytest.approx(3 * plain / (0.05 + 1.1 * DRAFT + COSTS.verification(3)))
    free = replace(alone, free=[([0.5] * 3, 2), ([], 0), ([], 0)])
    assert oracle_bound([free], COSTS, DRAFT).speedup == pytest.approx(3 * plain / (0.05 + COSTS.verification(3)))


def test_candidates_raise_the_bound_where_the_right_one_is_among_them():
    draw = random.Random(2)
    runs = [draw.randint(0, min(2, 29 - i)) for i in range(30)]
    ranks = [draw.randint(0, 3) if i + run < 29 else 0 for i, run in enumerate(runs)]
    trace = Trace(30, 30, [[0.5] * min(4, 29 - i) for i in range(30)], runs, ranks, [False] * 30)
    bounds = [oracle_bound([trace], COSTS, 0.1, candidates=n).speedup for n in (1, 2, 3, 4)]
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[-1]
    for n in (1, 2, 4):
        (done,) = walk([trace], FixedK(3), candidates=n)
        assert done.stats.tokens * COSTS.plain / COSTS.seconds(done.rounds, {DRAFT_STEP: 0.1}) <= bounds[n - 1]
