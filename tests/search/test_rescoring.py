"""Choosing among the best few of a search by texts that none of them was scored on."""

from __future__ import annotations

import pytest
from fake_costs import Clock
from selfspec.search import finalists, find_profile, prepare
from selfspec.search.budget import Budget
from selfspec.search.callbacks import SilentSearch
from selfspec.search.context import SearchContext
from selfspec.search.continuations import DecodingSettings
from selfspec.search.finalists import CLEARLY, best_rescored
from selfspec.search.forecast import FINALISTS
from selfspec.search.ledger import Ledger
from selfspec.search.objective import Score
from selfspec.search.space import Space
from selfspec.search.storage import MEMORY

import selfspec
from selfspec.measure.pace import Pace
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath

COSTS = CostModel(context=9, base=0.3, attention=0.02, mlp=0.02, widths=[1, 8], verify=[1.0, 1.1], round=0.05)
PATHS = [DraftPath.skipping((), (i,)) for i in range(3)]
PROMPTS = [[1, 2, 3], [4, 5], [7, 8, 9], [3, 3]]


def scored(path, speed):
    return Score(path, speed, speed, 0.5, 2.0, ControllerSpec(name="fixed", options={"k": 2}))


SCORES = [scored(path, speed) for path, speed in zip(PATHS, (3.0, 2.0, 1.0), strict=True)]


@pytest.fixture(scope="module")
def llm():
    return selfspec.load("builtin", profile="none")


@pytest.fixture
def search(llm):
    def made(**given):
        return SearchContext(
            llm=llm,
            space=Space(llm.runtime.layers),
            decoding=DecodingSettings(8),
            prompts=([1, 2],),
            seed=0,
            ledger=Ledger(MEMORY, "s", {}),
            **given,
        )

    return made


class Told:
    """In place of `ReplayObjective`: speeds that were told, and what was asked for."""

    speeds = dict(zip(PATHS, (1.0, 5.0, 2.0), strict=True))
    clock = None
    each = 0.0

    def __init__(self, replay, costs, controllers=None, *, proposers=()):
        self.texts = replay.texts
        type(self).asked = []

    def score(self, path):
        self.asked.append((path, [text.tokens[: text.prompt_length] for text in self.texts]))
        if self.clock is not None:
            self.clock.now += self.each
        return scored(path, self.speeds[path])


def test_the_best_by_other_texts_is_taken_as_it_was_scored(search, monkeypatch):
    monkeypatch.setattr(finalists, "ReplayObjective", Told)
    assert best_rescored(search(), COSTS, PROMPTS, SCORES) is SCORES[1]
    assert [path for path, _ in Told.asked] == PATHS
    assert Told.asked[0][1] == [tuple(prompt) for prompt in PROMPTS]


def test_every_finalist_is_named_with_its_speed_on_other_texts(search, monkeypatch):
    monkeypatch.setattr(finalists, "ReplayObjective", Told)
    watch, said = SilentSearch(), []
    watch.say = said.append
    best_rescored(search(watch=watch), COSTS, PROMPTS, SCORES)
    assert said == [
        f"finalist: {path.summary}: {speed:.2f}x predicted on other texts" for path, speed in Told.speeds.items()
    ]


def timed_scores(monkeypatch, each):
    """A clock that advances by `each` seconds with every score, which `Told` gives."""
    monkeypatch.setattr(finalists, "ReplayObjective", Told)
    monkeypatch.setattr(Told, "clock", clock := Clock())
    monkeypatch.setattr(Told, "each", each)
    return clock


@pytest.mark.parametrize(("better", "kept"), [(0.5 * (CLEARLY - 1), True), (2 * (CLEARLY - 1), False)])
def test_what_a_search_starts_from_stays_unless_another_is_clearly_faster(search, monkeypatch, better, kept):
    """A little more on a few texts is noise."""
    given = search()
    start = given.space.path(given.space.start)
    monkeypatch.setattr(finalists, "ReplayObjective", Told)
    monkeypatch.setattr(Told, "speeds", {PATHS[0]: 1.0 + better, start: 1.0})
    scores = [SCORES[0], scored(start, 1.0)]
    assert best_rescored(given, COSTS, PROMPTS, scores) is scores[kept]


def test_a_real_replay_of_other_texts_decides(search):
    """Of three sub-layers of random weights, one is worth most on these texts, whichever comes first."""
    found = {best_rescored(search(), COSTS, PROMPTS, order).path for order in (SCORES, SCORES[::-1])}
    assert len(found) == 1


