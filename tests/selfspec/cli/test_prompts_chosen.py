"""Which prompts the commands choose where none are named, for a model with a chat template and for one without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import selfspec
from selfspec import builtin
from selfspec.cli.input_options import PromptOptions
from selfspec.profile.reading import read_profile
from selfspec.text.prompt_files import CHAT, Prompts

TEMPLATE = "# user:\n{{ messages[0]['content'] }}\n# assistant:"
SKIP = ("--profile", "stdlib-llama-3.7m")
QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Write a line on rain.", "Another one."]},
    {"question_id": 2, "category": "qa", "turns": ["Who built the bridge?"]},
    {"question_id": 3, "category": "coding", "turns": ["Write a loop."]},
    {"question_id": 4, "category": "qa", "turns": ["When was it built?"]},
]


@pytest.fixture(scope="module")
def instruct(tmp_path_factory):
    """The built-in model's folder with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "m"
    shutil.copytree(builtin.model_folder(), folder)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, "chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def cli(cli, monkeypatch, tmp_path):
    """What the command says, on standard output and standard error; nothing goes wrong."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("selfspec.measure.cost_fitting.DISTURBED_FACTOR", 1)
    (tmp_path / "mine.txt").write_text("def f():\nclass A:\n")
    (tmp_path / "question.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))

    def run(*args):
        code, out, err = cli(*args)
        assert code == 0, err
        return out, err

    return run


@pytest.mark.parametrize(
    ("named", "source", "chat"),
    [
        ([], CHAT, True),
        (["--prompts", "mine.txt"], "mine.txt", False),
        (["--prompts", "mine.txt", "--chat"], "mine.txt", True),
        (["--prompts", "spec-bench:question.jsonl"], "Spec-Bench (question.jsonl)", True),
    ],
)
def test_an_audit_says_what_it_chose(cli, instruct, named, source, chat):
    args = ("audit", "--model", instruct, *SKIP, "--num-prompts", 2, "--max-new-tokens", 4)
    found = json.loads(cli(*args, *named, "--json")[0])
    assert (found["prompt_source"], found["chat"], found["prompts"], found["bugs"]) == (source, chat, 2, 0)
    assert f"prompts: {source}{', as chat messages' * chat}\n" in cli(*args, *named)[0]


def test_without_a_template_everything_is_text(cli):
    args = ("audit", *SKIP, "--num-prompts", 1, "--max-new-tokens", 4, "--json")
    for named, source in (([], "builtin"), (["--prompts", "spec-bench:question.jsonl"], "Spec-Bench (question.jsonl)")):
        found = json.loads(cli(*args, *named)[0])
        assert (found["prompt_source"], found["chat"]) == (source, False)


def test_what_the_model_is_given(instruct):
    llm = selfspec.load(str(instruct), profile="none")
    chosen = PromptOptions().encode_prompts(llm, None, limit=3, max_new_tokens=8)
    held_out = dict(builtin.chat_prompts("heldout"))
    for text, prompt, task in zip(chosen.texts, chosen.prompts, chosen.tasks, strict=True):
        assert llm.tokenizer.decode(prompt) == f"# user:\n{text}\n# assistant:"
        assert held_out[text] == task
    plain = PromptOptions().encode_prompts(llm, Prompts("s", ("x = 1",)), limit=3, max_new_tokens=8)
    assert (plain.prompts, plain.chat) == (("x = 1",), False)


def test_a_template_that_fails_is_none(instruct, llm):
    broken = selfspec.load(str(instruct), profile="none")
    broken.tokenizer.chat_template = "{{ raise_exception('only poems') }}"
    for model in (broken, llm):
        assert PromptOptions().encode_prompts(model, None, limit=1, max_new_tokens=8).source == "builtin"


def test_a_search_draws_from_its_own_file_and_says_so(cli, instruct, tmp_path):
    few = ("--trials", 2, "--num-prompts", 2, "--max-new-tokens", 6)
    _, err = cli("search", "--model", instruct, *few, "--out", "found.yaml")
    calibration = read_profile(tmp_path / "found.yaml").calibration
    assert (calibration.source, calibration.chat, calibration.prompts, calibration.drawn_from) == (CHAT, True, 2, 60)
    said = f"searched on {CHAT}: 2 of 60 prompts, {calibration.tokens} tokens, as chat messages"
    assert said in err
    assert CHAT in cli("profile", "show", "found.yaml")[0]


def test_a_report_says_what_its_texts_continue(cli, instruct):
    cli("report", "--model", instruct, *SKIP, "--num-prompts", 1, "--max-new-tokens", 4, "--out", "r.html")
    page = Path("r.html").read_text()
    assert f"1 held-out prompts ({CHAT}, as chat messages), continued greedily" in page


class TestBench:
    ARGS = ("bench", "--methods", "plain,profile", "--temperature", 0, "--rounds", 1, "--max-new-tokens", 4, *SKIP)

    def test_chat_prompts(self, cli, instruct):
        out, _ = cli(*self.ARGS, "--model", instruct, "--num-prompts", 14)
        assert f"prompts: {CHAT}, as chat messages\n" in out
        assert "texts identical to plain decoding's, by token ids: plain 14 of 14; profile 14 of 14\n" in out
        table = out[out.index("profile, temperature 0") :]
        assert [line.split()[0] for line in table.splitlines()[2:10]][-1] == "overall"
        assert all(len(line) <= 80 for line in table.splitlines()[:10])
        first = {line.split()[0]: line.split()[1] for line in table.splitlines()[2:10]}
        assert first == {**dict.fromkeys(dict(builtin.chat_prompts("heldout")).values(), "2"), "overall": "14"}

    @pytest.mark.parametrize("chat", [False, True])
    def test_spec_bench(self, cli, instruct, tmp_path, chat):
        model = ["--model", instruct] if chat else []
        questions = ("--prompts", "spec-bench:question.jsonl")
        out, _ = cli(*self.ARGS, *model, *questions, "--num-prompts", 4, "--json", "--out", "b.json")
        found = json.loads(out)
        assert found == json.loads((tmp_path / "b.json").read_text())
        assert (found["prompt_source"], found["chat"], found["prompts"]) == ("Spec-Bench (question.jsonl)", chat, 4)
        by_task = found["temperatures"][0]["methods"]["profile"]["by_task"]
        rows = [(row["task"], row["prompts"]) for row in by_task["tasks"]]
        assert rows == [("multi-turn conversation", 2), ("qa", 2)]
        assert by_task["overall"]["same_text"] == {"same": 4, "near_ties": 0, "bugs": 0}
        assert set(by_task["overall"]["speedup"]) == {"plain"}

    def test_few_of_each_task(self, cli):
        out, _ = cli(*self.ARGS, "--prompts", "spec-bench:question.jsonl", "--num-prompts", 2, "--json")
        tasks = json.loads(out)["temperatures"][0]["methods"]["plain"]["by_task"]["tasks"]
        assert [(row["task"], row["prompts"]) for row in tasks] == [("multi-turn conversation", 1), ("qa", 1)]
