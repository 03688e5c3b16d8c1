from __future__ import annotations

import json

import pytest
import torch
from amount import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selfspec.search import continuations
from selfspec.search.budget import Deadline
from selfspec.search.continuations import FEWEST, DecodingSettings, PromptSet, choose, continue_prompts, record
from transformers.generation import RepetitionPenaltyLogitsProcessor

from selfspec.basics.errors import SelfspecError
from selfspec.drafters import PlainDrafter
from selfspec.llm.batch_memory import slot_bytes
from selfspec.text.prompt_files import Prompts, read_prompts
from selfspec.types.methods import WIDEST_DRAFT

PROMPTS = ["import os\n", "class A:\n", "def f(x):\n"]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    return tmp_path / "continuations"


@pytest.fixture
def prompts(llm):
    return [llm.encode(prompt) for prompt in PROMPTS]


def decoded(llm, prompts, decoding, **options):
    """The texts, and how many tokens it was told of."""
    seen = []
    return continue_prompts(llm, prompts, decoding, on_token=seen.append, **options), seen


ALL = [*range(1, 13), 12]  # six tokens of the first prompt, then of the others, and at last everything
KNOWN = [*range(1, 7), 12]


def test_texts_are_the_models_own(llm, prompts, folder):
    texts, seen = decoded(llm, prompts, DecodingSettings(6))
    assert seen == ALL
    for prompt, text in zip(prompts, texts, strict=True):
        expected = llm.generate(prompt, max_new_tokens=6, drafter=PlainDrafter()).tokens
        assert text.tokens == (*prompt, *expected)
        assert (text.prompt_length, text.remaining, text.num_new_tokens) == (len(prompt), 6, len(expected))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_where_memory_is_short_texts_are_decoded_in_several_batches(llm, folder, monkeypatch, temperature):
    """No cache takes more than half of it; the texts are the same."""
    prompts = [llm.encode(prompt) for prompt in (*PROMPTS, "x = 1\n", "import sys\n")]
    expected, _ = decoded(llm, prompts, DecodingSettings(6, temperature))
    for file in folder.iterdir():
        file.unlink()
    made, each = [], (max(map(len, prompts)) + 6 + WIDEST_DRAFT) * slot_bytes(llm.runtime)
    make = llm.runtime.with_new_cache

    def recorded(rows):
        made.append(rows)
        return make(rows=rows)

    monkeypatch.setattr(llm.runtime, "with_new_cache", recorded)
    for fit, sizes in ((3, [1, 2, 2]), (1, [1, 1, 1, 1, 1]), (0, [1, 1, 1, 1, 1])):
        made.clear()
        monkeypatch.setattr(continuations, "free_bytes", lambda device, fit=fit: int(2 * (fit + 0.5) * each))
        texts, seen = decoded(llm, prompts, DecodingSettings(6, temperature))
        assert texts == expected
        assert made == sizes
        assert seen == sorted(seen)
        assert seen[-1] == 12
        for file in folder.iterdir():
            file.unlink()


def test_in_several_batches_all_texts_end_at_the_same_length(llm, prompts, folder, monkeypatch):
    monkeypatch.setattr(continuations, "free_bytes", lambda device: 0)
    texts, _ = decoded(llm, prompts, DecodingSettings(60), deadline=Deadline(0.0, lambda: 1.0))
    assert {text.num_new_tokens for text in texts} == {FEWEST}


def test_a_second_search_starts_at_once(llm, prompts, folder):
    first, _ = decoded(llm, prompts, DecodingSettings(6, 0.8), seed=3)
    again, seen = decoded(llm, prompts, DecodingSettings(6, 0.8), seed=3)
    assert again == first
    assert seen == KNOWN


@pytest.mark.parametrize(
    "other",
    [
        {"decoding": DecodingSettings(5)},
        {"decoding": DecodingSettings(6, 0.8)},
        {"decoding": DecodingSettings(6, 0.8, top_k=3)},
        {"decoding": DecodingSettings(6, 0.8, top_p=0.5)},
        {"seed": 1},
        {"prompts": 2},
    ],
    ids=str,
)
def test_other_content_is_decoded(llm, prompts, folder, other):
    decoded(llm, prompts, DecodingSettings(6))
    given = prompts[: other.pop("prompts", 3)]
    decoding = other.get("decoding", DecodingSettings(6))
    told = decoded(llm, given, **{"decoding": decoding, **other})[1]
    assert told == [*range(1, 2 * decoding.max_new_tokens + 1), 2 * decoding.max_new_tokens]


