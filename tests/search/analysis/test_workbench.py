"""What the notebooks are computed from: families of skip sets, strategies against each other, drafts on one trace."""

from __future__ import annotations

import pandas as pd
import pytest
from selfspec.search.analysis import sweep, trials
from selfspec.search.analysis import trials as drafting
from selfspec.search.analysis.workbench import Workbench
from selfspec.search.trace import Trace, walk

from selfspec.basics.errors import SelfspecError
from selfspec.controllers import AdaptiveThreshold, FixedK
from selfspec.types.costs import CostModel, ModeCosts
from selfspec.types.draft_work import DRAFT_STEP

CHEAP = CostModel(context=60, base=0.1, attention=0.03, mlp=0.03, widths=[1, 16], verify=[1.0, 1.5], round=0.02)
COUNTS = (2, 4)


@pytest.fixture(scope="module")
def bench(whole):
    with Workbench(whole, count=2, max_new_tokens=12, costs=CHEAP) as opened:
        yield opened


@pytest.fixture(scope="module")
def rows(bench):
    return sweep.sweep(bench, counts=COUNTS, each=1)


@pytest.fixture(scope="module")
def traces(bench, rows):
    return bench.traces(best(rows).skip)


def best(rows):
    return rows.loc[rows["speedup"].idxmax(), "score"]


class TestSweep:
    def test_every_family_has_the_sets_it_is_named_for(self, bench, rows):
        found = dict(list(rows.groupby("family")))
        for name in (sweep.RANDOM, sweep.GREEDY, sweep.ATTENTION, sweep.MLP):
            assert list(found[name]["skipped"]) == list(COUNTS)
        assert [sorted(score.skip.attention) for score in found[sweep.EVERY_SECOND]["score"]] == [
            [7],
            [3, 7, 11],
            [1, 3, 5, 7, 9, 11, 13],
        ]
        assert all(score.skip.attention == score.skip.mlp for score in found[sweep.EVERY_SECOND]["score"])
        assert set(found[sweep.ATTENTION]["mlp"]) == {0} == set(found[sweep.MLP]["attention"])

    def test_greedy_elimination_only_adds(self, rows):
        few, more = (score.skip for score in rows[rows["family"] == sweep.GREEDY]["score"])
        assert set(few.attention) <= set(more.attention)
        assert set(few.mlp) <= set(more.mlp)

    def test_nothing_is_predicted_beyond_its_bound(self, rows):
        bounded = rows.dropna(subset=["bound"])
        assert set(bounded["family"]) == {sweep.GREEDY}
        assert (bounded["bound"] >= bounded["speedup"] - 1e-9).all()

    def test_draft_costs_are_the_cost_models(self, rows):
        row = rows.iloc[0]
        kept = 32 - row["skipped"]
        assert row["draft_cost"] == pytest.approx((0.1 + 0.03 * kept) / 1.02)

    def test_some_of_every_family_is_measured(self, bench, rows):
        few = sweep.representatives(rows, each=2)
        assert set(few["family"]) == set(rows["family"])
        assert len(few) == len(set(few.index))
        assert best(few) == best(rows)
        one = sweep.measure_rows(bench, few[:1], rounds=1).iloc[0]
        assert 0 < one["low"] <= one["measured"] <= one["high"]

    def test_another_models_costs(self, whole):
        found = sweep.speedups(whole, temperatures=(0.8,), count=1, max_new_tokens=6, counts=(2,), each=1, costs=CHEAP)
        assert list(found.rows.groupby("temperature").size()) == [7]
        assert "measured" not in found.rows
        assert {key: len(frame) for key, frame in found.sensitivity.items()} == {(0.8, "full"): 32}
        assert set(found.rows["rest"]) == {"the rest in full"}

    def test_the_rest_in_8_bits(self, whole):
        eight = CHEAP.model_copy(update={"low": {"int8": ModeCosts(attention=0.01, mlp=0.01, head=0.0)}})
        with Workbench(whole, count=1, max_new_tokens=6, costs=eight, rest="int8") as bench:
            found = sweep.sweep(bench, counts=(2, 4), each=1)
        for score, skipped, cost in found[["score", "skipped", "draft_cost"]].itertuples(index=False):
            assert set(score.path.modes(16)) <= {"int8", "skip"}
            assert score.path.head == "int8"
            assert cost == pytest.approx((0.1 + 0.01 * (32 - skipped)) / 1.02)
        assert set(found["rest"]) == {"the rest in int8"}
        assert list(found[found["family"] == sweep.GREEDY]["skipped"]) == [2, 4]

    def test_no_prompts(self, whole):
        with pytest.raises(SelfspecError, match="prompts: none; expected at least one"):
            Workbench(whole, [])


