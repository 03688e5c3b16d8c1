"""Spec-Bench's questions as its own file has them, and one clear line for whatever is no such file."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from amount import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selfspec.basics.errors import SelfspecError
from selfspec.text.prompt_files import read_prompts
from selfspec.text.spec_bench import CONVERSATION, TASKS, read_questions

ROWS = [
    {"question_id": 81, "category": "writing", "turns": ["Write a poem about rain.", "Now without the letter e."]},
    {"question_id": 82, "category": "math", "turns": ["What is seven times eight?"], "reference": ["56"]},
    {"question_id": 161, "category": "translation", "turns": ["Translate to English: guten Tag"]},
    {"question_id": 241, "category": "summarization", "turns": ["Summarize: it rained, and then it rained more."]},
    {"question_id": 321, "category": "qa", "turns": ["who built the bridge"]},
    {"question_id": 401, "category": "math_reasoning", "turns": ["Ann has 3 pears and eats 1. How many are left?"]},
    {"question_id": 481, "category": "rag", "turns": ["The bridge is of stone.\n\nOf what is the bridge?"]},
]


def written(folder, *rows):
    path = folder / "question.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def test_first_turns_by_task(tmp_path):
    found = read_prompts(f"spec-bench:{written(tmp_path, *ROWS)}", held_out=True)
    assert found.texts == tuple(row["turns"][0] for row in ROWS)
    others = ("translation", "summarization", "qa", "math_reasoning", "rag")
    assert found.tasks == (CONVERSATION, CONVERSATION, *others)
    assert (found.source, found.messages) == ("Spec-Bench (question.jsonl)", True)


def test_mt_benchs_eight_categories_are_one_task():
    assert sum(task == CONVERSATION for task in TASKS.values()) == 8
    assert len(set(TASKS.values())) == 6


def speed_bench(folder, *rows):
    """A file of SPEED-Bench with its columns."""
    path = folder / "qualitative.parquet"
    whole = [{**row, "question_id": f"q{i}", "source": "web", "multiturn": False} for i, row in enumerate(rows)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(whole), path)
    return path


def test_speed_benchs_questions(tmp_path):
    """From its parquet file and from JSONL; its categories are the tasks."""
    rows = [{"category": name, "turns": [f"A question of {name}.", "And now?"]} for name in ("coding", "low_entropy")]
    for path in (speed_bench(tmp_path, *rows), written(tmp_path, *rows)):
        found = read_prompts(f"speed-bench:{path}")
        assert found.texts == ("A question of coding.", "A question of low_entropy.")
        assert (found.tasks, found.messages) == (("coding", "low_entropy"), True)
        assert found.source == f"SPEED-Bench ({path.name})"


def test_wrong_files_of_speed_bench(tmp_path):
    with pytest.raises(SelfspecError, match=r"qualitative\.parquet, row 2: the first of 'turns' is empty"):
        read_prompts(f"speed-bench:{speed_bench(tmp_path, ROWS[0], {'category': 'qa', 'turns': ['']})}")
    with pytest.raises(SelfspecError, match=r"qualitative\.parquet, row 1: 'category' is missing; expected a name"):
        read_prompts(f"speed-bench:{speed_bench(tmp_path, {'turns': ['x']})}")
    with pytest.raises(SelfspecError, match=r"qualitative\.parquet, row 1: 'turns' must be a list of texts"):
        read_prompts(f"speed-bench:{speed_bench(tmp_path, {'category': 'qa'})}")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(SelfspecError, match=r"broken\.parquet: not a parquet file that can be read"):
        read_prompts(f"speed-bench:{tmp_path}/broken.parquet")
    with pytest.raises(SelfspecError, match=r"no\.parquet: no such file"):
        read_prompts(f"speed-bench:{tmp_path}/no.parquet")
    with pytest.raises(SelfspecError, match="speed-bench: names no file; expected speed-bench:PATH, the path of SPEED"):
        read_prompts("speed-bench:")


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path, *ROWS)
    assert len(read_prompts("spec-bench:~/question.jsonl").texts) == len(ROWS)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["a"], "line 2: expected an object with 'category' and 'turns'"),
        ({"turns": ["x"]}, "line 2: 'category' is missing; expected one of Spec-Bench's: writing,"),
        ({"category": "cooking", "turns": ["x"]}, "line 2: 'category' is 'cooking'; expected one of"),
        ({"category": ["qa"], "turns": ["x"]}, "line 2: 'category' is"),
        ({"category": "qa"}, "line 2: 'turns' must be a list of texts"),
        ({"category": "qa", "turns": "x"}, "line 2: 'turns' must be a list of texts"),
        ({"category": "qa", "turns": []}, "line 2: 'turns' must be a list of texts"),
        ({"category": "qa", "turns": ["x", 3]}, "line 2: 'turns' must be a list of texts"),
        ({"category": "qa", "turns": [" "]}, "line 2: the first of 'turns' is empty"),
        ({"category": "qa", "turns": ["\ud800"]}, "line 2: the text has half a surrogate pair"),
    ],
)
def test_a_wrong_line_is_told(tmp_path, row, message):
    path = written(tmp_path, ROWS[0], row)
    with pytest.raises(SelfspecError, match=rf"question\.jsonl, {message}"):
        read_questions(path)


def test_wrong_files(tmp_path):
    with pytest.raises(SelfspecError, match=r"no\.jsonl: no such file"):
        read_prompts(f"spec-bench:{tmp_path}/no.jsonl")
    with pytest.raises(SelfspecError, match="is a folder; expected a file"):
        read_prompts(f"spec-bench:{tmp_path}")
    with pytest.raises(SelfspecError, match="spec-bench: names no file; expected spec-bench:PATH"):
        read_prompts("spec-bench:")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(SelfspecError, match="holds no questions"):
        read_prompts(f"spec-bench:{tmp_path}/empty.jsonl")
    with pytest.raises(SelfspecError, match="takes no column and no template"):
        read_prompts(f"spec-bench:{written(tmp_path, *ROWS)}", column="turns")


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
rows = st.fixed_dictionaries(
    {}, optional={"category": st.sampled_from(sorted(TASKS)) | values, "turns": st.lists(st.text(max_size=8)) | values}
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(300))
@given(st.lists(rows.map(json.dumps) | values.map(json.dumps) | st.text('{}[]":, turnscaegoy\\u01\n', max_size=40)))
def test_any_file_gives_questions_or_one_line(tmp_path, lines):
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    try:
        texts, tasks = read_questions(path)
    except SelfspecError as error:
        assert "\n" not in str(error)
        assert str(error).startswith(str(path))
    else:
        assert len(texts) == len(tasks) > 0
        assert all(text.strip() for text in texts)
        assert set(tasks) <= set(TASKS.values())
