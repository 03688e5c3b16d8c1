"""Refining between prompts: the text stays plain decoding's, the draft comes nearer, and what was learnt is kept."""

from __future__ import annotations

import pytest

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.reading import read_profile
from selfspec.training.refine import Refiner
from selfspec.types.controller import ControllerSpec
from selfspec.types.draft_path import DraftPath

PROMPT = "def read_text(path: Path) -> str:\n"


@pytest.fixture(scope="module")
def profile(llm):
    path = DraftPath.from_modes(["int4"] * 2 * llm.runtime.layers)
    return selfspec.Profile(
        model=llm.identity, draft=LayerSkipSpec.from_path(path, ControllerSpec(name="fixed", options={"k": 3}))
    )


def test_texts_stay_and_the_draft_comes_nearer(llm, profile, tmp_path):
    plain = llm.generate(PROMPT, max_new_tokens=24).tokens
    refiner = Refiner(llm, profile, out=tmp_path, rank=4, rate=3e-3)
    for _ in range(4):
        assert refiner.generate(PROMPT, max_new_tokens=24).tokens == plain
    assert refiner.losses[-1] < refiner.losses[0]
    kept = read_profile(tmp_path / "adapter.yaml")
    assert kept.draft.trained == "adapter"
    assert len(llm.runtime._paths._trained) >= 1
    again = Refiner(llm, kept, out=tmp_path, rank=4)
    assert again.generate(PROMPT, max_new_tokens=24).tokens == plain
    assert again.losses[0] < refiner.losses[0]


def test_what_was_learnt_before_is_let_go_of(llm, profile, tmp_path):
    refiner = Refiner(llm, profile, out=tmp_path, rank=2)
    known = len(llm.runtime._paths._trained)
    for _ in range(3):
        refiner.learn(llm.encode(PROMPT))
    assert len(llm.runtime._paths._trained) <= known + 1


def test_seeds_and_paths_in_full_are_refused(llm, profile, tmp_path):
    with pytest.raises(SelfspecError, match="drafts that depend on earlier prompts have no seed"):
        Refiner(llm, profile, out=tmp_path).generate(PROMPT, temperature=0.8, seed=1)
    with pytest.raises(SelfspecError, match="belongs to a draft path"):
        Refiner(llm, selfspec.Profile(model=llm.identity), out=tmp_path)
    with pytest.raises(SelfspecError, match="is no folder"):
        Refiner(llm, profile, out=tmp_path / "no" / "where")
