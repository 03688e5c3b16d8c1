"""Which prompts a command uses: those named, else built-in ones as suit the model; and how many of each task."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from selfspec import builtin
from selfspec.text.prompt_files import CHAT, Prompts, prompts_for, read_prompts

MINE = Prompts("mine.txt", ("a", "b"))
QUESTIONS = Prompts("Spec-Bench (q.jsonl)", ("a", "b"), messages=True, tasks=("qa", "rag"))


@pytest.mark.parametrize("part", ["calibration", "heldout"])
def test_nothing_named(part):
    for_text, for_chats = (prompts_for(None, part, chat=False, takes_messages=takes) for takes in (False, True))
    assert for_text == Prompts("builtin", tuple(builtin.prompts(part)))
    assert (for_chats.source, for_chats.messages) == (CHAT, True)
    assert list(zip(for_chats.texts, for_chats.tasks, strict=True)) == builtin.chat_prompts(part)


@pytest.mark.parametrize("takes", [False, True])
def test_what_is_named_is_used_as_the_user_says(takes):
    assert prompts_for(MINE, "heldout", chat=False, takes_messages=takes) == MINE
    assert prompts_for(MINE, "heldout", chat=True, takes_messages=takes).messages
    assert prompts_for(QUESTIONS, "heldout", chat=False, takes_messages=takes).messages == takes


def test_some_of_them():
    letters = Prompts("s", tuple("abcde"))
    assert letters.some(3).texts == tuple("abc")
    assert letters.some(3, last=True).texts == tuple("cde")
    assert letters.some(9) == letters


def test_some_of_each_task():
    given = Prompts("s", tuple("abcdefg"), tasks=("x", "x", "x", "y", "x", "z", "z"))
    assert given.some(3).texts == ("a", "d", "f")
    assert given.some(3, last=True).texts == ("d", "e", "g")
    five = given.some(5)
    assert (five.texts, five.tasks) == (("a", "b", "d", "f", "g"), ("x", "x", "y", "z", "z"))
    assert given.some(7) == given


def test_twelve_built_in_ones_are_of_every_task():
    some = prompts_for(None, "heldout", chat=False, takes_messages=True).some(12, last=True)
    assert set(Counter(some.tasks).values()) == {1, 2}
    assert len(set(some.tasks)) == 7


@pytest.mark.parametrize(
    ("rows", "tasks"),
    [
        ([{"prompt": "a", "task": "qa"}, {"prompt": "b", "task": "code"}], ("qa", "code")),
        ([{"prompt": "a", "category": "qa"}, {"prompt": "b", "task": "code", "category": "qa"}], ("qa", "code")),
        ([{"prompt": "a", "task": "qa"}, {"prompt": "b"}], ()),
        ([{"prompt": "a", "task": 3}], ()),
        ([{"prompt": "a", "task": "q\na"}], ()),
        ([{"prompt": "a", "task": " "}], ()),
        ([{"prompt": "a"}], ()),
    ],
)
def test_tasks_that_a_file_names(tmp_path, rows, tasks):
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts(tmp_path / "p.jsonl").tasks == tasks
