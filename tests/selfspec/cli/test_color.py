from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from selfspec.cli import color
from selfspec.cli.color import colored, legend, show
from selfspec.profile.draft_spec import LayerSkipSpec
from selfspec.profile.schema import Profile
from selfspec.types.draft_path import DraftPath, SkipSet
from selfspec.types.events import Origin, TokenEvent
from selfspec.types.identity import Identity
from selfspec.types.stats import Stats

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t[]/"), max_size=12)


def terminal(width=40, **options):
    options = {"color_system": "truecolor", "no_color": False, **options}
    console = Console(file=io.StringIO(), force_terminal=True, width=width, _environ={}, **options)
    return console, lambda: console.file.getvalue()


def events(*origins):
    return [TokenEvent(i, f"t{i}", origin, i + 1) for i, origin in enumerate(origins)]


@given(st.lists(st.tuples(st.sampled_from(Origin), TEXTS), max_size=8))
def test_without_the_colours_it_is_the_text(pieces):
    """Nothing is wrapped at 40 columns, no markup is read, and tabs stay."""
    console, written = terminal()
    for origin, text in pieces:
        show(console, origin, text)
    assert ESCAPES.sub("", written()) == "".join(text for _, text in pieces)


@pytest.mark.parametrize("text", ["[bold]x[/bold]", "[/]", "\\[red]", ":smile:", "x" * 100, "a\n\n\tb "])
def test_what_rich_would_change_stays(text):
    console, written = terminal()
    show(console, Origin.CORRECTED, text)
    assert written() == f"\x1b[1;38;2;213;94;0m{text}\x1b[0m"


def test_a_terminal_acts_on_nothing_in_the_text():
    console, written = terminal()
    show(console, Origin.PLAIN, "\x1b[31m\a\r\b\x7f\x9b0m\0")
    assert written() == "␛[31m␇␍␈␡\ufffd0m␀"


def test_each_origin_is_told_apart():
    def styles(**options):
        console, written = terminal(**options)
        for origin in Origin:
            show(console, origin, "x ")
        return written().split("x ")[: len(Origin)]

    assert styles() == [
        "",
        "\x1b[3;38;2;0;158;115m",
        "\x1b[0m\x1b[4;38;2;0;114;178m",
        "\x1b[0m\x1b[3;4;38;2;86;180;233m",
        "\x1b[0m\x1b[1;38;2;213;94;0m",
        "\x1b[0m\x1b[1;3;38;2;204;121;167m",
    ]
    for options in ({"color_system": "256"}, {"color_system": "standard"}, {"no_color": True}):
        assert len(set(styles(**options))) == len(Origin)
    assert styles(no_color=True) == [
        *("", "\x1b[3m", "\x1b[0m\x1b[4m", "\x1b[0m\x1b[3;4m", "\x1b[0m\x1b[1m", "\x1b[0m\x1b[1;3m")
    ]


def test_the_legend_in_narrow_and_wide_terminals():
    given = events(*[Origin.ACCEPTED_DRAFT] * 6, Origin.ACCEPTED_CANDIDATE, Origin.CORRECTED)
    console, written = terminal(40)
    legend(console, given, Stats(drafted=11, accepted=7))
    narrow = ESCAPES.sub("", written()).splitlines()
    assert [line.rstrip() for line in narrow] == [
        "accepted draft      6  75%",
        "accepted candidate  1  12%",
        "corrected           1  12%",
        "acceptance 64% (7 of 11 drafted)",
    ]
    console, written = terminal(80)
    legend(console, given, Stats(drafted=11, accepted=7))
    lines = ESCAPES.sub("", written()).splitlines()
    assert len(lines) == len(narrow)
    assert lines[2].rstrip() == "corrected           1  12%  the model's own, for a rejected token"


def test_a_legend_of_nothing():
    console, written = terminal()
    legend(console, [], Stats())
    assert written() == "nothing was drafted\n"


def test_in_a_table():
    console, written = terminal()
    text = colored(console, [TokenEvent(1, "[bold]", Origin.PLAIN, 1), TokenEvent(2, "\x1b[2J", Origin.BONUS, 2)])
    table = Table.grid()
    table.add_row(text)
    console.print(table)
    assert ESCAPES.sub("", written()) == "[bold]␛[2J\n"
    assert "[bold]\x1b[1;3;38;" in written(), "in which colours a style is written, rich remembers from other consoles"


def test_the_legend_says_what_drafted_in_few_bits():
    given = events(Origin.ACCEPTED_DRAFT)

    def said(path, drafted=1):
        console, written = terminal(120)
        profile = Profile(model=Identity(layers=4), draft=LayerSkipSpec.from_path(path))
        legend(console, given, Stats(drafted=drafted, accepted=drafted), profile)
        return written().splitlines()[-1]

    path = DraftPath(SkipSet((1,)), int8=SkipSet((), (2,)), head="int4")
    how = "1 sub-layer in int8, 1 skipped, the head in int4"
    assert said(path) == f"acceptance 100% (1 of 1 drafted); drafts ran with {how}"
    assert said(path, drafted=0) == "nothing was drafted"
    assert said(DraftPath(path.skip)) == "acceptance 100% (1 of 1 drafted)"


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_are_signs_on_a_terminal_alone(monkeypatch, capsys, terminal):
    """Such as OSC 52, which writes to the clipboard. In pipes and files the text is unchanged."""
    text = "a\x1b]52;c;aGk=\x07\tb\x9b\n"
    color._put(Console(force_terminal=terminal), None, text)
    out = capsys.readouterr().out
    assert out == ("a\u241b]52;c;aGk=\u2407\tb\ufffd\n" if terminal else text)
