"""The built-in requests to an assistant: how many of which task, that none is there twice, and what is said of them."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from fnmatch import fnmatch
from importlib import resources
from itertools import combinations
from pathlib import Path

import pytest

from selfspec import builtin

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("calibration", "heldout")
NINE, EIGHT = ("arithmetic", "code", "question", "writing"), ("extraction", "summary", "translation")
ALL = [(part, prompt) for part in PARTS for prompt, _ in builtin.chat_prompts(part)]


def fours(text):
    """Runs of four words."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 4]) for i in range(len(words) - 3)}


@pytest.mark.parametrize("part", PARTS)
def test_tasks_are_balanced(part):
    rows = builtin.chat_prompts(part)
    assert len(rows) == 60
    assert Counter(task for _, task in rows) == {**dict.fromkeys(NINE, 9), **dict.fromkeys(EIGHT, 8)}
    assert len({task for _, task in rows[:20]}) >= 5, "shuffled: the first twenty are of most tasks"


def test_none_is_there_twice_nor_nearly():
    alike = {}
    for (_, one), (_, other) in combinations(ALL, 2):
        a, b = fours(one), fours(other)
        if a and b and len(a & b) > min(len(a), len(b)) / 4:
            alike[one[:40]] = other[:40]
    assert alike == {}
    assert len({prompt for _, prompt in ALL}) == 120


def test_they_are_of_many_lengths():
    lengths = [len(prompt.split()) for _, prompt in ALL]
    assert min(lengths) < 12
    assert 100 < max(lengths) < 180
    assert all(prompt == prompt.strip() for _, prompt in ALL)


def test_they_are_in_the_wheel_and_the_readme_says_what_they_are():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    readme = (resources.files("selfspec.builtin") / "README.md").read_text("utf-8")
    for part in PARTS:
        name = f"chat-{part}.jsonl"
        assert any(fnmatch(name, pattern) for pattern in data["selfspec.builtin"])
        assert f"`{name}`" in readme
    assert "Apache-2.0" in readme
    assert all(f"`{task}`" in readme for task in (*NINE, *EIGHT))
