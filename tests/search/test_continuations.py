from __future__ import annotations

import json

import pytest
from selfspec.search import continuations
from selfspec.search.continuations import Decoding, continue_prompts
from transformers.generation import RepetitionPenaltyLogitsProcessor

from selfspec.drafters import PlainDrafter

PROMPTS = ["import os\n", "class A:\n", "def f(x):\n"]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    return tmp_path / "continuations"


@pytest.fixture
def prompts(llm):
    return [llm.encode(prompt) for prompt in PROMPTS]


def decoded(llm, prompts, decoding, **options):
    """The texts, and which prompts were decoded for them."""
    seen = []
    return continue_prompts(llm, prompts, decoding, on_prompt=seen.append, **options), seen


def test_texts_are_the_models_own(llm, prompts, folder):
    texts, seen = decoded(llm, prompts, Decoding(6))
    assert seen == [0, 1, 2, 3]
    for prompt, text in zip(prompts, texts, strict=True):
        expected = llm.generate(prompt, max_new_tokens=6, drafter=PlainDrafter()).tokens
        assert text.tokens == (*prompt, *expected)
        assert (text.prompt, text.room, text.new) == (len(prompt), 6, len(expected))


def test_a_second_search_starts_at_once(llm, prompts, folder):
    first, _ = decoded(llm, prompts, Decoding(6, 0.8), seed=3)
    again, seen = decoded(llm, prompts, Decoding(6, 0.8), seed=3)
    assert again == first
    assert seen == [0, 3]


@pytest.mark.parametrize(
    "other",
    [
        {"decoding": Decoding(5)},
        {"decoding": Decoding(6, 0.8)},
        {"decoding": Decoding(6, 0.8, top_k=3)},
        {"decoding": Decoding(6, 0.8, top_p=0.5)},
        {"seed": 1},
        {"prompts": 2},
    ],
    ids=str,
)
def test_other_content_is_decoded(llm, prompts, folder, other):
    decoded(llm, prompts, Decoding(6))
    given = prompts[: other.pop("prompts", 3)]
    assert decoded(llm, given, **{"decoding": Decoding(6), **other})[1] == list(range(len(given) + 1))


def test_other_weights_are_noticed_even_where_the_fingerprint_does_not_see_them(llm, prompts, folder):
    decoded(llm, prompts, Decoding(6))
    (file,) = folder.iterdir()
    data = json.loads(file.read_text())
    file.write_text(json.dumps([[1, 2, 3], *data[1:]]))
    texts, seen = decoded(llm, prompts, Decoding(6))
    assert seen == [0, 1, 2, 3]
    assert [list(t.tokens[t.prompt :]) for t in texts] == data == json.loads(file.read_text())


@pytest.mark.parametrize("broken", ["", "{", "[]", "[[1]]", '[[1], [2], ["a"]]', "[[1], [2], []]", "null", "\udcff"])
def test_a_broken_cache_is_made_again(llm, prompts, folder, broken):
    expected, _ = decoded(llm, prompts, Decoding(3))
    (file,) = folder.iterdir()
    file.write_bytes(broken.encode("utf-8", "surrogateescape"))
    assert decoded(llm, prompts, Decoding(3))[0] == expected


def test_a_cache_that_cannot_be_written_is_done_without(llm, prompts, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "file"))
    assert len(decoded(llm, prompts, Decoding(3))[0]) == 3


def test_processors_are_used_and_nothing_is_kept(llm, prompts, folder):
    decoding = Decoding(8, logits_processor=(RepetitionPenaltyLogitsProcessor(5.0),))
    texts, _ = decoded(llm, prompts, decoding)
    assert texts != decoded(llm, prompts, Decoding(8))[0]
    assert decoded(llm, prompts, decoding)[1] == [0, 1, 2, 3]


def test_the_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("SELFSPEC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert continuations.cache_folder() == tmp_path / "selfspec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert continuations.cache_folder().parts[-2:] == (".cache", "selfspec")
