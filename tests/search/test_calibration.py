from __future__ import annotations

import json

import pytest
import torch
from amount import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selfspec.search.calibration import choose, record

from selfspec.basics.errors import SelfspecError
from selfspec.text.prompt_files import Prompts, read_prompts


def write(folder, name, text):
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_jsonl_rows_prefer_prompt_to_text(tmp_path):
    rows = [{"prompt": "a", "text": "b"}, {"text": "c\nd"}, {"prompt": "é", "id": 1}]
    path = write(tmp_path, "p.jsonl", "\n\n".join(json.dumps(row) for row in rows))
    assert read_prompts(path).texts == ("a", "c\nd", "é")


def test_txt_is_one_prompt_a_line(tmp_path):
    found = read_prompts(write(tmp_path, "p.TXT", "a\n\n  b c\r\n"))
    assert found == Prompts("p.TXT", ("a", "  b c"))


def test_columns_and_templates(tmp_path):
    path = write(tmp_path, "p.jsonl", '{"q": "a", "n": 1}\n{"q": ["b", "c"], "n": 2.5, "text": "d"}')
    assert read_prompts(path, column="q").texts == ("a", "b")
    assert read_prompts(path, template="{n}: {q}\n") == Prompts("p.jsonl", ("1: a\n", "2.5: b\n"), None, "{n}: {q}\n")
    lines = write(tmp_path, "p.txt", "a\nb")
    assert read_prompts(lines, template="{text}!").texts == ("a!", "b!")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("p.jsonl", {"column": "n"}, r"p\.jsonl, line 1: expected an object whose 'n' is a text that is not empty"),
        ("p.jsonl", {"column": "text"}, r"line 2: expected an object whose 'text' is a text"),
        ("p.jsonl", {"template": "{n} {x}"}, r"line 1: expected an object whose 'n' and 'x' are texts"),
        ("p.txt", {"column": "q"}, r"p\.txt: no column 'q' \(there are: text\)"),
        ("p.txt", {"template": "{q}"}, r"p\.txt: no column 'q'"),
        ("p.txt", {"template": "{text"}, "template '{text': "),
    ],
)
def test_columns_that_are_not_there(tmp_path, name, options, message):
    write(tmp_path, name, '{"text": "a", "n": 1}\n{"q": "b"}')
    with pytest.raises(SelfspecError, match=message):
        read_prompts(tmp_path / name, **options)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", "", r"p\.jsonl: holds no prompts"),
        ("p.txt", "\n \n", r"p\.txt: holds no prompts"),
        ("p.csv", "a", r"expected a \.jsonl file"),
        ("p.jsonl", '{"prompt": "a"}\n{oops', "line 2: not valid JSON"),
        ("p.jsonl", '{"prompt": 3}', "line 1: expected an object whose 'prompt'"),
        ("p.jsonl", '["a"]', "line 1: expected an object"),
        ("p.jsonl", '{"prompt": " "}', "is not empty"),
    ],
)
def test_wrong_files_are_refused(tmp_path, name, text, message):
    with pytest.raises(SelfspecError, match=message):
        read_prompts(write(tmp_path, name, text))


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(SelfspecError, match="no such file"):
        read_prompts(tmp_path / "p.jsonl")
    with pytest.raises(
        SelfspecError, match=r"prompts: no such file or folder; expected a \.jsonl file .* or one of cnn_"
    ):
        read_prompts("prompts")
    with pytest.raises(SelfspecError, match="the data's name is empty"):
        read_prompts("")
    (tmp_path / "d.txt").mkdir()
    with pytest.raises(SelfspecError, match=r"d\.txt: holds no prompts; expected text files"):
        read_prompts(tmp_path / "d.txt")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(200))
@given(st.text(max_size=60) | st.text('{}[]":, prompttext\\u01\n', max_size=60))
def test_any_jsonl_gives_prompts_or_one_line(tmp_path, text):
    path = write(tmp_path, "p.jsonl", text)
    try:
        assert all(prompt.strip() for prompt in read_prompts(path).texts)
    except SelfspecError as error:
        assert "\n" not in str(error)


def test_the_choice_is_seeded_and_held_out_prompts_are_others():
    prompts = [f"p{i}" for i in range(40)]
    chosen = choose(prompts, source="s", count=8, seed=3)
    assert chosen == choose(prompts, source="s", count=8, seed=3) != choose(prompts, source="s", count=8, seed=4)
    assert len(chosen.search) == len(chosen.measure) == 8
    assert chosen.held_out
    assert not set(chosen.search) & set(chosen.measure)


def test_messages_and_token_ids_are_chosen_from():
    """Each as it is; equal ones are one."""
    first, second = ([{"role": "user", "content": text}] for text in ("a", "b"))
    prompts = [first, [1, 2], torch.tensor([1, 2]), second, [dict(first[0])], "c"]
    chosen = choose(prompts, source="prompts", count=2, seed=1)
    assert chosen.available == 4
    assert [one for one in prompts if any(one is its for its in chosen.search + chosen.measure)] == [
        first, [1, 2], second, "c"
    ]  # fmt: skip


def test_few_prompts_are_shared():
    one = choose(["a", "a"], source="s", count=8, seed=0)
    assert (one.search, one.measure, one.held_out) == (("a",), ("a",), False)
    nine = choose([str(i) for i in range(9)], source="s", count=8, seed=0)
    assert (len(nine.search), len(nine.measure), nine.held_out, nine.available) == (5, 4, True, 9)


def test_what_was_read_is_chosen_from_with_its_source():
    given = Prompts("p.jsonl", tuple("abcdef"), "q", "{q}")
    chosen = choose(given, source="other", count=2, seed=0)
    assert (chosen.source, chosen.column, chosen.template) == ("p.jsonl", "q", "{q}")
    assert chosen.search == choose("abcdef", source="", count=2, seed=0).search


def test_the_built_in_prompts():
    chosen = choose(None, source="", count=8, seed=0)
    assert (chosen.source, chosen.held_out, len(chosen.search), len(chosen.measure)) == ("builtin", True, 8, 8)
    every = choose(None, source="", count=1000, seed=0)
    assert (len(every.search), len(every.measure)) == (96, 240)


def test_the_record_hashes_token_ids():
    a = record("s", [[1, 2], [3]])
    assert (a.prompts, a.tokens) == (2, 3)
    assert a.sha256 == record("t", [[1, 2], [3]]).sha256 != record("s", [[1], [2, 3]]).sha256
