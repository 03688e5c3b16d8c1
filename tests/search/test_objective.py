from __future__ import annotations

import pytest
from models import plain, run, small
from selfspec.search.objective import ReplayObjective, predict
from selfspec.search.replay import Replay
from selfspec.search.replay_state import TargetText
from selfspec.search.trace import LONG_ENOUGH, LONGEST_DRAFT, controllers_in_play, deepest, long_enough

from selfspec.controllers import FixedK, RateOptimal, StaticThreshold
from selfspec.drafters import LayerSkipDrafter
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import SkipSet
from selfspec.types.identity import Identity

COSTS = CostModel(
    context=9, base=0.1, attention=0.1, mlp=0.1, widths=[1, 8], verify=[1.0, 1.7], round=0.05, prefill=0.01
)
PROMPTS = [[1, 2, 3], [4, 5], [7], [3, 3, 9, 1, 0, 2]]


def profile(skip, name, candidates=1, **options):
    draft = LayerSkipSpec.from_path(skip, ControllerSpec(name=name, options=options), candidates=candidates)
    return Profile(model=Identity(layers=3), draft=draft, costs=COSTS)


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def texts(model):
    runtime = LeanRuntime(model)
    return [TargetText((*p, *plain(runtime, p, 16)), len(p), 16) for p in PROMPTS]


def test_a_prediction_is_the_price_of_real_rounds(model, texts):
    skip, controller = SkipSet((1,), (2,)), FixedK(3)
    with Replay(model, texts, depth=3) as replay:
        predicted = predict(replay, profile(skip, "fixed", k=3))
    drafter = LayerSkipDrafter(LeanRuntime(model), skip, controller)
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
        score = ReplayObjective(replay, COSTS, [FixedK(2)]).score(SkipSet())
    assert score.acceptance_rate == 1
    assert score.tokens_per_round > 2.5


def test_the_best_controller_is_the_best_of_each_alone(model, texts):
    controllers = [FixedK(1), StaticThreshold(0.5, 4), RateOptimal(k_max=4, floor=0.1), FixedK(2)]
    with Replay(model, texts, depth=4) as replay:
        for skip in (SkipSet((0,), (1,)), SkipSet((), (2,))):
            alone = [ReplayObjective(replay, COSTS, [c]).score(skip) for c in controllers]
            together = ReplayObjective(replay, COSTS, controllers).score(skip)
            assert together == max(alone, key=lambda s: s.tokens_per_second)


@pytest.mark.parametrize(("share", "chosen"), [(0.98, "fixed"), (0.5, "rate")])
def test_a_controller_that_decides_by_costs_may_be_a_little_slower(model, texts, share, chosen, monkeypatch):
    monkeypatch.setattr("selfspec.search.objective.LEARNT", share)
    fixed, rate = FixedK(3), RateOptimal(k_max=1)
    with Replay(model, texts, depth=3) as replay:
        alone = [ReplayObjective(replay, COSTS, [c]).score(SkipSet()).tokens_per_second for c in (fixed, rate)]
        score = ReplayObjective(replay, COSTS, [fixed, rate]).score(SkipSet())
    assert 0.5 < alone[1] / alone[0] < 0.98
    assert score.controller.name == chosen


def test_only_what_is_clearly_worse_is_pruned(model, texts):
    """Pruned or not, sets are ranked as without pruning, and the best is never pruned."""
    skips = [SkipSet(), SkipSet((2,), ()), SkipSet((0, 1, 2), (0, 1, 2)), SkipSet((1,), (1,)), SkipSet((), (2,))]
    with Replay(model, texts, depth=3) as replay:
        alone = [ReplayObjective(replay, COSTS, [FixedK(3)]).score(skip) for skip in skips]
        worth = ReplayObjective(replay, COSTS, [FixedK(3)])
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
    assert {c.spec().name for c in controllers} == {"fixed", "static", "adaptive", "rate"}


def test_drafts_in_play_are_as_long_as_can_pay():
    """With cheap drafts the longest; with dear ones none that hardly brings more, even if every token were right."""
    assert [long_enough(COSTS, draft, 12) for draft in (0.01, 0.5, 0.9)] == [12, 9, 2]
    for draft in (0.01, 0.5, 0.9):
        found = long_enough(COSTS, draft, 12)
        speeds = {k: (k + 1) / (COSTS.round + k * draft + COSTS.verification(k + 1)) for k in range(1, 13)}
        assert speeds[found] >= LONG_ENOUGH * max(speeds.values())
        assert all(speeds[k] < LONG_ENOUGH * max(speeds.values()) for k in range(1, found))
    assert long_enough(COSTS, 0.01, 1) == 1


def test_drafts_as_long_as_16_rows_are_in_play_where_steps_are_cheap():
    """16 rows at 1.7 of a plain step; at .2 of one for a draft step, 15 tokens bring 3.6% more than 12 do."""
    costs = COSTS.model_copy(update={"widths": [1, 8, 12, 16], "verify": [1.0, 1.25, 1.5, 1.7]})
    assert [long_enough(costs, draft, LONGEST_DRAFT) for draft in (0.2, 0.3, 0.6)] == [14, 13, 8]
    assert deepest(controllers_in_play(LONGEST_DRAFT)) == 15
    assert {c.spec().options["k_max"] for c in controllers_in_play(LONGEST_DRAFT) if c.name == "static"} >= {12, 15}


def test_without_controllers_given_those_in_play_are_tuned(model, texts):
    skip = SkipSet((1,), (2,))
    with Replay(model, texts, depth=12) as replay:
        found = ReplayObjective(replay, COSTS).score(skip)
        length = long_enough(COSTS, COSTS.draft(skip, 3), 12)
        assert found == ReplayObjective(replay, COSTS, controllers_in_play(length)).score(skip)


def test_candidates_are_added_where_they_pay(model, texts):
    """With rows for nothing, as many as there may be; with dear ones, none."""
    skip = SkipSet((0, 2), (1,))
    for verify, counts in ((1.0, {2, 3, 4}), (9.0, {1})):
        costs = COSTS.model_copy(update={"verify": [1.0, verify]})
        with Replay(model, texts, depth=2) as replay:
            assert ReplayObjective(replay, costs, [FixedK(2)]).score(skip).candidates in counts


def test_a_profile_made_of_a_score_predicts_the_same(model, texts):
    """The fitted curve, the rate and the candidates travel in it."""
    skip = SkipSet((1,), (2,))
    with Replay(model, texts, depth=4) as replay:
        score = ReplayObjective(replay, COSTS, [RateOptimal(k_max=4, floor=0.0, strength=1e9)]).score(skip)
        found = profile(skip, "rate", score.candidates, **score.controller.options).model_copy(
            update={"acceptance": score.acceptance}
        )
        predicted = predict(replay, found)
    assert predicted.tokens_per_round == pytest.approx(score.tokens_per_round, abs=1e-3)
    assert predicted.acceptance_rate == pytest.approx(score.acceptance_rate, abs=1e-3)
