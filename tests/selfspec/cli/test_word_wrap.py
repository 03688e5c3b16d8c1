"""Lines end between words, however the text comes."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from selfspec.cli.color import WordWrapper

TEXTS = st.text(st.sampled_from("ab \t\n") | st.characters(exclude_categories=["Cs", "Cc"]), max_size=60)


def folded(pieces, width=10):
    folding, shown = WordWrapper(width), []
    for number, piece in enumerate(pieces):
        shown += folding.feed(number, piece)
    return [*shown, *folding.end()]


def text_of(shown):
    return "".join(text for _, text in shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three four", "one two\nthree four"),
        ("1234567890", "1234567890"),
        ("1234567890 1", "1234567890\n1"),
        ("12345 12345", "12345\n12345"),
        ("12345 1234", "12345 1234"),
        ("a 1234567890123 b", "a\n1234567890123 b"),  # which the terminal folds itself
        ("  indented by four", "  indented\nby four"),
        ("one  \ntwo \n\nthree", "one  \ntwo \n\nthree"),
        ("a\tb", "a\tb"),
        ("a\tbcd", "a\nbcd"),
        ("end ", "end "),
        ("木木木木木木", "木木木木木木"),
        ("ab 木木木木木", "ab 木木木木木"),
        ("", ""),
    ],
    ids=repr,
)
def test_where_lines_end(text, shown):
    assert text_of(folded([text])) == shown


@given(TEXTS, st.lists(st.integers(0, 60), max_size=8))
def test_it_is_the_same_in_any_pieces(text, cuts):
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert text_of(folded(pieces)) == text_of(folded([text]))


@given(TEXTS, st.integers(3, 20))
def test_only_gaps_become_ends_of_lines(text, width):
    """Nothing else is lost or added, and a line that is too long has no gap that could have been one."""
    shown = text_of(folded([text], width))
    assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", text)
    for line in shown.split("\n"):
        if "\t" not in line and cell_len(line.rstrip()) > width:
            words = re.split(r"[^\S\n]+", line.strip())
            assert any(cell_len(word) > width for word in words) or line[0].isspace() or max(line) >= "\u2e80"


def test_each_part_stays_with_its_piece():
    """A word of several pieces comes when it is complete, and goes to the next line as a whole."""
    folding = WordWrapper(8)
    assert list(folding.feed("a", "one ")) == [("a", "one")]
    assert list(folding.feed("b", "tw")) == []
    assert list(folding.feed("c", "o")) == []
    assert list(folding.feed("d", " t")) == [("a", " "), ("b", "tw"), ("c", "o"), ("d", "\n"), ("d", "t")]
    assert list(folding.feed("d", "en\n")) == [("d", "en"), ("d", "\n")]
    assert list(folding.feed("e", "1234567")) == []
    assert list(folding.feed("f", "89")) == [("e", "1234567"), ("f", "89")]  # longer than a line: nothing to wait for
    assert list(folding.end()) == []
