"""`generate --prompts`: each result is what the prompt gives alone, and none is lost or made twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from selfspec.cli import main
from selfspec.llm.sampling_plan import plan

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
    monkeypatch.setattr(sys, "argv", ["selfspec", "generate", *map(str, args)])
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
    assert "4 prompts, 32 tokens in" in capsys.readouterr().err


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
    args = ["generate", "--prompts", "prompts.jsonl", "--out", "out.jsonl", "--batch-size", "1", *HOW]
    broken = subprocess.run([warm.python, str(COMMAND), event, *args], capture_output=True, text=True, check=False)
    assert "Traceback" not in broken.stderr
    assert len(results(folder)) == 1
    if event.startswith("interrupted"):
        assert broken.returncode == 130
        assert "to go on, run the same command again: selfspec generate --prompts prompts.jsonl" in broken.stderr
    assert run(monkeypatch, *args[1:]) == 0
    assert len(results(folder)) == 4


def test_results_of_others_are_left_alone(folder, monkeypatch, capsys):
    assert many(monkeypatch) == 0
    whole = (folder / "out.jsonl").read_text()
    assert many(monkeypatch, "--temperature", 0.5, "--seed", 1) == 2
    assert (
        "out.jsonl:1: the result of another prompt, model or way to decode; expected another file"
        in capsys.readouterr().err
    )
    (folder / "out.jsonl").write_text("text of mine\n")
    assert many(monkeypatch) == 2
    assert "out.jsonl:1: no result of this command; expected another file for --out" in capsys.readouterr().err
    assert (folder / "out.jsonl").read_text() == "text of mine\n"
    assert len(whole.splitlines()) == 4


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--prompts", "prompts.jsonl"), "--prompts: say where the results go, with --out results.jsonl"),
        (("--prompts", "prompts.jsonl", "--out", "prompts.jsonl"), "--out would write over the data file"),
        (("--prompts", "prompts.jsonl", "--out", "o", "--compare"), "--compare is of one; leave one of them out"),
        (("--prompts", "prompts.jsonl", "--out", "o", "import"), "and a prompt is of one"),
        (("--prompts", "nothing.jsonl", "--out", "o"), "nothing.jsonl: no such file"),
        (("--prompts", "prompts.jsonl", "--out", "nowhere/o"), "the folder nowhere does not exist; make it first"),
        (("import", "--out", "o"), "--out is of many prompts; expected --prompts FILE with it"),
        (("import", "--memory", "1"), "--memory is of many prompts"),
        (("import", "--column", "a"), "--column and --template are of data of your own"),
        (("--prompts", "prompts.jsonl", "--out", "o", "--max-new-tokens", "5000"), "prompt 1: a prompt of"),
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
