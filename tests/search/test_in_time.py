"""Searches whose time is limited, on clocks that the tests move: what they leave out, and what they say of it."""

from __future__ import annotations

import math

import pytest
from fake_costs import Clock
from selfspec.search import finalists, find_profile, prepare, study
from selfspec.search.budget import Budget, Deadline
from selfspec.search.callbacks import SilentSearch
from selfspec.search.context import SearchContext
from selfspec.search.continuations import FEWEST, DecodingSettings
from selfspec.search.ledger import Ledger, ScoredTexts
from selfspec.search.space import Space
from selfspec.search.trial_tables import as_profile
from studies import measured_as, small_study

from selfspec.measure.pace import Pace
from selfspec.measure.timing import Runs
from selfspec.profile.draft_spec import PlainSpec
from selfspec.profile.reading import parse_profile, profile_text
from selfspec.profile.schema import Calibration
from selfspec.types.costs import CostModel
from selfspec.types.stats import Stats

COSTS = CostModel(
    context=60, base=1e-4, attention=4e-5, mlp=4e-5, widths=[1, 2, 8], verify=[1.3e-3, 1.35e-3, 1.5e-3], round=4e-5
)
QUICK, SLOW = Pace(step=1e-4, row=1e-5), Pace(step=0.05, row=0.02)


class Events(SilentSearch):
    """A watch that lets time pass: so many seconds when a stage of that name begins, and with every trial."""

    def __init__(self, clock, trial=0.0, stages=()):
        self.clock, self.each, self.stages = clock, trial, dict(stages)
        self.trials, self.said, self.begun = [], [], {}

    def stage(self, name, total):
        self.begun[name] = self.clock.now
        self.clock.now += self.stages.get(name, 0.0)

    def trial(self, trial):
        self.trials.append(trial)
        self.clock.now += self.each

    def say(self, line):
        self.said.append(line)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(autouse=True)
