"""`generate --prompts`: each result is what the prompt gives alone, and none is lost or made twice."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builtin_model import on_builtin
from chats import save_with_template, with_template

from selfspec.cli import main
from selfspec.llm.llm import LLM
from selfspec.llm.sampling_plan import plan
from selfspec.types.controller import ControllerSpec

COMMAND = Path(__file__).parents[2] / "helpers" / "command.py"
PROMPTS = ["import os\n", "def main():\n    ", "class Reader:\n", "import os\nimport sys\n"]
HOW = ["--profile", "none", "--threads", "1", "--max-new-tokens", "8"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path


def run(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["selfspec", *on_builtin(["generate", *args])])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def many(monkeypatch, *args):
    return run(monkeypatch, "--prompts", "prompts.jsonl", "--out", "out.jsonl", "--batch-size", 2, *HOW, *args)


def results(folder):
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return {row["index"]: row for row in rows}


def test_each_is_what_the_prompt_gives_alone(folder, monkeypatch, llm, capsys):
    assert many(monkeypatch, "--stats") == 0
    found = results(folder)
    assert sorted(found) == [0, 1, 2, 3]
    for index, prompt in enumerate(PROMPTS):
        alone = llm.generate(prompt, max_new_tokens=8)
        assert found[index]["text"] == alone.text
        assert found[index]["tokens"] == alone.tokens
        assert found[index]["prompt"] == prompt
        assert found[index]["finish"] == "length"
    said = capsys.readouterr().err
    assert "4 prompts, 32 tokens in" in said
    assert "preemptions" in said


def test_the_last_line_says_how_much_was_decoded_and_where_it_is(folder, monkeypatch, capsys):
    assert many(monkeypatch) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"4 prompts, 32 tokens in [\d.]+ s \([\d.]+ a second\); results: out.jsonl", last)
    (folder / "out.jsonl").unlink()
    assert many(monkeypatch, "--quiet") == 0
    assert capsys.readouterr().err == ""


def test_the_first_prompts_alone_and_then_more(folder, monkeypatch, capsys):
    assert many(monkeypatch, "--num-prompts", 2) == 0
    assert sorted(results(folder)) == [0, 1]
    capsys.readouterr()
    assert many(monkeypatch, "--num-prompts", 3) == 0
    assert "2 of 3 are done already" in capsys.readouterr().err
    assert sorted(results(folder)) == [0, 1, 2]


def test_what_the_file_has_is_not_made_again(folder, monkeypatch, capsys):
    assert many(monkeypatch) == 0
    whole = (folder / "out.jsonl").read_text()
    first = whole.splitlines(keepends=True)
    (folder / "out.jsonl").write_text("".join(first[:2]) + first[2][:30])  # killed while it wrote
    assert many(monkeypatch, "--stats") == 0
    said = capsys.readouterr().err
    assert "out.jsonl: 2 of 4 are done already" in said
    assert "2 prompts, 16 tokens in" in said
    assert {row["text"] for row in results(folder).values()} == {json.loads(line)["text"] for line in first}
    assert (folder / "out.jsonl").read_text().startswith("".join(first[:2]))
    assert many(monkeypatch) == 0


@pytest.mark.parametrize("event", ["killed-text:12", "interrupted-text:12"])
@pytest.mark.long("commands that were cut short")
def test_a_run_that_was_broken_off_goes_on(folder, warm, monkeypatch, event):
    args = [
        "generate",
        "--model",
        "builtin",
        "--prompts",
        "prompts.jsonl",
        "--out",
        "out.jsonl",
        "--batch-size",
        "1",
        *HOW,
    ]
    broken = subprocess.run([warm.python, str(COMMAND), event, *args], capture_output=True, text=True, check=False)
    assert "Traceback" not in broken.stderr
    assert len(results(folder)) == 1
    if event.startswith("interrupted"):
        assert broken.returncode == 130
        assert "\n1 prompts, " in broken.stderr, "as many as the file has"
        assert (
            "to resume, run the same command again: selfspec generate --model builtin --prompts prompts.jsonl"
            in broken.stderr
        )
    assert run(monkeypatch, *args[1:]) == 0
    assert len(results(folder)) == 4


def test_results_of_others_are_left_alone(folder, monkeypatch, capsys):
    assert many(monkeypatch) == 0
    whole = (folder / "out.jsonl").read_text()
    assert many(monkeypatch, "--temperature", 0.5, "--seed", 1) == 2
    assert (
        "out.jsonl:1: a result of another prompt, model or decoding option; expected another --out"
        in capsys.readouterr().err
    )
    (folder / "out.jsonl").write_text("text of mine\n")
    assert many(monkeypatch) == 2
    assert "out.jsonl:1: not a result of this command; expected another --out file" in capsys.readouterr().err
    assert (folder / "out.jsonl").read_text() == "text of mine\n"
    (folder / "out.jsonl").write_text('{"a note": "without a newline"}')
    assert many(monkeypatch) == 2
    assert "out.jsonl: its last line is not a result of this command" in capsys.readouterr().err
    assert (folder / "out.jsonl").read_text() == '{"a note": "without a newline"}'
    (folder / "out.jsonl").write_text(whole[: len(whole) // 2])  # as a kill leaves it
    assert many(monkeypatch) == 0
    assert len(whole.splitlines()) == 4


def test_results_and_answers_are_two_files(folder, monkeypatch, capsys):
    assert many(monkeypatch, "--answers", "out.jsonl") == 2
    assert "--out out.jsonl and --answers name one file; expected two" in capsys.readouterr().err


def test_a_generation_configuration_counts_by_what_it_says(folder, monkeypatch, capsys):
    def under(penalty):
        (folder / "config.json").write_text(json.dumps({"repetition_penalty": penalty}))
        return many(monkeypatch, "--generation-config", "config.json")

    assert under(1.0) == 0
    first = (folder / "out.jsonl").read_text().splitlines(keepends=True)
    (folder / "out.jsonl").write_text(first[0])
    assert under(5.0) == 2
    assert "out.jsonl:1: a result of another prompt, model or decoding option" in capsys.readouterr().err
    assert (folder / "out.jsonl").read_text() == first[0]
    assert under(1.0) == 0
    assert len(results(folder)) == 4


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--prompts", "prompts.jsonl"), "--prompts: given without --out; expected a file for results"),
        (("--prompts", "prompts.jsonl", "--out", "prompts.jsonl"), "--out would write over the data file"),
        (("--prompts", "prompts.jsonl", "--out", "o", "--compare"), "--prompts: given with --compare; expected only"),
        (("--prompts", "prompts.jsonl", "--out", "o", "import"), "--prompts: given with a prompt; expected"),
        (("--prompts", "nothing.jsonl", "--out", "o"), "nothing.jsonl: no such file"),
        (("--prompts", "prompts.jsonl", "--out", "nowhere/o"), "the folder nowhere does not exist; make it first"),
        (("import", "--out", "o"), "--out is for many prompts; expected --prompts FILE with it"),
        (("import", "--memory", "1"), "--memory is for many prompts"),
        (("import", "--batch-size", "2"), "--batch-size is for many prompts"),
        (("import", "--num-prompts", "2"), "--num-prompts is for many prompts"),
        (("import", "--column", "a"), "--column and --template: given without --prompts"),
        (("--prompts", "prompts.jsonl", "--out", "o", "--memory", "0.000001"), "give more memory"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(folder, monkeypatch, capsys, args, said):
    assert run(monkeypatch, *args) == 2
    err = capsys.readouterr().err
    assert said in err.replace("\n", " ")
    assert len(err.strip().splitlines()) == 1
    assert not (folder / "o").exists() or not (folder / "o").read_text()


def test_a_generation_is_planned_once(folder, monkeypatch, llm):
    """The plan that checks the options of a command or of many prompts is the one that decodes."""
    plans = []
    monkeypatch.setattr("selfspec.llm.llm.plan", lambda *args, **kw: plans.append(1) or plan(*args, **kw))
    llm.generate_many(PROMPTS, max_new_tokens=4)
    assert len(plans) == len(PROMPTS)
    plans.clear()
    assert run(monkeypatch, PROMPTS[0], *HOW) == 0
    assert len(plans) == 1
    plans.clear()
    assert many(monkeypatch) == 0
    assert len(plans) == len(PROMPTS)


def test_a_prompt_that_is_too_long_leaves_the_others(folder, monkeypatch, capsys):
    """Its line has the error, the exit code is 1, and the next run tries it again."""
    rows = [json.dumps({"prompt": prompt}) for prompt in (PROMPTS[0], "word " * 3000, PROMPTS[2])]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    for _ in range(2):
        assert many(monkeypatch) == 1
        assert "prompt 2: a prompt of" in capsys.readouterr().err
        found = results(folder)
        assert sorted(found) == [0, 1, 2]
        assert set(found[1]) == {"index", "prompt", "error", "key"}
        assert len(found[0]["tokens"]) == len(found[2]["tokens"]) == 8
        assert len((folder / "out.jsonl").read_text().splitlines()) == 3


def test_a_long_prompt_is_decoded_whoever_else_is_there(folder, monkeypatch, llm):
    """Alone, as when all others are done, it has the memory that it has beside them."""
    rows = [json.dumps({"prompt": [*PROMPTS, "x = 1\n" * 220][i]}) for i in range(5)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    monkeypatch.setattr("selfspec.llm.batch_memory.USUAL", 32)
    assert many(monkeypatch) == 0
    lines = (folder / "out.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["index"] != 4]
    (folder / "out.jsonl").write_text("".join(kept))
    assert many(monkeypatch) == 0
    assert results(folder)[4]["text"] == llm.generate("x = 1\n" * 220, max_new_tokens=8).text


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0c", "\x1e"], ids=ascii)
def test_separators_of_lines_stay_in_their_lines(folder, monkeypatch, mark):
    """They are no ends of lines of a result, here and for readers that split there."""
    rows = [json.dumps({"prompt": f"a = {mark}1\n"}, ensure_ascii=False), json.dumps({"prompt": PROMPTS[0]})]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    for _ in range(2):
        assert many(monkeypatch) == 0
        lines = (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()
        assert sorted(json.loads(line)["index"] for line in lines) == [0, 1]
        assert results(folder)[0]["prompt"] == f"a = {mark}1\n"


def test_every_row_of_a_file_is_used(folder, monkeypatch, capsys):
    """A row without text stops the command with its number: else results would not be those of the file's rows."""
    table = pa.table({"prompt": ["a", None, "c", ""]})
    pq.write_table(table, folder / "p.parquet")
    assert run(monkeypatch, "--prompts", "p.parquet", "--out", "out.jsonl", *HOW) == 2
    assert "p.parquet, row 2: expected a row whose 'prompt'" in capsys.readouterr().err
    (folder / "p.txt").write_text("one\n\ntwo\n")
    assert run(monkeypatch, "--prompts", "p.txt", "--out", "out.jsonl", *HOW) == 2
    assert "p.txt, line 2: blank; expected a prompt on every line" in capsys.readouterr().err
    monkeypatch.setattr("selfspec.text.datasets_prompts.ROWS", 2)
    pq.write_table(pa.table({"prompt": ["a", "b", "c"]}), folder / "q.parquet")
    assert run(monkeypatch, "--prompts", "q.parquet", "--out", "out.jsonl", *HOW) == 0
    assert sorted(results(folder)) == [0, 1, 2]


