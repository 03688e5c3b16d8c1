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

pytestmark = [needs("lm_eval", "lm-evaluation-harness"), pytest.mark.long("lm_eval's processes")]

TASK = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
"""
WRITES = (
    TASK
    + """
task: continuing
output_type: generate_until
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\n\n"], max_gen_toks: 24, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: ['\\s+$']}}]
"""
)
CHOOSES = (
    TASK
    + """
task: choosing
output_type: multiple_choice
doc_to_choice: ["self", "return", "import"]
doc_to_target: "{{{{choice}}}}"
metric_list: [{{metric: acc}}]
"""
)
# Without the tasks that it comes with: to look through their 13,000 files takes longer than all else.
EACH = """
import functools, json, runpy, sys
from lm_eval.tasks import TaskManager
TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)
for sys.argv in json.loads(sys.argv[1]):
    runpy.run_module("selfspec.lm_eval", run_name="__main__", alter_sys=False)
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


def arguments(folder, model, args, *, rows):
    """Those of one evaluation, whose results are written to a folder of that name beside the tasks."""
    return [
        *("selfspec-lm-eval", "run", "--model", model, "--model_args", f"{args},dtype=float32"),
        *("--tasks", "continuing,choosing", "--batch_size", str(rows), "--include_path", ".", "--device", "cpu"),
        *("--log_samples", "--output_path", folder),
    ]


def read(folder):
    """The scores by task, and each task's answers."""
    (results,) = folder.glob("*/results*.json")
    found = json.loads(results.read_text())["results"]
    scores = {name: {key: value for key, value in found[name].items() if "," in key} for name in found}
    answers = {}
    for file in folder.glob("*/samples_*.jsonl"):
        for sample in map(json.loads, file.read_text().splitlines()):
            answers[sample["doc_hash"], file.name.split("_")[1]] = sample["resps"]
    return scores, answers


def run(told, folder):
    """The command once for each list of arguments, by one process: importing what it needs takes long, too."""
    command = [sys.executable, "-c", EACH, json.dumps(told)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def results(tasks):
    """Four evaluations."""
    path = builtin.model_folder()
    told = [
        arguments("hf-4", "hf", f"pretrained={path}", rows=4),
        arguments("ours-4", "selfspec", f"pretrained={path},profile=stdlib-llama-3.7m", rows=4),
        arguments("hf-1", "hf", f"pretrained={path}", rows=1),
        arguments("ours-1", "selfspec", "pretrained=builtin,method=lookup", rows=1),
    ]
    done = run(told, tasks)
    assert done.returncode == 0, done.stderr
    return {each[-1]: read(tasks / each[-1]) for each in told}


def test_scores_and_texts_are_those_of_hf(results):
    assert results["ours-4"] == results["hf-4"]
    scores, answers = results["hf-4"]
    assert 0 < scores["continuing"]["exact_match,none"] < 1
    assert len(answers) == 12


def test_names_of_ours(results):
    assert results["ours-1"] == results["hf-1"]


def test_wrong_input_is_one_line(tasks):
    args = ("--model_args", "pretrained=builtin,profile=nothing.yaml", "--tasks", "continuing", "--device", "cpu")
    done = run([["selfspec-lm-eval", "run", "--model", "selfspec", *args, "--include_path", "."]], tasks)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: profile nothing.yaml: no such file")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"pretrained": "builtin", "tokenizer": "other"}, "tokenizer: given for model builtin, which includes one"),
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