def test_other_weights_are_noticed_even_where_the_fingerprint_does_not_see_them(llm, prompts, folder):
    decoded(llm, prompts, DecodingSettings(6))
    (file,) = folder.iterdir()
    data = json.loads(file.read_text())
    file.write_text(json.dumps([[1, 2, 3], *data[1:]]))
    texts, seen = decoded(llm, prompts, DecodingSettings(6))
    assert seen == ALL
    assert [list(t.tokens[t.prompt_length :]) for t in texts] == data == json.loads(file.read_text())


@pytest.mark.parametrize("broken", ["", "{", "[]", "[[1]]", '[[1], [2], ["a"]]', "[[1], [2], []]", "null", "\udcff"])
def test_a_broken_cache_is_made_again(llm, prompts, folder, broken):
    expected, _ = decoded(llm, prompts, DecodingSettings(3))
    (file,) = folder.iterdir()
    file.write_bytes(broken.encode("utf-8", "surrogateescape"))
    assert decoded(llm, prompts, DecodingSettings(3))[0] == expected


def test_a_cache_that_cannot_be_written_is_done_without(llm, prompts, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "file"))
    assert len(decoded(llm, prompts, DecodingSettings(3))[0]) == 3


def test_processors_are_used_and_nothing_is_kept(llm, prompts, folder):
    decoding = DecodingSettings(8, logits_processor=(RepetitionPenaltyLogitsProcessor(5.0),))
    texts, _ = decoded(llm, prompts, decoding)
    assert texts != decoded(llm, prompts, DecodingSettings(8))[0]
    assert len(decoded(llm, prompts, decoding)[1]) == 2 * 8 + 1


class Ticking:
    """A clock that goes on by a second whenever it is looked at."""

    now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


def test_at_a_deadline_all_texts_end_after_as_many_tokens(llm, prompts, folder):
    whole, _ = decoded(llm, prompts, DecodingSettings(40))
    cut, _ = decoded(llm, prompts, DecodingSettings(40), deadline=Deadline(40.0, Ticking()))
    (room,) = {text.remaining for text in cut}
    assert FEWEST <= room < 40
    assert [text.tokens for text in cut] == [text.tokens[: text.prompt_length + room] for text in whole]
    again, seen = decoded(llm, prompts, DecodingSettings(room))
    assert again == cut
    assert len(seen) == room + 1, "the others were read back"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_that_are_cut_begin_as_whole_ones_do(llm, prompts, folder, temperature):
    late = Deadline(-1.0, lambda: 0.0)
    cut, _ = decoded(llm, prompts, DecodingSettings(12, temperature), deadline=late, seed=4)
    whole, _ = decoded(llm, prompts, DecodingSettings(12, temperature), seed=4)
    assert {text.num_new_tokens for text in cut} == {FEWEST}
    assert [text.tokens for text in cut] == [text.tokens[: text.prompt_length + FEWEST] for text in whole]
    assert [text.seed for text in cut] == [text.seed for text in whole]


def test_one_prompt_alone(llm, prompts, folder):
    texts, seen = decoded(llm, prompts[:1], DecodingSettings(6))
    assert [text.num_new_tokens for text in texts] == [6]
    assert seen == [*range(1, 7), 12]


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
        ("p.jsonl", '{"prompt": 3}', "line 1: expected an object whose 'prompt' .* not empty$"),
        ("p.jsonl", '{"q": "a", "id": 3}', r"whose 'prompt' .* \(there are: q, id\); name another column"),
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
    chosen, other = (PromptSet(source, (), (), held_out=False, available=3) for source in "st")
    a = record(chosen, [[1, 2], [3]])
    assert (a.prompts, a.tokens) == (2, 3)
    assert a.sha256 == record(other, [[1, 2], [3]]).sha256 != record(chosen, [[1], [2, 3]]).sha256
