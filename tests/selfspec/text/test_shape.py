from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.basics.errors import SelfspecError
from selfspec.text.shape import Shape

CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "user", "content": "v"}]
ROW = {"prompt": "p", "text": "t", "n": 3, "turns": ["first", "second"], "blank": " ", "none": None, "a b": "ab"}
ROW |= {"messages": CHAT, "no user": CHAT[:1]}


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (Shape(), "p"),
        (Shape("text"), "t"),
        (Shape("turns"), "first"),
        (Shape("messages"), "u"),
        (Shape(template="Q: {messages}"), "Q: u"),
        (Shape("no user"), None),
        (Shape("n"), None),  # a column of numbers holds no prompts
        (Shape("blank"), None),
        (Shape("none"), None),
        (Shape("missing"), None),
        (Shape(template="{text}: {n}\n{text}"), "t: 3\nt"),
        (Shape(template="{{{turns}}}"), "{first}"),
        (Shape(template="{a b}!"), "ab!"),
        (Shape(template="{text}{blank}"), None),
        (Shape(template="{missing}"), None),
        (Shape("text", "{text}?"), "t?"),
    ],
)
def test_a_row_becomes_a_prompt(shape, text):
    assert shape.text(ROW) == text


def test_text_where_there_is_no_prompt():
    assert Shape().text({"text": "t"}) == "t"
    assert Shape().text({"messages": CHAT}) == "u"
    assert Shape().text({"prompt": None, "text": "t"}) is None


@pytest.mark.parametrize(
    ("column", "template", "message"),
    [
        ("", None, "the column's name is empty"),
        (None, "", "names no column"),
        (None, "{{text}}", "names no column"),
        (None, "{text", "expected '}'"),
        (None, "text}", "Single '}' encountered"),
        (None, "{}", "want nothing but the name of a column"),
        (None, "{text.upper}", "want nothing but the name of a column"),
        (None, "{text[0]}", "want nothing but the name of a column"),
        (None, "{text!r}", "want nothing but the name of a column"),
        (None, "{text:>{n}}", "want nothing but the name of a column"),
        (None, "\ud800{text}", "not valid Unicode"),
        ("n", "{text}", "does not name the column 'n'"),
    ],
)
def test_wrong_templates(column, template, message):
    with pytest.raises(SelfspecError, match=message):
        Shape(column, template)


def test_the_columns_that_are_read():
    assert Shape().columns(["id", "text", "prompt"]) == ("prompt",)
    assert Shape().columns(["text"]) == ("text",)
    assert Shape(template="{b} {a} {b}").columns("abc") == ("b", "a")
    for shape in (Shape(), Shape("x"), Shape(template="{a}{x}")):
        with pytest.raises(SelfspecError, match=r"no column '(prompt|x)'.* \(there are: a, b\)"):
            shape.columns(["a", "b"])


columns = st.sampled_from(["prompt", "text", "n", "a b"])
pieces = st.text(st.characters(blacklist_categories=["Cs"]).filter(lambda c: c not in "{}"), max_size=5)


@given(st.lists(st.tuples(pieces, columns), min_size=1, max_size=4), pieces)
def test_a_template_is_filled_in_as_python_would(parts, end):
    template = "".join(before + "{" + name + "}" for before, name in parts) + end
    assert Shape(template=template).text(ROW) == template.format(**ROW)


@given(
    st.text(st.sampled_from(string.printable) | st.characters(), max_size=20) | st.text("{}[].!:n text", max_size=12)
)
def test_any_template_is_right_or_one_line(template):
    try:
        text = Shape(template=template).text(ROW)
    except SelfspecError as error:
        assert "\n" not in str(error)
    else:
        assert text is None or isinstance(text, str)
