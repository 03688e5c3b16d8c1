"""The text that a grammar forces, in the tokenizer's own tokens."""

from __future__ import annotations

import pytest
from wants import needs

from selfspec.text.guided import LITERALS, Guide, schema_literals

pytestmark = needs("llguidance", "llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "genre": {"enum": ["novel", "poetry"]},
        "author": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        "sold": {"type": "boolean"},
    },
    "required": ["genre", "author", "sold"],
    "additionalProperties": False,
}
SCHEMA["properties"]["author"]["additionalProperties"] = False
PROMPT = [5, 6, 7]


def proposed(llm, text, most=40, **grammar):
    ends = llm.runtime.skeleton.ends
    continuation = llm.guide(**grammar).continuation(len(PROMPT), ends)
    found = continuation.propose([*PROMPT, *llm.encode(text)] if text else PROMPT, most)
    return llm.tokenizer.decode(found), found


@pytest.mark.parametrize(
    ("text", "forced"),
    [
        ("", "{"),
        ("{", ""),  # a space may follow, and the text has shown no layout
        ('{"', 'genre": "'),
        ('{\n  "', 'genre": "'),
        ('{\n  "genre": "no', 'vel",\n  "author": {\n    "name": "'),
        ('{"genre":"no', 'vel", "author":{"name":"'),
        ('{"genre": "poetry", "author": {"name": "A', ""),  # the model's to say
        ('{"genre": "poetry", "author": {"name": "A"', '}, "sold":'),
    ],
)
def test_keys_enum_values_and_punctuation(llm, text, forced):
    assert proposed(llm, text, json_schema=SCHEMA)[0] == forced


def test_a_complete_text_ends(llm):
    (end,) = llm.runtime.skeleton.ends
    text = '{"genre": "novel", "author": {"name": "A"}, "sold": tr'
    assert proposed(llm, text, json_schema=SCHEMA)[1] == [*llm.encode("ue}"), end]


def test_a_regular_expression_forces_too(llm):
    assert proposed(llm, "def re", regex=r"def (read|write)\(self\):")[0].startswith("ad(self):")
    assert proposed(llm, "def ", regex=r"def (read|write)\(self\):")[1] == []


def test_no_more_than_asked_for_and_any_prefix_at_any_time(llm):
    continuation = llm.guide(json_schema=SCHEMA).continuation(0, llm.runtime.skeleton.ends)
    before = llm.encode('{"genre": "novel", "author')
    whole = continuation.propose(before, 9)
    assert llm.tokenizer.decode(whole) == '": {"name": "'
    assert continuation.propose(before, 2) == whole[:2]
    assert continuation.propose(before, 0) == []
    assert continuation.propose(llm.encode("novel"), 9) == []  # the grammar rejects it
    assert llm.tokenizer.decode(continuation.propose([], 9)) == "{"
    assert continuation.propose(before, 9) == whole


def test_literals_of_a_schema(llm):
    """Keys, enum values and constants, each once and in order; a regular expression spells out none."""
    part = {"type": "object", "properties": {"genre": {"const": 7}, "é": {"enum": [None, "novel", {"a": 1}]}}}
    schema = {**SCHEMA, "$defs": {"part": part, "enum": {"const": "x"}}}
    expected = [
        '"genre":',
        '"author":',
        '"sold":',
        '"novel"',
        '"poetry"',
        '"name":',
        '"é":',
        "7",
        "null",
        '{"a": 1}',
        '"x"',
    ]
    assert list(dict.fromkeys(schema_literals(schema))) == expected
    continuation = llm.guide(json_schema=schema).continuation(0, llm.runtime.skeleton.ends)
    assert llm.tokenizer.decode(continuation.literals) == " " + " ".join(expected)
    assert not llm.guide(regex="[a-z]+").continuation(0, llm.runtime.skeleton.ends).literals


def test_no_more_literals_than_are_worth_reading(llm):
    guide = llm.guide(json_schema={"enum": [f"word {i}" for i in range(2_000)]})
    assert len(guide.continuation(0, llm.runtime.skeleton.ends).literals) == LITERALS


def test_of_several_ends_none_is_proposed(llm):
    guide = Guide(llm.tokenizer, ends=frozenset([0, 7]), regex="yes")
    text = llm.encode("y")
    assert llm.tokenizer.decode(guide.continuation(0, frozenset([0, 7])).propose(text, 9)) == "es"
    assert guide.continuation(0, frozenset([7])).propose(text, 9)[-1] == 7
