"""lm-evaluation-harness, with its own command, gives the same scores and texts as with its own model `hf`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from wants import needs

from selfspec import builtin
from selfspec.basics.errors import SelfspecError

pytestmark = needs("lm_eval", "lm-evaluation-harness")

WRITES = """
task: continuing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\n\n"], max_gen_toks: 24, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: ['\\s+$']}}]
"""
CHOOSES = """
task: choosing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["self", "return", "import"]
doc_to_target: "{{{{choice}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def tasks(llm, tmp_path_factory):
    """Two tasks; some answers to the first are what the model writes."""
    folder = tmp_path_factory.mktemp("tasks")
    texts = [text.rstrip() for text in builtin.prompts("heldout")[:6]]  # the template would cut what is cut here
    rows = []
    for i, text in enumerate(texts):
        answer = llm.generate(text, max_new_tokens=24, stop="\n\n").text if i % 2 else "no such thing"
        rows.append({"text": text, "answer": answer.rstrip(), "choice": i % 3})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in (("continuing", WRITES), ("choosing", CHOOSES)):
        (folder / f"{name}.yaml").write_text(task.format(file=file))
    return folder


def run(*args, cwd):
    command = [sys.executable, "-m", "selfspec.lm_eval", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def evaluated(tasks, folder, model, args, *, rows):
    """The scores by task, and each task's answers."""
    args = f"{args},dtype=float32"
    done = run(
        *("run", "--model", model, "--model_args", args, "--tasks", "continuing,choosing", "--batch_size", str(rows)),
        *("--include_path", str(tasks), "--device", "cpu", "--log_samples", "--output_path", str(folder)),
        cwd=folder.parent,
    )
    assert done.returncode == 0, done.stderr
    (results,) = folder.glob("*/results*.json")
    found = json.loads(results.read_text())["results"]
    scores = {name: {key: value for key, value in found[name].items() if "," in key} for name in found}
    answers = {}
    for file in folder.glob("*/samples_*.jsonl"):
        for sample in map(json.loads, file.read_text().splitlines()):
            answers[sample["doc_hash"], file.name.split("_")[1]] = sample["resps"]
    return scores, answers


def test_scores_and_texts_are_those_of_hf(tasks, tmp_path):
    path = builtin.model_folder()
    theirs = evaluated(tasks, tmp_path / "hf", "hf", f"pretrained={path}", rows=4)
    ours = evaluated(tasks, tmp_path / "ours", "selfspec", f"pretrained={path},profile=stdlib-llama-3.7m", rows=4)
    assert ours == theirs
    assert 0 < theirs[0]["continuing"]["exact_match,none"] < 1
    assert len(theirs[1]) == 12


def test_names_of_ours(tasks, tmp_path):
    path = builtin.model_folder()
    by_name = evaluated(tasks, tmp_path / "name", "selfspec", "pretrained=builtin,method=lookup", rows=1)
    assert by_name == evaluated(tasks, tmp_path / "path", "hf", f"pretrained={path}", rows=1)


def test_wrong_input_is_one_line(tasks, tmp_path):
    args = ("--model_args", "pretrained=builtin,profile=nothing.yaml", "--include_path", str(tasks))
    done = run("run", "--model", "selfspec", *args, "--tasks", "continuing", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: profile nothing.yaml: no such file")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"pretrained": "builtin", "tokenizer": "other"}, "model builtin brings its tokenizer"),
        ({"pretrained": "none.gguf"}, "model none.gguf: no such file"),
        ({"pretrained": "builtin", "rule": "guess"}, "rule 'guess'"),
    ],
)
def test_wrong_arguments(args, message):
    from selfspec.lm_eval.model import SelfspecLM

    with pytest.raises(SelfspecError, match=message):
        SelfspecLM(**args)


def test_releases_that_read_entry_points_find_it():
    from lm_eval.api.model import LM

    (found,) = entry_points(group="lm_eval.models", name="selfspec")
    assert issubclass(found.load(), LM)
