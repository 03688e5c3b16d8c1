"""The choice of the finalists of a search."""

from __future__ import annotations

from functools import partial

import pytest
from selfspec.search import finalists, find_profile, study
from selfspec.search.callbacks import SilentSearch
from selfspec.search.finalists import _finalists
from selfspec.search.forecast import CONTENDING, FINALISTS
from selfspec.search.objective import Score
from selfspec.search.space import Space
from studies import measured_as

import selfspec
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import MODES, DraftPath

SPACE = Space(9, modes=MODES, head=("full", "int8"))
INT8, INT4 = SPACE.uniform


def scored(path, speed, *, pruned=False):
    return Score(path, speed, speed, 0.5, 2.0, ControllerSpec(name="fixed", options={"k": 2}), pruned)


OTHERS = [scored(DraftPath.skipping((), (i,)), 9.0 - i) for i in range(8)]


@pytest.mark.parametrize("pruned", [False, True])
def test_all_int8_and_all_int4_are_finalists_whatever_the_trials_said(pruned):
    """They come after the best, because those that come last are left out where time is short."""
    slow = [scored(INT4, 0.2, pruned=pruned), scored(INT8, 0.1, pruned=pruned)]
    chosen = _finalists(SPACE, [*OTHERS[::-1], *slow])
    assert [score.path for score in chosen] == [OTHERS[0].path, INT8, INT4, *(s.path for s in OTHERS[1:FINALISTS])]


def test_pruned_paths_are_no_finalists_else():
    best = scored(DraftPath(), 20.0, pruned=True)
    assert [score.path for score in _finalists(SPACE, [best, *OTHERS])] == [s.path for s in OTHERS[:FINALISTS]]
    assert _finalists(Space(9), [best]) == []


def test_the_start_of_a_search_that_skips_is_a_finalist_unless_it_was_pruned():
    for pruned in (False, True):
        chosen = _finalists(Space(9), [*OTHERS, scored(DraftPath(), 0.5, pruned=pruned)])
        assert (DraftPath() in [score.path for score in chosen]) is not pruned


@pytest.mark.parametrize("strategy", ["climb", "random"])
def test_a_search_measures_them_without_warm_starts_and_however_slow(monkeypatch, tmp_path, strategy):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(finalists, "measure", measured_as(1.3))
    monkeypatch.setattr(finalists, "WITHIN_REACH", 100.0)
    monkeypatch.setattr(study, "best_rescored", lambda search, costs, prompts, scores: seen.extend(scores) or scores[0])
    seen: list[Score] = []
    decoded = {}

    def fastest(search, base, scores, prompts, deadline, *, first=1.0):
        decoded.update(scores=scores, prompts=prompts, first=first)
        return scores[-1]

    monkeypatch.setattr(finalists, "_fastest", fastest)
    llm = selfspec.load("builtin", profile="none")
    profile = find_profile(
        llm, trials=2, count=2, max_new_tokens=8, extra_memory=2.0, int4="nearest", warm=False, strategy=strategy
    )
    space = Space(llm.runtime.layers, modes=MODES, head=("full", "int8"))
    assert {*space.uniform} <= {score.path for score in seen}
    assert profile.search.trials == 2 + len(space.uniform)
    chosen, *others = decoded["scores"]
    assert chosen is seen[0], "the one that the replays chose, and then those of one mode"
    assert [score.path for score in others] == [path for path in space.uniform if path != chosen.path]
    assert 3 <= len(decoded["prompts"]) <= CONTENDING
    assert decoded["first"] == finalists.CLEARLY
    assert profile.path == decoded["scores"][-1].path


@pytest.fixture
def quick_search(monkeypatch, tmp_path):
    """A search whose measurements take no time."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(finalists, "measure", measured_as(1.3))
    monkeypatch.setattr(finalists, "_fastest", lambda search, base, scores, *_, **__: scores[0])
    llm = selfspec.load("builtin", profile="none")
    return partial(find_profile, llm, trials=2, count=2, max_new_tokens=8, modes="full,skip", warm=False)


def test_a_refinement_that_cannot_be_written_is_left_out(monkeypatch, quick_search):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(study, "with_bridges", fail)
    said = []
    watch = SilentSearch()
    watch.say = said.append
    assert quick_search(watch=watch).measured
    assert "without bridges over skipped layers: [Errno 28] No space left on device" in said


def test_an_interrupt_while_the_speed_is_predicted_keeps_the_profile(monkeypatch, quick_search):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(finalists, "predict", interrupt)
    profile = quick_search()
    assert profile.measured
    assert profile.predicted is None
    assert profile.search.interrupted