def told(monkeypatch, tmp_path):
    """What a machine would measure is told; a pace at which there is time for everything."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prepare, "measure_costs", lambda *_, **__: COSTS)
    monkeypatch.setattr(finalists, "measure", measured_as(1.3, (1.2, 1.4)))
    at(monkeypatch, QUICK)


def at(monkeypatch, pace):
    monkeypatch.setattr(study.Pace, "from_runtime", lambda *_, **__: pace)


def search(llm, budget, watch=None, **options):
    return find_profile(
        llm, **{"trials": 6, "count": 4, "max_new_tokens": 12, "budget": budget, "watch": watch, **options}
    )


def test_with_enough_time_nothing_is_left_out(llm, clock):
    watch = Events(clock, trial=1.0)
    profile = search(llm, Budget(600, clock=clock), watch)
    assert (profile.search.trials, profile.calibration.prompts, profile.search.max_new_tokens) == (6, 4, 12)
    assert profile.note is None
    assert profile.search.seconds == 6
    assert "this will take about" in watch.said[0]


def test_trials_end_so_that_the_best_can_still_be_measured(llm, clock):
    budget, watch = Budget(600, clock=clock), Events(clock, trial=50.0)
    profile = search(llm, budget, watch, trials=50)
    assert 2 <= len(watch.trials) == profile.search.trials < 12
    assert budget.spent == 50 * len(watch.trials) < 600
    assert profile.measured
    assert profile.note == f"time sufficed for {len(watch.trials)} of 50 trials"
    assert profile.search.seconds == 50 * len(watch.trials)


def test_one_set_is_tried_however_late_it_is(llm, clock):
    watch = Events(clock, stages={"searching": 1e6})
    profile = search(llm, Budget(600, clock=clock), watch)
    assert len(watch.trials) == profile.search.trials == 1
    assert not profile.measured
    assert profile.note.startswith("too little time was left; not measured; time sufficed for 1 of 6 trials")
    assert profile_text(parse_profile(profile_text(profile), source="p")) == profile_text(profile)


def test_with_no_time_at_all_nothing_is_tried_and_the_profile_says_so(llm, clock, monkeypatch, tmp_path):
    at(monkeypatch, SLOW)
    budget = Budget(30, clock=clock)
    clock.now = 40.0
    watch = Events(clock)
    profile = search(llm, budget, watch, minutes=0.5, storage=tmp_path / "trials.jsonl")
    assert (profile.draft, profile.search.trials, profile.search.minutes) == (PlainSpec(), 0, 0.5)
    assert profile.note.startswith("no path was tried: of the limit of 30 s, 40 s had passed when the model was loaded")
    assert "\n" not in profile.note
    assert list(watch.begun) == ["timing the model"]
    assert watch.said[0].endswith("it is shortened to the limit of 30 s")
    assert profile_text(parse_profile(profile_text(profile), source="p")) == profile_text(profile)
    assert search(llm, None, storage=tmp_path / "trials.jsonl").search.trials == 6


def test_without_time_to_rank_sub_layers_likely_sets_are_told_otherwise(llm, clock, tmp_path):
    """What is skipped then is what changes the residual stream least; with more time the ranking is made up for."""
    place = tmp_path / "trials.jsonl"
    watch = Events(clock, stages={"ranking sub-layers": 1e3})
    search(llm, Budget(600, clock=clock), watch, storage=place)
    assert Ledger(place).gains is None
    assert watch.trials
    search(llm, None, storage=place)
    assert len(Ledger(place).gains) == 2 * llm.runtime.layers


def test_all_sub_layers_are_ranked_on_as_many_places(llm, clock, monkeypatch):
    """Each takes longer than there is time for: the first is tried again on fewer places, then all others are."""
    shares = []

    def gain(worth, part, *, share):
        clock.now += 25.0 * share / prepare.RANKING_SHARE
        shares.append(share)
        return 1.0 + sum(part.skip.attention)

    monkeypatch.setattr(prepare.ReplayObjective, "gain", gain)
    budget = Budget(200, clock=clock)
    search(llm, budget)
    assert len(shares) == 1 + 1 + 2 * llm.runtime.layers, "with nothing skipped, too"
    assert shares[0] > shares[1]
    assert len({*shares[1:]}) == 1
    assert budget.spent < 200


def test_a_limited_search_resumes_with_its_texts(llm, clock, monkeypatch, tmp_path):
    """How much text there is time for is decided when a search begins; without a limit it goes on with the same."""
    place = tmp_path / "trials.jsonl"
    at(monkeypatch, SLOW)

    class Interrupting(Events):
        def trial(self, trial):
            super().trial(trial)
            if trial.number == 2:
                raise KeyboardInterrupt

    stopped = search(llm, Budget(60, clock=clock), Interrupting(clock), storage=place)
    assert stopped.search.interrupted
    assert stopped.calibration.prompts * stopped.search.max_new_tokens < 4 * 12
    assert stopped.search.max_new_tokens >= FEWEST
    for budget in (None, Budget(60, clock=clock)):
        watch = Events(clock)
        resumed = search(llm, budget, watch, storage=place)
        assert resumed.calibration == stopped.calibration
        assert resumed.search.max_new_tokens == stopped.search.max_new_tokens
        assert [trial.known for trial in watch.trials][:3] == [True] * 3
    assert all(trial.known for trial in watch.trials)
    assert "of 4 prompts" in resumed.note


def test_whoever_decides_on_the_texts_first_decides_for_all(llm, tmp_path):
    """Another worker, with less time, is done while this one continues the prompts."""
    place = tmp_path / "trials.jsonl"
    theirs = ScoredTexts(prompts=2, max_new_tokens=9)

    class Watch(SilentSearch):
        def step(self, done):
            Ledger(place, settings={}).keep_texts(theirs)

    prompts = tuple(llm.encode(prompt) for prompt in ("import os\n", "class A:\n", "def f(x):\n"))
    mine = SearchContext(
        llm, Space(llm.runtime.layers), DecodingSettings(12), prompts, 0, Ledger(place, settings={}), watch=Watch()
    )
    texts = prepare._continued(mine)
    assert [(text.tokens[: text.prompt_length], text.remaining) for text in texts] == [
        (tuple(ids), 9) for ids in prompts[:2]
    ]


def test_a_picked_profile_tells_the_texts_that_were_scored_on():
    ledger = small_study()
    whole = as_profile(ledger, ledger.entries[0])
    said = Calibration(source="texts", prompts=1, tokens=9, sha256="1")
    ledger.keep_texts(ScoredTexts(prompts=1, max_new_tokens=5, calibration=said))
    cut = as_profile(ledger, ledger.entries[0])
    assert (whole.calibration.prompts, whole.search.max_new_tokens) == (2, 8)
    assert (cut.calibration, cut.search.max_new_tokens) == (said, 5)


def test_trials_by_the_clock_have_fewer_prompts_too(llm, clock, monkeypatch):
    at(monkeypatch, SLOW)
    profile = search(llm, Budget(30, clock=clock), objective="wallclock", trials=2)
    assert profile.calibration.prompts * profile.search.max_new_tokens < 4 * 12
    assert profile.search.trials == 2


class TestMeasuring:
    """How much is measured: tokens and prompts by what time is left, rounds by what they tell."""

    @pytest.fixture
    def asked(self, llm):
        search = SearchContext(llm, Space(16), DecodingSettings(64), (), 0, Ledger(settings={}), pace=Pace(0.01, 0.001))
        prompts = [[1] * 41] * 8

        def tokens(seconds, methods=2):
            return finalists._tokens(search, Deadline(seconds, lambda: 0.0), prompts, methods=methods)

        return tokens

    def test_as_many_tokens_as_there_is_time_for(self, asked):
        """A prompt's pass takes 0.05 s, a token 0.01 s; four prompts, and the first once more, by each of two."""
        assert asked(math.inf) == asked(1e9) == 64
        assert asked(2 * 5 * (0.05 + 0.305)) == 30
        assert asked(2 * 5 * (0.05 + 0.165)) == 16
        assert asked(3 * 5 * (0.05 + 0.305), methods=3) == 30

    def test_fewer_prompts_rather_than_hardly_any_tokens(self, asked):
        assert asked(2 * 3 * (0.05 + 0.205)) == 20
        assert asked(2 * 2 * (0.05 + 0.105)) == 10
        assert asked(2 * 2 * (0.05 + 0.075)) == 0
        assert asked(0.0) == 0

    def test_another_prompt_only_if_it_fits(self):
        """Two methods took three seconds a prompt, the next may take a little longer."""
        runs = Runs({"plain": [[Stats(seconds=1.0)]], "draft": [[Stats(seconds=2.0)]]})
        for seconds, fits in ((3.7, True), (3.0, False)):
            assert finalists._in_time(Deadline(seconds, lambda: 0.0))(runs) is fits

    @pytest.mark.parametrize(
        ("ratios", "settled"),
        [
            ([1.5, 1.6, 1.7], True),  # clearly faster
            ([0.5, 0.9, 0.7], True),  # clearly slower
            ([0.9, 1.0, 1.1], False),
            ([1.01, 1.02, 1.2], False),  # hardly faster
            ([0.99, 1.0, 1.01], True),  # it is as it is
            ([1.5, 1.6], False),  # too few to tell
        ],
    )
    def test_no_further_round_once_it_is_clear(self, ratios, settled):
        plain = [[Stats(tokens=10, seconds=1.0)] for _ in ratios]
        draft = [[Stats(tokens=10, seconds=1 / ratio)] for ratio in ratios]
        assert finalists._settled(Runs({"plain": plain, "draft": draft}), len(ratios)) is settled
        if settled:
            runs = Runs({"plain": plain, "draft": draft})
            assert not finalists._settled(runs, 1 + len(ratios)), "the first round is under way"
            draft[0] *= 2
            plain[0] *= 2
            assert not finalists._settled(runs, len(ratios)), "the second round is"


@pytest.mark.parametrize("minutes", [1e-4, 0.02])
def test_next_to_no_time_on_a_real_clock(llm, monkeypatch, minutes):
    """Whatever the clock says, there is a profile, and what was not done is said."""
    monkeypatch.undo()
    profile = find_profile(llm, minutes=minutes, trials=10_000, count=3, max_new_tokens=16)
    assert profile_text(parse_profile(profile_text(profile), source="p")) == profile_text(profile)
    assert "no path was tried" in profile.note or f"of {10_000} trials" in profile.note
    assert profile.search.minutes == minutes
