from __future__ import annotations

import pytest
from models import plain, run, small
from selfspec.search.objective import Replayed, controllers_in_play, predict
from selfspec.search.replay import Replay, deepest
from selfspec.search.texts import Text

from selfspec.controllers import FixedK, StaticThreshold
from selfspec.costs import CostModel
from selfspec.drafters import LayerSkipDrafter
from selfspec.runtime import Runtime
from selfspec.skip import SkipSet

COSTS = CostModel(
    context=9, base=0.1, attention=0.1, mlp=0.1, widths=[1, 8], verify=[1.0, 1.7], round=0.05, prefill=0.01
)
PROMPTS = [[1, 2, 3], [4, 5], [7], [3, 3, 9, 1, 0, 2]]


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def texts(model):
    runtime = Runtime(model)
    return [Text((*p, *plain(runtime, p, 16)), len(p), 16) for p in PROMPTS]


def test_a_prediction_is_the_price_of_real_rounds(model, texts):
    skip, controller = SkipSet((1,), (2,)), FixedK(3)
    with Replay(model, texts, depth=3) as replay:
        predicted = predict(replay, COSTS, skip, controller)
    drafter = LayerSkipDrafter(Runtime(model), skip, controller)
    seconds = prefill = 0.01 * sum(map(len, PROMPTS))
    tokens = 0
    for prompt in PROMPTS:
        new, outcomes = run(drafter.runtime, drafter, prompt, 16)
        tokens += len(new)
        for o in outcomes:
            seconds += 0.05 + o.draft.depth * (0.1 + 2 * 0.1 + 2 * 0.1) + 1 + 0.1 * o.draft.depth
    assert predicted.speedup == pytest.approx((prefill + tokens * 1.05) / seconds, abs=1e-3)
    assert predicted.tokens_per_second == pytest.approx(tokens / seconds, abs=0.1)
    assert predicted.draft_cost == pytest.approx(0.5 / 1.05, abs=1e-3)


def test_nothing_skipped_is_always_accepted(model, texts):
    with Replay(model, texts, depth=2) as replay:
        score = Replayed(replay, COSTS, [FixedK(2)]).score(SkipSet())
    assert score.acceptance_rate == 1
    assert score.tokens_per_round > 2.5


def test_the_best_controller_is_the_best_of_each_alone(model, texts):
    controllers = [FixedK(1), FixedK(3), StaticThreshold(0.5, 4), StaticThreshold(0.9, 4)]
    with Replay(model, texts, depth=4) as replay:
        for skip in (SkipSet((0,), (1,)), SkipSet((), (2,))):
            alone = [Replayed(replay, COSTS, [c]).score(skip) for c in controllers]
            together = Replayed(replay, COSTS, controllers).score(skip)
            assert together == max(alone, key=lambda s: s.tokens_per_second)


def test_only_what_is_clearly_worse_is_pruned(model, texts):
    """Pruned or not, sets are ranked as without pruning, and the best is never pruned."""
    skips = [SkipSet(), SkipSet((2,), ()), SkipSet((0, 1, 2), (0, 1, 2)), SkipSet((1,), (1,)), SkipSet((), (2,))]
    with Replay(model, texts, depth=3) as replay:
        alone = [Replayed(replay, COSTS, [FixedK(3)]).score(skip) for skip in skips]
        worth = Replayed(replay, COSTS, [FixedK(3)])
        found = [worth.score(skip) for skip in skips]
    assert not any(s.pruned for s in alone)
    assert any(s.pruned for s in found)
    best = max(alone, key=lambda s: s.tokens_per_second)
    assert best in found
    assert all(s.tokens_per_second < best.tokens_per_second for s in found if s.pruned)


def test_the_controllers_in_play():
    controllers = controllers_in_play(6)
    assert deepest(controllers) == 6
    assert len({str(c.spec()) for c in controllers}) == len(controllers)
    assert {c.spec().name for c in controllers} == {"fixed", "static", "adaptive"}
