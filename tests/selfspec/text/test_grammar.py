"""Grammars that would take any amount of time or memory: each is refused in a line, and none in this process."""

from __future__ import annotations

import string
import sys

import pytest
from wants import needs

from selfspec.basics.errors import SelfspecError
from selfspec.text import grammar
from selfspec.text.grammar import check_grammar
from selfspec.text.guided import check_guide

pytestmark = needs("llguidance", "llguidance")


def schema(**keywords):
    return {"regex": None, "json_schema": keywords}


@pytest.mark.parametrize(
    "json_schema",
    [
        {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in string.ascii_letters[:24]]},
        {"type": "integer", "multipleOf": 999_983},  # only making its matcher takes long
    ],
    ids=["an intersection of patterns", "a large divisor"],
)
def test_what_never_ends_is_ended(monkeypatch, json_schema):
    monkeypatch.setattr(grammar, "SECONDS", 0.5)  # the child's own limit of processor time ends it as well, but later
    with pytest.raises(SelfspecError, match="^JSON schema: too complex: .* expected a simpler one$"):
        check_guide(json_schema=json_schema)


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (schema(properties={f"p{n}": {} for n in range(8000)}), "8000 property names are too many; expected at most"),
        (schema(required=[f"p{n}" for n in range(8000)]), "8000 property names are too many; expected at most 2000"),
        (schema(anyOf=[{"pattern": "a"}] * 600), "600 patterns are too many; expected at most 500"),
        (schema(enum=[f"v{n}" for n in range(50_000)]), "initial lexer configuration (grammar) too big"),
        (schema(**{"$ref": "http://127.0.0.1:1/x.json"}), "Resource 'http://127.0.0.1:1/x.json' is not present"),
        (schema(**{"$ref": "#"}), "no text matches it"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000, "json_schema": None}, "exceed the maximum number of nested"),
        ({"regex": "|".join(f"w{n}x{n * 7}" for n in range(40_000)), "json_schema": None}, "initial lexer"),
    ],
    ids=["properties", "required", "patterns", "enum", "remote", "itself", "nested", "long"],
)
def test_large_grammars_are_refused(request_, problem):
    assert (check_grammar(**request_).problem or "").startswith(problem)


@pytest.mark.parametrize(
    "request_",
    [
        {"regex": "(a+)+", "json_schema": None},
        {"regex": "a{1000000000}", "json_schema": None},  # its text is as long as there is room
        schema(type="string", maxLength=10**9),
        schema(properties={f"p{n}": {"type": "integer"} for n in range(500)}, required=["p1"]),
        schema(type="object", properties={"next": {"$ref": "#"}}),
    ],
    ids=["nested repeats", "long", "long string", "properties", "recursive"],
)
def test_others_are_not(request_):
    assert check_grammar(**request_).problem is None


def test_a_schema_that_contains_itself_is_refused():
    loop: dict[str, object] = {}
    loop["not"] = loop
    with pytest.raises(SelfspecError, match=r"^JSON schema: .*Circular reference"):
        check_guide(json_schema=loop)
    with pytest.raises(SelfspecError, match="^JSON schema: nested too deeply"):
        check_guide(json_schema='{"not":' * 5000 + "{}" + "}" * 5000)


def test_a_process_that_fails_is_told(monkeypatch):
    for where, what, pattern in (
        (grammar, "__file__", "not checked before"),
        (sys, "executable", "nor this one"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, what, "/nothing.py")
            assert "failed" in (check_grammar(regex=pattern, json_schema=None).problem or "")
        assert check_grammar(regex=pattern, json_schema=None).problem is None, "the failure was not the pattern's"
