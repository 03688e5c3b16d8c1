"""A search's options: what the ledger compares, and the two ways in which Python gives them."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest
from selfspec.search import SearchOptions, find_profile, run_search, study
from selfspec.search.budget import Budget
from selfspec.search.continuations import DecodingSettings
from transformers.generation.logits_process import MinLengthLogitsProcessor

from selfspec.basics.errors import SelfspecError
from selfspec.profile.draft_spec import ProposerSpec
from selfspec.types.controller import ControllerSpec

DEFAULT = {
    "max_new_tokens": 64,
    "temperature": 0.0,
    "top_k": None,
    "top_p": None,
    "logits processors": 0,
    "rule": "greedy",
    "objective": "replay",
    "strategy": "climb",
    "seed": 0,
    "context": None,
    "max_draft_cost": None,
    "warm starts": True,
    "keep": [],
    "granularity": "sublayer",
    "kv": "shared",
    "controller": None,
    "modes": ["full", "int8", "int4", "skip"],
    "extra_memory": None,
    "drafters": ["lookup"],
}


def test_the_ledger_compares_what_it_always_did():
    """A study kept by an older version is resumed: the same keys, the same values, since there are modes."""
    assert SearchOptions().settings() == DEFAULT
    assert SearchOptions(
        max_new_tokens=8,
        temperature=0.8,
        top_k=40,
        top_p=0.9,
        logits_processor=[MinLengthLogitsProcessor(3, 1)],
        context=40,
        max_draft_cost=0.5,
        warm=False,
        keep=(15, 0, 15),
        granularity="layer",
        controller=ControllerSpec(name="fixed", options={"k": 2}),
    ).settings() == {
        **DEFAULT,
        "max_new_tokens": 8,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "logits processors": 1,
        "rule": "block",
        "context": 40,
        "max_draft_cost": 0.5,
        "warm starts": False,
        "keep": [0, 15],
        "granularity": "layer",
        "controller": {"name": "fixed", "options": {"k": 2}},
    }


def test_how_far_a_search_goes_and_where_is_not_compared():
    further = {
        "trials": 9,
        "minutes": 3.0,
        "count": 2,
        "keep_best": True,
        "storage": "x",
        "study": "y",
        "watch": None,
        "store": None,
    }
    where = {
        "int4": "auto",
        "prompts": ["a"],
        "source": "mine",
        "chat": True,
        "plain_llm": lambda: None,
        "budget": Budget(),
    }
    assert SearchOptions(**further, **where).settings() == DEFAULT
    assert SearchOptions(int4="gptq").settings() == {**DEFAULT, "int4": "gptq"}
    assert {*further, *where} == study.SearchOptions.__dataclass_fields__.keys() - {
        {"warm starts": "warm", "logits processors": "logits_processor"}.get(name, name) for name in DEFAULT
    }


def test_text_as_on_the_command_line_means_what_values_mean():
    text = SearchOptions(controller="static:threshold=0.5", keep="15, 0")
    assert text.fixed == ControllerSpec(name="static", options={"threshold": 0.5})
    assert text.kept_layers == (0, 15)
    assert SearchOptions(controller=text.fixed, keep=[15, 0]).settings() == text.settings()


def test_guesses_are_for_selfspecs_own_drafts():
    assert SearchOptions().proposers == SearchOptions(drafters=" lookup ").proposers == (ProposerSpec(),)
    assert SearchOptions(drafters="none").proposers == ()
    assert SearchOptions(kv="own").proposers == SearchOptions(objective="wallclock").proposers == ()


def test_whole_numbers_of_any_kind_and_no_others():
    options = SearchOptions(trials=np.int64(3), seed=np.int32(2))
    assert (type(options.trials), type(options.settings()["seed"])) == (int, int)
    with pytest.raises(TypeError):
        SearchOptions(count=1.5)


def test_how_tokens_are_chosen():
    options = SearchOptions(max_new_tokens=8, temperature=0.5, top_k=3, top_p=0.9, rule="match")
    assert options.decoding == DecodingSettings(8, 0.5, 3, 0.9, (), "match")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"controller": "magic"}, "controller 'magic' is not known"),
        ({"controller": ControllerSpec(name="fixed", options={"k": 0})}, "expected a whole number"),
        ({"drafters": "look"}, "proposers 'look': expected lookup or none"),
        ({"drafters": ""}, "proposers '': expected lookup"),
        ({"keep": "first"}, "keep 'first': expected layer numbers such as 0,15"),
        ({"kv": "own", "objective": "wallclock"}, "kv 'own' needs the replay objective"),
        ({"objective": "wallclock", "modes": "full,int4", "int4": "gptq"}, "store and int4 need the replay objective"),
        ({"kv": "own", "store": "texts.store"}, "kv 'own': expected no store"),
        ({"modes": "full,int8", "int4": "gptq"}, "int4 'gptq': expected int4 among the modes, which are full,int8"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_there_is_a_model(options, message):
    with pytest.raises(SelfspecError, match=message):
        SearchOptions(**options)


def test_keywords_and_object_are_the_same(monkeypatch):
    monkeypatch.setattr(study, "run_search", lambda llm, options: (llm, options))
    assert find_profile("llm", ["a"], trials=3) == ("llm", SearchOptions(["a"], trials=3))
    assert find_profile("llm") == ("llm", SearchOptions())
    with pytest.raises(TypeError, match="trails"):
        find_profile("llm", trails=3)
    assert run_search.__name__ == "run_search"


def test_find_profile_shows_every_option_with_its_default():
    shown = inspect.signature(find_profile).parameters
    fields = list(dataclasses.fields(SearchOptions))
    assert [*shown] == ["llm", *(field.name for field in fields)]
    assert [p.default for p in shown.values()][1:] == [field.default for field in fields]
    assert shown["trials"].annotation is int
    assert shown["controller"].annotation == "ControllerSpec | str | None"


def test_sampling_from_nothing_is_greedy_as_in_generate():
    """`top_p` 0, and a temperature next to 0."""
    options = SearchOptions(top_p=0, temperature=0.7)
    assert (options.temperature, options.top_p) == (0.0, None)
    assert SearchOptions(temperature=1e-9).temperature == 0.0
    assert (SearchOptions(top_p=0.5, temperature=0.7).temperature, options.max_new_tokens) == (0.7, 64)