def test_a_conversation_is_a_prompt(folder, monkeypatch, llm):
    """All of its messages, with --chat; the answers are those of `LLM.chat`."""
    save_with_template(llm, folder / "m")
    chat = with_template(llm)
    talks = [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": "z"},
        ],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "system", "content": "c"}],
        [{"role": "user", "content": ""}],
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    assert run(monkeypatch, "--model", "m", "--chat", "--prompts", "talks.jsonl", "--out", "out.jsonl", *HOW) == 0
    for index, talk in enumerate(talks):
        assert results(folder)[index]["prompt"] == talk
        assert results(folder)[index]["tokens"] == chat.chat(talk, max_new_tokens=8).tokens


def test_bytes_of_other_encodings(tmp_path):
    """A byte order mark on standard input is no text, and an ASCII output gets escapes instead of a traceback."""
    command = [sys.executable, "-m", "selfspec", *on_builtin(["generate", "--json", "--color", *HOW])]
    texts = []
    for mark in (b"", b"\xef\xbb\xbf"):
        done = subprocess.run(command, input=mark + "é = '漢".encode(), capture_output=True, check=True)
        texts.append(json.loads(done.stdout)["text"])
    assert texts[0] == texts[1]
    (tmp_path / "é.yaml").write_text("version: 2\nmodel: {layers: 16}\ndraft: {kind: lookup}\n")
    done = subprocess.run(
        [sys.executable, "-m", "selfspec", "profile", "validate", "é.yaml"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"\\xe9.yaml: valid")


def test_a_prompt_that_the_memory_cannot_hold_leaves_the_others(folder, monkeypatch, capsys):
    """As one that the context cannot hold."""
    rows = [json.dumps({"prompt": prompt}) for prompt in (PROMPTS[0], "x = 1\n" * 200, PROMPTS[2])]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    assert many(monkeypatch, "--memory", 0.003) == 1
    assert "prompt 2: a prompt of 800 tokens and 8 new ones need 807 slots of the KV cache" in capsys.readouterr().err
    found = results(folder)
    assert sorted(found) == [0, 1, 2]
    assert "give more memory" in found[1]["error"]
    assert len(found[0]["tokens"]) == len(found[2]["tokens"]) == 8
    assert many(monkeypatch) == 0
    assert len(results(folder)[1]["tokens"]) == 8


def test_costs_of_rounds_are_measured_with_as_many_as_the_memory_holds(folder, monkeypatch):
    how = ["--profile", "stdlib-llama-3.7m", "--threads", "1", "--max-new-tokens", "8", "--memory", "0.004"]
    assert run(monkeypatch, "--prompts", "prompts.jsonl", "--out", "out.jsonl", "--batch-size", 8, *how) == 0
    assert len(results(folder)) == 4


def test_a_full_disk_names_the_file_and_is_gone_on_from(folder, monkeypatch, capsys):
    """Nothing that was written is lost; the line that did not fit is written again."""
    size = 1500
    with monkeypatch.context() as patch:
        patch.setattr("selfspec.cli.generate_file.check_writable", lambda _: None)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        patch.setattr("selfspec.cli.generate_file._check", lambda _: limit(size))
        try:
            assert many(monkeypatch) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "error: out.jsonl: cannot be written (File too large)" in capsys.readouterr().err
    data = (folder / "out.jsonl").read_bytes()
    assert len(data) == size
    assert 0 < data.count(b"\n") < 4
    assert many(monkeypatch) == 0
    assert len(results(folder)) == 4


def limit(size):
    """Let no file of this process grow beyond `size` bytes; Python ignores the signal, so that writing fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_half_a_surrogate_in_a_message_is_one_line(folder, monkeypatch, capsys):
    row = {"messages": [{"role": "user", "content": "\ud800"}]}
    (folder / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    assert many(monkeypatch, "--chat") == 2
    err = capsys.readouterr().err
    assert "prompts.jsonl, line 1: the text has half a surrogate pair" in err
    assert len(err.strip().splitlines()) == 1


def test_the_controller_that_was_asked_for_drafts(folder, monkeypatch, capsys):
    how = ["--prompts", "prompts.jsonl", "--batch-size", 1, "--threads", "1", "--max-new-tokens", "12", "--stats"]
    how += ["--profile", "stdlib-llama-3.7m"]
    made, make = [], LLM.guarded_drafter_on
    monkeypatch.setattr(
        LLM, "guarded_drafter_on", lambda *args: (made.append(args[1].draft.controller), make(*args))[1]
    )
    assert run(monkeypatch, *how, "--out", "o.jsonl", "--controller", "fixed:k=3") == 0
    assert set(map(str, made)) == {str(ControllerSpec(name="fixed", options={"k": 3.0}))}
    capsys.readouterr()
    assert many(monkeypatch, "--controller", "fixed:k=3") == 0
    assert "--controller has no effect" in capsys.readouterr().err


def test_options_without_effect_are_named(folder, monkeypatch, capsys):
    assert many(monkeypatch, "--seed", 3) == 0
    assert "--seed: no effect on greedy decoding" in capsys.readouterr().err
