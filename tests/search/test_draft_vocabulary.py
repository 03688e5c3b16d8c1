"""Draft vocabularies offered to the search."""

from __future__ import annotations

import pytest
from models import plain, small
from selfspec.search import finalists, find_profile, prepare, study
from selfspec.search.bridging import with_smaller_head
from selfspec.search.continuations import choose
from selfspec.search.finalists import PROMPTS
from selfspec.search.objective import ReplayObjective
from selfspec.search.replay import Replay
from selfspec.search.replay_state import TargetText

import selfspec
from selfspec.controllers import FixedK
from selfspec.drafters import PlainDrafter
from selfspec.runtime.forward import LeanRuntime
from selfspec.text.detokenizer import frequent
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath, SkipSet

SKIP = SkipSet((1,), (2,))


def costs(head):
    return CostModel(
        context=9, base=0.3, attention=0.02, mlp=0.02, widths=[1, 8], verify=[1.0, 1.1], round=0.05, head=head
    )


@pytest.fixture(scope="module")
def replay():
    model = small(vocabulary=64)
    prompts = [[1, 2, 3], [4, 5], [7], [3, 3, 9, 1, 0, 2]]
    texts = [TargetText((*p, *plain(LeanRuntime(model), p, 16)), len(p), 16) for p in prompts]
    with Replay(model, texts, depth=3) as replay:
        yield replay


def test_a_smaller_head_is_worth_what_it_saves(replay):
    texts = [text.tokens for text in replay.texts]
    worth = ReplayObjective(replay, costs(head=0.25), [FixedK(2)])
    found = with_smaller_head(worth, worth.score(SKIP), texts=texts, size=64)
    assert len(found.path.vocabulary) in (4, 16)
    assert found.tokens_per_second > worth.score(SKIP).tokens_per_second
    assert list(found.path.vocabulary) == frequent(texts, len(found.path.vocabulary), 64)


def test_of_several_heads_the_one_that_brings_most_is_scored_in_full(replay):
    """The whole vocabulary at a price that makes any other useless is kept; a free head that is always right is not."""
    most = tuple(range(63))
    worth = ReplayObjective(replay, costs(head=0.25), [FixedK(2)])
    score = worth.score(SKIP)
    free = ReplayObjective(replay, costs(head=0.0), [FixedK(2)])
    unseen = sorted({*range(64)} - {token for text in replay.texts for token in text.tokens})
    assert free.score_with(DraftPath(SKIP), [tuple(unseen[:8]), tuple(unseen[8:16])]) is None
    found = worth.score_with(DraftPath(SKIP), [most])
    assert found.path.vocabulary == most
    assert found.tokens_per_round >= score.tokens_per_round
    assert found.tokens_per_second > score.tokens_per_second


def test_tokens_that_are_scored_are_not_counted(llm, monkeypatch, tmp_path):
    """In the vocabulary of the very texts nothing would be missing; nor are those counted that choose in the end."""
    counted = []

    def remember(worth, score, *, texts, size):
        counted.extend(llm.tokenizer.decode(text) for text in texts)

    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(study, "with_smaller_head", remember)
    prompts = [f"x = {i}\n" for i in range(20)]
    find_profile(llm, prompts=prompts, trials=1, count=2, max_new_tokens=8, keep_best=True)
    drawn = choose(prompts, source="", count=2, seed=0)
    assert counted == [*drawn.rest[PROMPTS:]] != []
    assert not {*counted} & {*drawn.search, *drawn.measure, *drawn.rest[:PROMPTS]}


def test_a_cheap_head_stays_whole(replay):
    worth = ReplayObjective(replay, costs(head=0.02), [FixedK(2)])

    def unread():
        raise AssertionError
        yield

    assert with_smaller_head(worth, worth.score(SKIP), texts=unread(), size=64) is None


def test_the_shares_of_a_price():
    model = costs(head=0.25)
    assert model.draft(SKIP, 3) - model.draft(SKIP, 3, vocabulary=0.25) == pytest.approx(0.75 * 0.25)
    assert model.draft(SKIP, 3, vocabulary=0.0) >= 0


def test_a_search_may_find_one(llm, monkeypatch, tmp_path):
    """With a head that is priced at most of the draft step; the profile then drafts with it, and changes nothing."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    priced = CostModel(
        context=60, base=9e-4, attention=1e-6, mlp=1e-6, widths=[1, 8], verify=[1.3e-3, 1.4e-3], round=4e-5, head=8.5e-4
    )
    monkeypatch.setattr(prepare, "measure_costs", lambda *_, **__: priced)
    monkeypatch.setattr(
        finalists, "_fastest", lambda search, base, scores, *_, **__: max(scores, key=lambda s: s.tokens_per_second)
    )
    profile = find_profile(llm, trials=2, count=2, max_new_tokens=8, keep_best=True)
    assert profile.draft.vocabulary is not None
    assert len(profile.draft.vocabulary) in (4096 // 4, 4096 // 16)
    drafting = selfspec.wrap(llm.model, llm.tokenizer, profile=profile)
    prompt = "def main():\n"
    out = drafting.generate(prompt, max_new_tokens=16)
    assert out.stats.drafted > 0
    assert out.tokens == llm.generate(prompt, max_new_tokens=16, drafter=PlainDrafter()).tokens
