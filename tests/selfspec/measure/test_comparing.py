"""Which methods apply, which of those measured is recommended, and what its profile holds; on figures made by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.measure.comparing import (
    applicable,
    by_turns,
    fastest_by_task,
    fastest_first,
    measurements,
    preparation,
    recommend,
)
from selfspec.profile.draft_spec import LayerSkipSpec, ProposerSpec, Skip
from selfspec.profile.drafter_specs import ModelSpec
from selfspec.profile.reading import read_profile, write_profile
from selfspec.profile.schema import Prediction, Profile, SearchRecord
from selfspec.types.identity import Identity

MODEL = Identity(layers=4)
PATH = LayerSkipSpec(skip=Skip(attention=[1]), proposers=[ProposerSpec()])


def at(temperature, dropped=(), **ratios):
    """What a benchmark says at a temperature, of methods by their median ratio, 0.1 to each side."""

    def method(name, median):
        return {
            "ratio": {"plain": {"median": median, "low": median - 0.1, "high": median + 0.1}},
            "dropped_after": 8 if name in dropped else None,
            "tokens_per_second": 100.04 * median,
            "acceptance_rate": None if name == "plain" else 0.5,
            "tokens_per_round": 2.0,
        }

    methods = {"plain": 1.0, **{name.replace("_", "-"): ratio for name, ratio in ratios.items()}}
    return {"temperature": temperature, "methods": {name: method(name, ratio) for name, ratio in methods.items()}}


class TestApplicable:
    def test_without_a_profile(self):
        names = applicable(Profile(model=MODEL))
        assert names[:2] == ["plain", "lookup"]
        assert names[-2:] == ["hf", "hf-prompt-lookup"]
        assert not {"profile", "path"} & set(names)

    def test_a_draft_path_is_measured_with_and_without_guesses(self):
        assert applicable(Profile(model=MODEL, draft=PATH))[:3] == ["plain", "profile", "path"]
        alone = PATH.model_copy(update={"proposers": None})
        told = Prediction(speedup=2, tokens_per_second=9, acceptance_rate=0.7, tokens_per_round=2, draft_cost=0.2)
        for predicted in (None, told):  # what is known of a profile is no other draft
            found = Profile(model=MODEL, draft=alone, predicted=predicted)
            assert applicable(found)[:3] == ["plain", "profile", "lookup"]

    def test_a_draft_model_drafts_for_us_and_for_transformers(self):
        names = applicable(Profile(model=MODEL), "./small")
        assert {"model:./small", "hf-model:./small"} < set(names)


@given(st.lists(st.sampled_from("abc")))
def test_tasks_take_turns(tasks):
    order = by_turns(tasks)
    assert sorted(order) == list(range(len(tasks)))
    seen = [tasks[:number].count(tasks[number]) for number in order]
    assert seen == sorted(seen), "a task's second prompt comes after every task's first"


class TestRecommended:
    def test_the_highest_mean_over_temperatures(self):
        best = recommend([at(0, lookup=2.0, recycle=1.5), at(0.8, lookup=1.0, recycle=1.5)])
        assert (best.method, best.faster, best.rivals) == ("recycle", True, ())
        assert best.speedups == {0: (1.5, 1.4, 1.6), 0.8: (1.5, 1.4, 1.6)}
        assert best.as_dict()["speedups"][1] == {"temperature": 0.8, "median": 1.5, "low": 1.4, "high": 1.6}

    def test_rivals_are_within_its_interval_everywhere(self):
        assert recommend([at(0, lookup=1.5, recycle=1.45, input=1.2)]).rivals == ("recycle",)
        twice = [at(0, lookup=1.5, recycle=1.45), at(0.8, lookup=1.5, recycle=1.2)]
        assert recommend(twice).rivals == ()

    def test_plain_decoding_where_nothing_is_faster(self):
        best = recommend([at(0, lookup=0.9, recycle=0.8)])
        assert (best.method, best.faster) == ("plain", False)

    def test_neither_what_was_dropped_nor_transformers_own(self):
        best = recommend([at(0, dropped=["lookup"], lookup=3.0, hf_prompt_lookup=4.0, recycle=1.1)])
        assert (best.method, best.rivals) == ("recycle", ())

    def test_not_faster_everywhere_is_said(self):
        assert not recommend([at(0, lookup=2.0), at(0.8, lookup=0.9)]).faster


def test_fastest_first_and_dropped_ones_last():
    found = at(0, dropped=["input"], lookup=1.2, recycle=1.4, input=1.6)
    assert fastest_first(found) == ["recycle", "lookup", "plain", "input"]


def test_the_fastest_of_each_task():
    found = at(0, lookup=1.2, hf=3.0)
    for name, speeds in (("plain", (1.0, 1.0)), ("lookup", (2.0, 0.5)), ("hf", (3.0, 3.0))):
        rows = [
            {"task": task, "prompts": 2, "speedup": {"plain": speed}} for task, speed in zip("ab", speeds, strict=True)
        ]
        found["methods"][name]["by_task"] = {"tasks": rows}
    assert fastest_by_task(found) == [
        {"task": "a", "prompts": 2, "speedups": {"lookup": 2.0, "plain": 1.0}},
        {"task": "b", "prompts": 2, "speedups": {"plain": 1.0, "lookup": 0.5}},
    ]
    assert fastest_by_task(at(0, lookup=1.2)) == []


def test_what_a_profile_took_to_make(tmp_path):
    assert preparation(Profile(model=MODEL)) is None
    record = SearchRecord(strategy="climb", objective="x", trials=3, seed=0, seconds=90, max_new_tokens=8)
    assert preparation(Profile(model=MODEL, search=record)) == 1.5
    write_profile(Profile(model=MODEL, draft=ModelSpec(model="distill")), tmp_path / "distill.yaml")
    (tmp_path / "distill.json").write_text(json.dumps({"seconds": 120.0}))
    assert preparation(read_profile(tmp_path / "distill.yaml")) == 2


def test_measurements_are_a_profiles():
    told = {"machine": "m", "device": "cpu", "dtype": "float32", "threads": 2, "prompts": 8, "rounds": 1}
    found = {**told, "max_new_tokens": 16, "temperatures": [at(0, lookup=1.5), at(0.8, lookup=1.25)]}
    first, second = measurements(found, "lookup", held_out=True)
    assert (first.speedup, first.interval, first.tokens_per_second) == (1.5, [1.4, 1.6], 150.1)
    assert (second.temperature, second.plain_tokens_per_second, second.held_out) == (0.8, 100.0, True)
    Profile(model=MODEL, measured=[first, second])
    assert measurements(found, "plain", held_out=True)[0].acceptance_rate == pytest.approx(0)
