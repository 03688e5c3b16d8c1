from __future__ import annotations

import json

import pytest
from selfspec.search.budget import Deadline
from selfspec.search.continuations import FEWEST, DecodingSettings, continue_prompts
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
    """The texts, and how many tokens it was told of."""
    seen = []
    return continue_prompts(llm, prompts, decoding, on_token=seen.append, **options), seen


ALL = [*range(1, 13), 12]  # six tokens of the first prompt, then of the others, and at last everything
KNOWN = [*range(1, 7), 12]


def test_texts_are_the_models_own(llm, prompts, folder):
    texts, seen = decoded(llm, prompts, DecodingSettings(6))
    assert seen == ALL
    for prompt, text in zip(prompts, texts, strict=True):
        expected = llm.generate(prompt, max_new_tokens=6, drafter=PlainDrafter()).tokens
        assert text.tokens == (*prompt, *expected)
        assert (text.prompt_length, text.remaining, text.num_new_tokens) == (len(prompt), 6, len(expected))


def test_a_second_search_starts_at_once(llm, prompts, folder):
    first, _ = decoded(llm, prompts, DecodingSettings(6, 0.8), seed=3)
    again, seen = decoded(llm, prompts, DecodingSettings(6, 0.8), seed=3)
    assert again == first
    assert seen == KNOWN


@pytest.mark.parametrize(
    "other",
    [
        {"decoding": DecodingSettings(5)},
        {"decoding": DecodingSettings(6, 0.8)},
        {"decoding": DecodingSettings(6, 0.8, top_k=3)},
        {"decoding": DecodingSettings(6, 0.8, top_p=0.5)},
        {"seed": 1},
        {"prompts": 2},
    ],
    ids=str,
)
def test_other_content_is_decoded(llm, prompts, folder, other):
    decoded(llm, prompts, DecodingSettings(6))
    given = prompts[: other.pop("prompts", 3)]
    decoding = other.get("decoding", DecodingSettings(6))
    told = decoded(llm, given, **{"decoding": decoding, **other})[1]
    assert told == [*range(1, 2 * decoding.max_new_tokens + 1), 2 * decoding.max_new_tokens]


def test_other_weights_are_noticed_even_where_the_fingerprint_does_not_see_them(llm, prompts, folder):
    decoded(llm, prompts, DecodingSettings(6))
    (file,) = folder.iterdir()
    data = json.loads(file.read_text())
    file.write_text(json.dumps([[1, 2, 3], *data[1:]]))
    texts, seen = decoded(llm, prompts, DecodingSettings(6))
    assert seen == ALL
    assert [list(t.tokens[t.prompt_length :]) for t in texts] == data == json.loads(file.read_text())


@pytest.mark.parametrize("broken", ["", "{", "[]", "[[1]]", '[[1], [2], ["a"]]', "[[1], [2], []]", "null", "\udcff"])
def test_a_broken_cache_is_made_again(llm, prompts, folder, broken):
    expected, _ = decoded(llm, prompts, DecodingSettings(3))
    (file,) = folder.iterdir()
    file.write_bytes(broken.encode("utf-8", "surrogateescape"))
    assert decoded(llm, prompts, DecodingSettings(3))[0] == expected


def test_a_cache_that_cannot_be_written_is_done_without(llm, prompts, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "file"))
    assert len(decoded(llm, prompts, DecodingSettings(3))[0]) == 3


def test_processors_are_used_and_nothing_is_kept(llm, prompts, folder):
    decoding = DecodingSettings(8, logits_processor=(RepetitionPenaltyLogitsProcessor(5.0),))
    texts, _ = decoded(llm, prompts, decoding)
    assert texts != decoded(llm, prompts, DecodingSettings(8))[0]
    assert len(decoded(llm, prompts, decoding)[1]) == 2 * 8 + 1


class Ticking:
    """A clock that goes on by a second whenever it is looked at."""

    now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


def test_at_a_deadline_all_texts_end_after_as_many_tokens(llm, prompts, folder):
    whole, _ = decoded(llm, prompts, DecodingSettings(40))
    cut, _ = decoded(llm, prompts, DecodingSettings(40), deadline=Deadline(40.0, Ticking()))
    (room,) = {text.remaining for text in cut}
    assert FEWEST <= room < 40
    assert [text.tokens for text in cut] == [text.tokens[: text.prompt_length + room] for text in whole]
    again, seen = decoded(llm, prompts, DecodingSettings(room))
    assert again == cut
    assert len(seen) == room + 1, "the others were read back"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_that_are_cut_begin_as_whole_ones_do(llm, prompts, folder, temperature):
    late = Deadline(-1.0, lambda: 0.0)
    cut, _ = decoded(llm, prompts, DecodingSettings(12, temperature), deadline=late, seed=4)
    whole, _ = decoded(llm, prompts, DecodingSettings(12, temperature), seed=4)
    assert {text.num_new_tokens for text in cut} == {FEWEST}
    assert [text.tokens for text in cut] == [text.tokens[: text.prompt_length + FEWEST] for text in whole]
    assert [text.seed for text in cut] == [text.seed for text in whole]


def test_one_prompt_alone(llm, prompts, folder):
    texts, seen = decoded(llm, prompts[:1], DecodingSettings(6))
    assert [text.num_new_tokens for text in texts] == [6]
    assert seen == [*range(1, 7), 12]
