from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from selfspec.builtin import model_folder
from selfspec.text.detokenizer import MULTIPLE, TextStream, frequent

TOKENIZER = AutoTokenizer.from_pretrained(model_folder())
PROMPT = TOKENIZER("x = ").input_ids


def stream(tokens, stop=()):
    """Pieces as they come, and the whole text."""
    text, pieces = TextStream(TOKENIZER, PROMPT, stop), []
    for token in tokens:
        ended = text.push(token)
        pieces.append(text.take())
        if ended:
            break
    text.finish()
    return [*pieces, text.take()], text.text


@given(st.text(max_size=60))
def test_pieces_make_the_text(text):
    pieces, whole = stream(TOKENIZER(text).input_ids)
    assert "".join(pieces) == whole == text


@given(st.lists(st.integers(0, 4095), max_size=30))
def test_any_tokens_give_what_the_tokenizer_gives(tokens):
    _, whole = stream(tokens)
    prompt = TOKENIZER.decode(PROMPT)
    assert prompt + whole == TOKENIZER.decode([*PROMPT, *tokens], skip_special_tokens=True)


def test_incomplete_characters_are_held_back():
    tokens = TOKENIZER("é€😀").input_ids
    assert len(tokens) > 3
    pieces, whole = stream(tokens)
    assert whole == "é€😀"
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_that_began_in_the_prompt_is_completed():
    first, *rest = TOKENIZER("é").input_ids
    text = TextStream(TOKENIZER, [first])
    for token in rest:
        text.push(token)
    text.finish()
    assert text.text == "é"


@pytest.mark.parametrize("prompt", ["a \ufffd", "\ufffd", "\ufffd\ufffd"])
def test_a_prompt_that_ends_in_a_replacement_character_keeps_it(prompt):
    text = TextStream(TOKENIZER, TOKENIZER(prompt).input_ids)
    pieces = []
    for token in TOKENIZER("bcé").input_ids:
        text.push(token)
        pieces.append(text.take())
    text.finish()
    assert "".join(pieces) == text.text == "bcé"
    assert text.texts(len(pieces), "bcé") == pieces
    assert text.text_of(0, TOKENIZER("b").input_ids[0]) == "b"


def test_a_character_of_the_prompt_that_the_text_does_not_complete_is_the_prompts():
    first, *_ = TOKENIZER("é").input_ids
    text = TextStream(TOKENIZER, [first])
    for token in TOKENIZER("bc").input_ids:
        text.push(token)
    text.finish()
    assert text.text == "bc"


def test_a_character_that_is_never_completed_shows_at_the_end():
    tokens = TOKENIZER("a😀").input_ids[:-1]
    pieces, whole = stream(tokens)
    assert pieces[0] == "a"
    assert whole == "a\ufffd"


def test_the_text_ends_before_the_first_stop_string():
    tokens = TOKENIZER("return value\nraise Error").input_ids
    assert stream(tokens, ["raise"])[1] == "return value\n"
    assert stream(tokens, ["Error", "\n"])[1] == "return value"
    assert stream(tokens, ["nothing"])[1] == "return value\nraise Error"


def test_what_was_held_back_is_released_at_the_end():
    tokens = [t for word in ("a", "<", "/") for t in TOKENIZER(word).input_ids]
    pieces, whole = stream(tokens, ["</s>"])
    assert pieces == ["a", "", "", "</"]
    assert whole == "a</"


class Words:
    """A tokenizer whose tokens are the words of a list."""

    def __init__(self, *words):
        self.words = words

    def decode(self, tokens, *, skip_special_tokens):
        return "".join(self.words[token] for token in tokens)


@pytest.mark.parametrize("stops", [["<2>", "<1>"], ["<1>", "<2>"]])
def test_of_two_stop_strings_that_one_token_completes_the_earlier_ends_the_text(stops):
    text = TextStream(Words("a", "b<1>c<2>d"), [0], stops)
    assert text.push(1)
    text.finish()
    assert text.text == "b"


def test_a_possible_beginning_of_a_stop_string_is_held_back():
    tokens = [t for word in ("a", "<", "/", "b") for t in TOKENIZER(word).input_ids]
    pieces, whole = stream(tokens, ["</s>"])
    assert pieces == ["a", "", "", "</b", ""]
    assert whole == "a</b"


@given(st.text("ab<>", max_size=20), st.lists(st.text("ab<>", min_size=1, max_size=3), max_size=3))
def test_stopping_is_cutting_at_the_first_stop_string(text, stops):
    """Token by token the earliest completed stop string wins, so look at each prefix of the text in turn."""
    tokens = [t for char in text for t in TOKENIZER(char).input_ids]
    expected = text
    for end in range(len(text) + 1):
        found = [at for at in (text[:end].find(stop) for stop in stops) if at >= 0]
        if found:
            expected = text[: min(found)]
            break
    pieces, whole = stream(tokens, stops)
    assert whole == expected == "".join(pieces)


@pytest.mark.parametrize("special", [0])
def test_special_tokens_are_not_shown(special):
    assert stream([*TOKENIZER("a").input_ids, special])[1] == "a"


@given(st.text(max_size=40), st.integers(1, 7))
def test_taking_rarely_gives_the_same_text(text, every):
    tokens = TOKENIZER(text).input_ids
    rarely, pieces = TextStream(TOKENIZER, PROMPT), []
    for number, token in enumerate(tokens):
        assert not rarely.push(token)
        if number % every == 0:
            pieces.append(rarely.take())
    rarely.finish()
    assert "".join([*pieces, rarely.take()]) == rarely.text == text
    never = TextStream(TOKENIZER, PROMPT)
    for token in tokens:
        never.push(token)
    never.finish()
    assert never.text == text


TEXTS = [[5, 5, 5, 2, 2, 9], [9, 9, 7]]


def test_the_most_frequent_tokens():
    assert frequent(TEXTS, 1, 12) == [5]
    assert frequent(TEXTS, 2, 12) == [5, 9]
    assert frequent(TEXTS, 4, 12) == [2, 5, 7, 9]


def test_what_texts_do_not_hold_is_taken_from_the_lowest():
    assert frequent(TEXTS, 6, 12) == [0, 1, 2, 5, 7, 9]
    assert frequent([], 3, 12) == [0, 1, 2]


def test_as_many_as_products_in_few_bits_like_but_no_more_than_there_are():
    assert len(frequent(TEXTS, 3 * MULTIPLE + 5, 1000)) == 3 * MULTIPLE
    assert frequent(TEXTS, 99, 12) == list(range(12))


@given(st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=5), st.integers(1, 60), st.randoms())
def test_no_token_left_out_comes_more_often(texts: list[list[int]], most: int, draw: random.Random):
    taken = frequent(texts, most, 41)
    assert taken == sorted({*taken})
    flat = [token for text in texts for token in text]
    left = {*range(41)} - {*taken}
    assert not left or min(flat.count(token) for token in taken) >= max(flat.count(token) for token in left)
    draw.shuffle(flat)
    assert frequent([flat], most, 41) == taken