class TestContests:
    def test_a_race(self, bench):
        found = trials.race(bench, strategies=("climb", "random"), trials=3, seeds=(0, 1))
        assert list(found.groupby(["strategy", "seed"]).size()) == [3] * 4
        for _, run in found.groupby(["strategy", "seed"]):
            assert run["seconds"].is_monotonic_increasing
            assert list(run["best"]) == list(run["speedup"].where(~run["pruned"], 0).cummax())
        first = found[found["trial"] == 1]
        assert first["skip"].nunique() == 1, "all begin with the same warm start"

    def test_the_sub_layer_that_matters_is_told(self, bench):
        space = bench.space
        sets = trials.random_sets(bench, 40, seed=3)
        speedup = [1.0 + 0.5 * (5 in skip.mlp) - 0.001 * (2 in skip.attention) for skip in sets]
        found = trials.importance(bench, pd.DataFrame({"skip": sets, "speedup": speedup}))
        assert len(found) == len(space)
        assert found["importance"].sum() == pytest.approx(1)
        most = found.loc[found["importance"].idxmax()]
        assert (most["layer"], most["part"]) == (5, "mlp")
        assert most["effect"] == pytest.approx(0.5, abs=0.01)

    def test_predictions_and_costs_beside_the_clock(self, bench):
        found = trials.predictions(bench, sets=1, rounds=1).iloc[0]
        assert 0 < found["low"] <= found["measured"] <= found["high"]
        (skip,) = trials.random_sets(bench, 1, seed=0)
        assert found["skipped"] == len(skip)
        fit = trials.cost_fit(bench, sets=1).iloc[0]
        assert fit["predicted"] == pytest.approx(CHEAP.draft_share(skip, 16))
        assert fit["timed"] > 0
        assert trials.verification_costs(bench)["share"].tolist() == [1, 1.5]


class TestDrafts:
    def test_rounds_are_those_of_a_walk(self, traces):
        controller = AdaptiveThreshold()
        found = drafting.rounds_frame(traces, controller)
        walked = walk(traces, controller)
        for name, column in (("tokens", "emitted"), ("drafted", "drafted")):
            assert found[column].sum() == sum(getattr(done.stats, name) for done in walked)
        assert len(found) == sum(done.stats.rounds for done in walked)
        assert found["threshold"].between(controller.floor, controller.ceiling).all()
        assert controller == AdaptiveThreshold()

    def test_drafted_tokens_end_where_the_text_was_left(self):
        trace = Trace(3, 3, [[0.9, 0.8], [0.7], []], [1, 0, 0], [2, 1, 0], [False] * 3)
        found = drafting.drafted_tokens([trace])
        assert found.values.tolist() == [[1, 0.9, True, 0], [2, 0.8, False, 2], [1, 0.7, False, 1]]

    def test_shares_and_their_intervals(self):
        tokens = pd.DataFrame({"place": [1] * 10 + [2] * 4, "accepted": [True] * 8 + [False] * 2 + [True] * 4})
        found = drafting.acceptance_by(tokens, "place")
        assert found["accepted"].tolist() == [0.8, 1.0]
        assert found["tokens"].tolist() == [10, 4]
        assert found.loc[0, ["low", "high"]].tolist() == pytest.approx([0.490, 0.943], abs=1e-3)  # Wilson
        assert found.loc[1, "high"] == 1
        spread = pd.DataFrame({"confidence": [i / 24 for i in range(24)], "accepted": [True] * 24})
        assert drafting.acceptance_by(spread, "confidence", bins=4)["tokens"].tolist() == [6] * 4

    def test_the_best_length_by_theory_and_on_traces(self, bench, rows):
        found = drafting.best_lengths(bench, [best(rows).skip], most=4)
        theory = found[found["source"] == "theory"]
        assert theory["k"].is_monotonic_increasing
        assert theory["k"].iloc[0] == 0
        assert (theory["speedup"] >= 1).all()
        (trace,) = found[found["source"] == "trace"].itertuples()
        traces = bench.traces(best(rows).skip)
        prices = {DRAFT_STEP: CHEAP.draft(best(rows).skip, 16)}
        fixed = [walk(traces, FixedK(k)) for k in range(1, 5)]
        speeds = [
            sum(w.stats.tokens for w in walks) * CHEAP.plain / sum(CHEAP.seconds(w.rounds, prices) for w in walks)
            for walks in fixed
        ]
        assert trace.speedup == pytest.approx(max(1.0, *speeds))

    def test_controllers_on_one_trace(self, bench, rows):
        found = drafting.compare_controllers(bench, best(rows).skip)
        assert list(found.groupby("controller", sort=False).size()) == [4] * 4
        assert (found["bound"] >= found["speedup"] - 1e-9).all()
        assert found.groupby("candidates")["bound"].first().is_monotonic_increasing
        simple = found[found["controller"] == "fixed"]
        assert simple["speedup"].is_monotonic_increasing, "more candidates are only taken where they help"
