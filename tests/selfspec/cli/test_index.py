"""`selfspec index`, and `--store` of the commands that decode."""

from __future__ import annotations

import json

import pytest

import selfspec
from selfspec.drafters import Guard, LayerSkipDrafter, LookupDrafter
from selfspec.proposers.store import Store, write_store

TEXT = "def read_header(self, stream):\n    return stream.read(self.size).decode('latin-1').split(self.separator)\n"


@pytest.fixture
def cli(cli, tmp_path):
    """The command, in a folder with texts."""
    (tmp_path / "code.py").write_text(TEXT)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(3)))
    return cli


@pytest.fixture(scope="module")
def llm():
    return selfspec.load("builtin", profile="none")


def test_texts_become_a_store(cli, tmp_path, llm):
    code, out, _ = cli("index", "code.py", "rows.jsonl", "--out", "x.store", "--json")
    told = json.loads(out)
    assert not code
    held = [llm.tokenizer.decode(text) for text in Store("x.store")]
    assert held == [TEXT, "row 0", "row 1", "row 2"]
    assert (told["texts"], told["bytes"]) == (4, (tmp_path / "x.store").stat().st_size)
    assert told["tokens"] == sum(len(llm.tokenizer(text).input_ids) for text in held)


def test_a_folder_of_texts_and_columns(cli, tmp_path):
    (tmp_path / "docs").mkdir()
    for name in ("a.md", "b.txt"):
        (tmp_path / "docs" / name).write_text(f"the text of {name}\non two lines\n")
    (tmp_path / "qa.jsonl").write_text(json.dumps({"q": "why?", "a": "because"}) + "\n")
    code, out, _ = cli("index", "docs", "--out", "docs.store")
    assert not code
    assert "2 texts" in out
    assert "Use it with: selfspec generate --model builtin --store docs.store" in out
    assert not cli("index", "qa.jsonl", "--template", "{q}\\n{a}", "--out", "qa.store")[0]
    tokenizer = selfspec.load("builtin", profile="none").tokenizer
    assert [tokenizer.decode(text) for text in Store("qa.store")] == ["why?\nbecause"]


def test_add_keeps_what_is_there(cli):
    for texts in (["code.py"], ["rows.jsonl", "--add"], ["rows.jsonl", "--add"]):
        assert not cli("index", *texts, "--out", "x.store")[0]
    assert Store("x.store").texts == 1 + 3 + 3
    assert not cli("index", "code.py", "--out", "x.store")[0]
    assert Store("x.store").texts == 1


def test_no_other_file_is_written_over(cli):
    """Such as a model's weights, which are a safetensors file, too."""
    with open("other.safetensors", "wb") as file:
        file.write(b"weights")
    code, out, err = cli("index", "code.py", "--out", "other.safetensors")
    assert (code, out) == (2, "")
    assert "other.safetensors: is no store of texts" in err
    with open("other.safetensors", "rb") as file:
        assert file.read() == b"weights"


@pytest.mark.parametrize("profile", ["none", "stdlib-llama-3.7m"])
def test_what_is_generated_stays_the_same_in_fewer_rounds(cli, profile):
    """The model's own answer is stored; with it the same answer comes in a few rounds."""
    code, out, _ = cli("generate", "--profile", "none", "--max-new-tokens", 40, "--json", TEXT)
    assert not code
    plain = json.loads(out)
    with open("answer.txt", "w", encoding="utf-8") as file:
        file.write(TEXT + plain["text"])
    assert not cli("index", "answer.txt", "rows.jsonl", "--out", "x.store")[0]
    llm = selfspec.load("builtin", profile=profile, store="x.store")
    assert isinstance(llm.drafter, Guard)
    drafter = LookupDrafter if profile == "none" else LayerSkipDrafter
    found = llm.generate(TEXT, max_new_tokens=40, drafter=llm.drafter_for(llm.profile))
    assert isinstance(llm.drafter_for(llm.profile), drafter)
    assert found.text == plain["text"]
    assert found.stats.rounds < 20
    code, out, _ = cli("generate", "--profile", profile, "--store", "x.store", "--max-new-tokens", 40, "--json", TEXT)
    assert not code
    assert json.loads(out)["text"] == plain["text"]


def test_wrong_input_is_one_line(cli, tmp_path):
    write_store(tmp_path / "other.store", [[1, 2]], vocabulary=9)
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("a note")
    wrong = {
        ("index", "gone.txt"): "gone.txt: no such file",
        ("index", "blank.txt"): "nothing to store",
        ("index", "code.py", "--model", "nowhere/at all"): "nowhere/at all",
        ("index", "notes", "--out", "notes/a.md"): "--out notes/a.md would write over a file that is read",
        ("index", "code.py", "--out", "gone/x.store"): "the folder gone does not exist",
        ("index", "code.py", "--add", "--out", "code.py"): "code.py: is no store of texts",
        ("index", "code.py", "--add", "--out", "other.store"): "a vocabulary of 9, the model's has 4096",
        ("generate", "--store", "gone.store", "x"): "gone.store: no such file",
        ("generate", "--store", "code.py", "x"): "code.py: is no store of texts; make one with: selfspec index",
        ("generate", "--store", "other.store", "x"): "a vocabulary of 9, the model's has 4096",
        ("bench", "--store", "gone.store"): "gone.store: no such file",
        ("search", "--store", "gone.store"): "gone.store: no such file",
    }
    for args, said in wrong.items():
        code, _, err = cli(*args)
        assert code == 2, args
        assert said in " ".join(err.split()), args
        assert len(err.strip().splitlines()) <= 2, err
        assert "Traceback" not in err
    assert (tmp_path / "code.py").read_text() == TEXT, "nothing is lost"


def said(cli, *arguments):
    code, out, _ = cli("generate", "--json", "--max-new-tokens", "24", *arguments, "def read_header(self, stream):")
    assert not code
    return json.loads(out)


def test_answers_are_kept_and_guessed_from(cli, tmp_path):
    """The second time nearly every token comes from the first answer, and is the same."""
    first, second = (said(cli, "--profile", "none", "--answers", "mine.answers") for _ in range(2))
    assert first["tokens"] == second["tokens"]
    assert not first["stats"]["sources"].get("answers")
    assert second["stats"]["sources"]["answers"] > 15
    assert second["stats"]["rounds"] < first["stats"]["rounds"]
    lines = (tmp_path / "mine.answers").read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[1]) == json.loads(lines[2])
    code, out, _ = cli("index", "mine.answers", "code.py", "--out", "x.store", "--json")
    assert not code
    assert json.loads(out)["texts"] == 3
    assert [list(text) for text in Store("x.store")][:2] == [json.loads(line) for line in lines[1:]]


def test_with_a_seed_no_answer_is_kept(cli, tmp_path):
    said(cli, "--profile", "none", "--answers", "mine.answers", "--temperature", "0.8", "--seed", "1")
    assert not (tmp_path / "mine.answers").exists()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("code.py", "code.py: holds no answers that selfspec kept; name another file"),
        ("none/some.answers", "none/some.answers: the folder none does not exist; make it first"),
        (".", ".: holds no answers that selfspec kept; name another file"),
    ],
)
def test_a_file_without_answers_is_one_clear_line(cli, file, said):
    code, _, err = cli("generate", "--answers", file, "x")
    assert code == 2
    assert " ".join(err.split()) == f"error: {said}"