def test_one_alone_is_taken(search, monkeypatch):
    monkeypatch.delattr(finalists, "ReplayObjective")
    assert best_rescored(search(), COSTS, PROMPTS, SCORES[:1]) is SCORES[0]


@pytest.mark.parametrize(("better", "kept"), [(0.5 * (CLEARLY - 1), True), (2 * (CLEARLY - 1), False)])
def test_without_time_for_other_texts_it_stays_too(search, better, kept):
    """What was best of many on little text owes more to chance than on much."""
    given = search(budget=Budget(0.0), pace=Pace(1.0, 0.1))
    start = given.space.path(given.space.start)
    scores = [scored(PATHS[0], 1.0 + better), scored(PATHS[1], 1.0), scored(start, 1.0)]
    assert best_rescored(given, COSTS, PROMPTS, scores) is scores[2 if kept else 0]


def test_where_time_is_short_what_a_search_starts_from_is_scored_again_beside_the_best(search, monkeypatch):
    clock = timed_scores(monkeypatch, 2.0)
    given = search(budget=Budget(60.0, clock=clock), pace=Pace(1e-3, 1e-4))
    start = given.space.path(given.space.start)
    monkeypatch.setattr(Told, "speeds", {**dict.fromkeys(PATHS, 1.0), start: 3.0})
    scores = [*SCORES, scored(start, 0.5)]
    assert best_rescored(given, COSTS, PROMPTS, scores) is scores[3]
    assert [path for path, _ in Told.asked][:2] == [PATHS[0], start]


@pytest.mark.parametrize(("seconds", "best"), [(0.0, 0), (1e6, 1)])
def test_as_many_are_scored_as_there_is_time_for(search, monkeypatch, seconds, best):
    clock = timed_scores(monkeypatch, 10.0)
    given = search(budget=Budget(seconds, clock=clock), pace=Pace(1.0, 0.1))
    assert best_rescored(given, COSTS, PROMPTS, SCORES) is SCORES[best]


def test_time_may_end_after_some_of_them(search, monkeypatch):
    clock = timed_scores(monkeypatch, 10.0)
    budget = Budget(60.0, clock=clock)
    allowed = budget.share("choosing")
    given = search(budget=budget, pace=Pace(1e-3, 1e-4))
    assert best_rescored(given, COSTS, PROMPTS, SCORES).path in PATHS
    assert 1 <= len(Told.asked) < len(SCORES)
    assert clock.now <= allowed + 10.0


def test_time_may_end_while_the_texts_are_made(search, monkeypatch):
    """A machine that is busy just then: nothing is scored again, and the first stays."""

    class Slow(SilentSearch):
        def stage(self, name, total):
            clock.now += 1e3

    clock = Clock()
    monkeypatch.setattr(finalists, "ReplayObjective", Told)
    given = search(budget=Budget(60.0, clock=clock), pace=Pace(1e-3, 1e-4), watch=Slow())
    assert best_rescored(given, COSTS, PROMPTS, SCORES) is SCORES[0]
    assert Told.asked == []


class Stages(SilentSearch):
    """Remembers the stages."""

    def __init__(self):
        self.totals = {}

    def stage(self, name, total):
        self.totals[name] = total


@pytest.fixture
def cheap(monkeypatch):
    """Draft steps at a fifth of a plain one, whatever they take here."""
    told = COSTS.model_copy(update={"base": 0.05, "attention": 0.005, "mlp": 0.005})
    monkeypatch.setattr(prepare, "measure_costs", lambda *_, **__: told)


def test_a_search_chooses_so_with_what_it_started_from_among_the_best(cheap):
    stages = Stages()
    prompts = [f"{i} {i + 1} {i + 2}" for i in range(12)]
    profile = find_profile(
        selfspec.load("builtin", profile="none"), prompts=prompts, count=3, trials=8, max_new_tokens=8, watch=stages
    )
    assert 2 <= stages.totals["choosing among the best few"] <= FINALISTS + 2  # and a smaller head
    assert stages.totals["continuing other prompts"] == 16
    assert profile.search.trials == 8


def test_with_too_few_prompts_for_that_the_clock_decides(cheap):
    """Six prompts are searched on and measured on; none is left."""
    stages = Stages()
    prompts = [f"{i} {i + 1} {i + 2}" for i in range(6)]
    llm = selfspec.load("builtin", profile="none")
    find_profile(llm, prompts=prompts, count=3, trials=4, max_new_tokens=8, watch=stages)
    assert "continuing other prompts" not in stages.totals
