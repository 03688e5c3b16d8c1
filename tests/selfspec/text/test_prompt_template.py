from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.basics.errors import SelfspecError
from selfspec.text.prompt_template import PromptTemplate

CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "user", "content": "v"}]
ROW = {"prompt": "p", "text": "t", "n": 3, "turns": ["first", "second"], "blank": " ", "none": None, "a b": "ab"}
ROW |= {"messages": CHAT, "no user": CHAT[:1]}


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (PromptTemplate(), "p"),
        (PromptTemplate("text"), "t"),
        (PromptTemplate("turns"), "first"),
        (PromptTemplate("messages"), "u"),
        (PromptTemplate(template="Q: {messages}"), "Q: u"),
        (PromptTemplate("no user"), None),
        (PromptTemplate("n"), None),  # a column of numbers holds no prompts
        (PromptTemplate("blank"), None),
        (PromptTemplate("none"), None),
        (PromptTemplate("missing"), None),
        (PromptTemplate(template="{text}: {n}\n{text}"), "t: 3\nt"),
        (PromptTemplate(template="{{{turns}}}"), "{first}"),
        (PromptTemplate(template="{a b}!"), "ab!"),
        (PromptTemplate(template="{text}{blank}"), None),
        (PromptTemplate(template="{missing}"), None),
        (PromptTemplate("text", "{text}?"), "t?"),
    ],
)
def test_a_row_becomes_a_prompt(shape, text):
    assert shape.text(ROW) == text


def test_text_where_there_is_no_prompt():
    assert PromptTemplate().text({"text": "t"}) == "t"
    assert PromptTemplate().text({"messages": CHAT}) == "u"
    assert PromptTemplate().text({"prompt": None, "text": "t"}) is None


@pytest.mark.parametrize(
    ("column", "template", "message"),
    [
        ("", None, "the column's name is empty"),
        (None, "", "names no column"),
        (None, "{{text}}", "names no column"),
        (None, "{text", "expected '}'"),
        (None, "text}", "Single '}' encountered"),
        (None, "{}", "expected nothing but the name of a column"),
        (None, "{text.upper}", "expected nothing but the name of a column"),
        (None, "{text[0]}", "expected nothing but the name of a column"),
        (None, "{text!r}", "expected nothing but the name of a column"),
        (None, "{text:>{n}}", "expected nothing but the name of a column"),
        (None, "\ud800{text}", "not valid Unicode"),
        ("n", "{text}", "does not name the column 'n'"),
    ],
)
def test_wrong_templates(column, template, message):
    with pytest.raises(SelfspecError, match=message):
        PromptTemplate(column, template)


def test_the_columns_that_are_read():
    assert PromptTemplate().columns(["id", "text", "prompt"]) == ("prompt",)
    assert PromptTemplate().columns(["text"]) == ("text",)
    assert PromptTemplate(template="{b} {a} {b}").columns("abc") == ("b", "a")
    for shape in (PromptTemplate(), PromptTemplate("x"), PromptTemplate(template="{a}{x}")):
        with pytest.raises(SelfspecError, match=r"no column '(prompt|x)'.* \(there are: a, b\)"):
            shape.columns(["a", "b"])


columns = st.sampled_from(["prompt", "text", "n", "a b"])
pieces = st.text(st.characters(blacklist_categories=["Cs"]).filter(lambda c: c not in "{}"), max_size=5)


@given(st.lists(st.tuples(pieces, columns), min_size=1, max_size=4), pieces)
def test_a_template_is_filled_in_as_python_would(parts, end):
    template = "".join(before + "{" + name + "}" for before, name in parts) + end
    assert PromptTemplate(template=template).text(ROW) == template.format(**ROW)


@given(
    st.text(st.sampled_from(string.printable) | st.characters(), max_size=20) | st.text("{}[].!:n text", max_size=12)
)
def test_any_template_is_right_or_one_line(template):
    try:
        text = PromptTemplate(template=template).text(ROW)
    except SelfspecError as error:
        assert "\n" not in str(error)
    else:
        assert text is None or isinstance(text, str)
