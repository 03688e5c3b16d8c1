"""Which prompts a command uses: those named, else built-in ones as suit the model; and how many of each task.

Spec-Bench's questions as its own file has them, and one clear line for whatever is no such file.
"""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter

import pytest
from selfspec.search.continuations import choose

from selfspec import builtin
from selfspec.basics.errors import SelfspecError
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
    assert letters.subset(3).texts == tuple("abc")
    assert letters.subset(3, last=True).texts == tuple("cde")
    assert letters.subset(9) == letters


def test_some_of_each_task():
    given = Prompts("s", tuple("abcdefg"), tasks=("x", "x", "x", "y", "x", "z", "z"))
    assert given.subset(3).texts == ("a", "d", "f")
    assert given.subset(3, last=True).texts == ("d", "e", "g")
    five = given.subset(5)
    assert (five.texts, five.tasks) == (("a", "b", "d", "f", "g"), ("x", "x", "y", "z", "z"))
    assert given.subset(7) == given


def test_twelve_built_in_ones_are_of_every_task():
    some = prompts_for(None, "heldout", chat=False, takes_messages=True).subset(12, last=True)
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


def test_a_long_file_is_read_line_by_line(tmp_path):
    """Only where its lines stand is held."""
    path = tmp_path / "long.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(6000):
            file.write(json.dumps({"prompt": f"{number} \u00e9 " + "x" * 2000}) + "\n\n")
    tracemalloc.start()
    try:
        texts = read_prompts(path).texts
        chosen = choose(Prompts("long", texts), source="", count=8, seed=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 2
    assert (len(chosen.search), chosen.available) == (8, 6000)
    assert [text[:6] for text in (texts[0], texts[7], texts[-1])] == ["0 \u00e9 xx", "7 \u00e9 xx", "5999 \u00e9"]
    assert [text[:2] for text in texts[3:5]] == ["3 ", "4 "]
    held = tuple(texts)
    assert texts == held
    assert texts != held[1:]
    assert choose(held, source="", count=8, seed=0).search == chosen.search
    path.write_text("x\n" * 10**6)
    with pytest.raises(SelfspecError, match=r"long\.jsonl, line 3: not valid JSON"):
        texts[1]
    path.unlink()
    with pytest.raises(SelfspecError, match="no such file"):
        texts[1]


@pytest.mark.parametrize(("suffix", "line"), [(".txt", "{}"), (".jsonl", '{{"text": "{}"}}')])
def test_where_lines_stand(tmp_path, suffix, line):
    """With a mark at the file's beginning, both ends of lines, blank ones, and none at the end."""
    path = tmp_path / f"a{suffix}"
    rows = ["", *(line.format(text) for text in "a\u00e9\u4e2d"), " ", line.format("z")]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    texts = read_prompts(path).texts
    assert list(texts) == [texts[i] for i in range(4)] == ["a", "\u00e9", "\u4e2d", "z"]
    path.write_bytes(path.read_bytes() + b"\n\xff")
    at = len(path.read_bytes()) - 1
    with pytest.raises(SelfspecError, match=rf"not UTF-8 text \(byte {at}\)"):
        read_prompts(path)
