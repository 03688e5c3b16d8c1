"""Bridges offered to the search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models import plain, small
from selfspec.search import finalists, find_profile, study
from selfspec.search.bridging import attach_bridges, with_bridges
from selfspec.search.objective import ReplayObjective
from selfspec.search.replay import Replay
from selfspec.search.replay_state import TargetText

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.controllers import FixedK
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.reading import read_profile, write_profile
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath

COSTS = CostModel(context=9, base=0.3, attention=0.02, mlp=0.02, widths=[1, 8], verify=[1.0, 1.1], round=0.05, head=0.1)
BYPASSING = DraftPath.skipping([1, 2], [1, 2])
PATH = DraftPath.skipping([14], [14])  # of the built-in model


@pytest.fixture(scope="module")
def texts():
    """What bridges are fitted to: other texts than are replayed."""
    runtime = LeanRuntime(small(vocabulary=64, layers=4))
    return [[i, *plain(runtime, [i], 40)] for i in range(12)]


@pytest.fixture(scope="module")
def replay():
    model = small(vocabulary=64, layers=4)
    prompts = [[21, 2, 3], [24, 5], [37], [33, 3, 9, 1, 0, 2]]
    done = [TargetText((*p, *plain(LeanRuntime(model), p, 24)), len(p), 24) for p in prompts]
    with Replay(model, done, depth=3) as replay:
        yield replay


def test_they_join_where_they_are_better(replay, texts):
    """And score as the path with them does."""
    worth = ReplayObjective(replay, COSTS, [FixedK(2)])
    score = worth.score(BYPASSING)
    found = with_bridges(worth, score, runtime=replay._runtime.with_new_cache(), texts=texts)
    assert found.acceptance_rate > score.acceptance_rate
    assert found.path.skip == score.path.skip
    again = ReplayObjective(replay, COSTS, [FixedK(2)]).score(found.path)
    assert again.tokens_per_second == found.tokens_per_second > score.tokens_per_second


def test_nothing_to_bridge(replay, texts):
    worth = ReplayObjective(replay, COSTS, [FixedK(2)])
    score = worth.score(DraftPath.skipping([1], [2]))
    assert with_bridges(worth, score, runtime=replay._runtime.with_new_cache(), texts=texts) is None


def test_there_is_no_time_to_fit_any(replay, texts):
    worth, asked = ReplayObjective(replay, COSTS, [FixedK(2)]), []
    runtime = replay._runtime.with_new_cache()
    two = DraftPath.skipping([0, 2], [0, 2])  # runs
    found = with_bridges(
        worth, worth.score(two), runtime=runtime, texts=texts, seconds=lambda n: n / 1000, allows=asked.append
    )
    assert found is None
    assert asked == [pytest.approx(2 * 2 * sum(map(len, texts)) / 1000)]


def test_a_profile_takes_its_bridges_along(replay, texts, tmp_path):
    runtime = replay._runtime.with_new_cache()
    worth = ReplayObjective(replay, COSTS, [FixedK(2)])
    found = with_bridges(worth, worth.score(BYPASSING), runtime=runtime, texts=texts)
    base = selfspec.Profile(model=runtime.skeleton.identity, draft=LayerSkipSpec.from_path(found.path))
    profile = attach_bridges(base, found.path)
    write_profile(profile, tmp_path / "p.yaml")
    read = read_profile(tmp_path / "p.yaml")
    assert read.model_dump() == profile.model_dump()
    assert read.part_path("bridge").parent == tmp_path
    read.part_path("bridge").unlink()
    profile.part_path("bridge").unlink()
    with pytest.raises(SelfspecError, match="bridge-.*safetensors: no such file"):
        write_profile(profile, tmp_path / "p.yaml")
    assert attach_bridges(base, BYPASSING) is base


class Eager:
    """An objective that finds everything better than anything."""

    def __init__(self, worth):
        self.worth = worth

    def score(self, path):
        return replace(self.worth.score(path), tokens_per_second=1e9, speedup=9.0, pruned=False)


def test_a_search_measures_and_saves_them(whole, tmp_path, monkeypatch):
    """Where they win: the profile drafts with its bridge, predicted and measured, and the text is plain decoding's."""

    def eager(worth, score, *, runtime, texts, seconds, allows):
        assert allows(seconds(100))
        assert len(texts) >= 2
        return with_bridges(Eager(worth), replace(score, path=PATH), runtime=runtime, texts=texts[:6])

    monkeypatch.setattr(study, "with_bridges", eager)
    monkeypatch.setattr(study, "FEWEST_RESCORED", 1000)  # nor is any chosen by further texts
    monkeypatch.setattr(finalists, "WITHIN_REACH", 5.0)
    profile = find_profile(whole, trials=1, count=2, max_new_tokens=8, keep_best=True, modes="full,skip")
    assert profile.draft.trained == "bridge"
    assert profile.path == PATH
    assert profile.measured
    assert profile.predicted
    write_profile(profile, tmp_path / "p.yaml")
    read = read_profile(tmp_path / "p.yaml")
    plain_ = whole.generate("def read(path):\n", max_new_tokens=16).tokens
    assert whole.generate("def read(path):\n", max_new_tokens=16, drafter=whole.drafter_for(read)).tokens == plain_
