"""Earlier answers: what is learnt is guessed from, outlives the process, and is lost by no kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.basics.errors import SelfspecError
from selfspec.proposers.base import NO_PROPOSAL, ProposerChain
from selfspec.proposers.history import BEFORE, AnswerHistory, check_answers, keeps_answers
from selfspec.proposers.lookup import Lookup

VOCABULARY = 9
tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30)


def kept(tmp_path, *answers):
    found = AnswerHistory(tmp_path / "some.answers", VOCABULARY)
    for answer in answers:
        found.learn([], answer)
    return found


def predicted(answers, text, most=4):
    reader = answers.reader()
    for token in text:
        reader.append(token)
    return list(reader.look_up((), most).tokens)


def test_a_text_goes_on_as_an_earlier_answer_did(tmp_path):
    answers = kept(tmp_path, [1, 2, 3, 4, 5], [7, 3, 4, 8])
    assert predicted(answers, [6, 2, 3, 4]) == [5], "to the end of that answer"
    assert predicted(answers, [0, 3, 4]) == [8], "as the latest did"
    assert predicted(answers, [6, 6]) == []
    assert answers.reader().look_up((), 4) == NO_PROPOSAL
    reader = answers.reader()
    reader.append(6)
    assert list(reader.look_up([1, 2], 2).tokens) == [3, 4], "after what is drafted, too"


def test_the_beginning_of_an_answer_is_guessed_from_its_question(tmp_path):
    answers = kept(tmp_path)
    answers.learn([0] * 20 + [1, 2], [5, 6])
    assert predicted(answers, [4, 1, 2]) == [5, 6]
    assert [*answers] == [(*[0] * (BEFORE - 2), 1, 2, 5, 6)]


@given(st.lists(st.tuples(tokens, tokens), max_size=5), tokens)
def test_another_process_knows_what_this_one_learnt(tmp_path_factory, texts, text):
    folder = tmp_path_factory.mktemp("answers")
    answers = kept(folder)
    for prompt, answer in texts:
        answers.learn(prompt, answer)
    again = kept(folder)
    assert [*again] == [*answers] == [(*prompt[-BEFORE:], *answer) for prompt, answer in texts]
    assert predicted(again, text) == predicted(answers, text)


@given(st.lists(tokens, min_size=1, max_size=4), st.data())
def test_every_guess_stands_in_an_answer_after_the_end_of_the_text(tmp_path_factory, texts, data):
    answers = kept(tmp_path_factory.mktemp("answers"), *texts)
    text = data.draw(tokens)
    found = predicted(answers, text)
    if found:
        joined = [f",{','.join(map(str, [text[-1], *found]))}," in f",{','.join(map(str, held))}," for held in texts]
        assert any(joined)
    else:
        assert all(text[-1] not in held for held in texts) or any(text[-1] == held[-1] for held in texts)


def test_a_torn_line_is_left_out_and_no_later_one_is_lost(tmp_path):
    kept(tmp_path, [1, 2, 3])
    with (tmp_path / "some.answers").open("a") as file:
        file.write("\n[4,5,")
    kept(tmp_path, [6, 7])
    assert [*kept(tmp_path)] == [(1, 2, 3), (6, 7)]


LEARNING = """
import sys
from selfspec.proposers.history import AnswerHistory
answers = AnswerHistory(sys.argv[1], int(sys.argv[2]))
while True:
    answers.learn([1], [2, 3, 4])
"""


@pytest.mark.parametrize("after", [0.02, 0.1])
def test_a_kill_loses_nothing_that_was_learnt_before(tmp_path, after):
    path = tmp_path / "some.answers"
    kept(tmp_path, [5, 6])
    process = subprocess.Popen([sys.executable, "-c", LEARNING, str(path), str(VOCABULARY)])
    while path.stat().st_size < 200 and process.poll() is None:
        time.sleep(0.001)
    time.sleep(after)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    first, *others = [*kept(tmp_path)]
    assert first == (5, 6)
    assert others
    assert set(others) == {(1, 2, 3, 4)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1, 2]", "holds no answers that selfspec kept; name another file"),
        ('{"format": "selfspec answers 1"}', "holds no answers that selfspec kept; name another file"),
        (
            '{"format": "selfspec answers 1", "vocabulary": 8}\n[1]',
            "its answers are of a vocabulary of 8, the model's has 9; expected those that this model gave",
        ),
    ],
)
def test_other_files_are_refused_and_left_alone(tmp_path, content, said):
    path = tmp_path / "some.answers"
    path.write_text(content)
    with pytest.raises(SelfspecError) as error:
        AnswerHistory(path, VOCABULARY)
    assert str(error.value) == f"{path}: {said}"
    assert path.read_text() == content


@pytest.mark.parametrize("line", ["[9]", "[-1]", "[true]", '["1"]', "[[1]]", "{}", "7", "[1.0]"])
def test_tokens_that_the_model_does_not_know_are_left_out(tmp_path, line):
    path = tmp_path / "some.answers"
    path.write_text(json.dumps({"format": "selfspec answers 1", "vocabulary": VOCABULARY}) + f"\n{line}\n[1,2]")
    assert [*kept(tmp_path)] == [(1, 2)]


def test_which_files_hold_answers(tmp_path):
    path = tmp_path / "some.answers"
    assert not keeps_answers(path)
    check_answers(path)
    assert not path.exists(), "nothing is made before there is an answer"
    kept(tmp_path, [1])
    assert keeps_answers(path)
    check_answers(path)
    with pytest.raises(SelfspecError, match="does not exist"):
        check_answers(tmp_path / "none" / "some.answers")


def test_an_empty_file_will_do(tmp_path):
    """A process that ended before its first write leaves one."""
    path = tmp_path / "some.answers"
    path.touch()
    check_answers(path)
    kept(tmp_path, [1, 2])
    assert [*kept(tmp_path)] == [(1, 2)]


def test_where_the_file_cannot_be_written_the_process_still_learns(tmp_path, caplog):
    answers = kept(tmp_path)
    answers.path = tmp_path / "gone" / "some.answers"
    answers.learn([], [1, 2, 3])
    assert predicted(answers, [1, 2]) == [3]
    assert "answers are not kept (No such file or directory)" in caplog.text


def test_texts_with_a_seed_neither_learn_nor_are_guessed(tmp_path):
    answers = kept(tmp_path, [1, 2, 3])
    ahead = ProposerChain([Lookup(), answers], (1.0, 1.0, 1.0))
    for seeded in (False, True):
        reading = ahead.new_state(prompt=2, seeded=seeded)
        reading.read([1, 2])
        proposal = reading.lookup(3, ())
        assert (list(proposal.tokens), proposal.source) == (([], "") if seeded else ([3], "answers"))
        reading.finish([1, 2, 8, 8])
        assert len([*answers]) == 2


@pytest.mark.parametrize("first", ["[" * 100_000, '{"format": "selfspec answers 1", "vocabulary": Infinity}'])
def test_a_hostile_first_line_is_that_of_another_file(first, tmp_path):
    path = tmp_path / "some.answers"
    path.write_text(first + "\n[1]")
    with pytest.raises(SelfspecError, match="holds no answers that selfspec kept; name another file"):
        AnswerHistory(path, VOCABULARY)


@pytest.mark.parametrize("line", ["[" * 100_000, "[9]", "[-1]", "[1e999]", "[true]", "9" * 5000, '{"a": 1}'])
def test_a_hostile_answer_is_skipped(line, tmp_path):
    path = tmp_path / "some.answers"
    path.write_text(json.dumps({"format": "selfspec answers 1", "vocabulary": VOCABULARY}) + f"\n{line}\n[1,2]")
    assert [*AnswerHistory(path, VOCABULARY)] == [(1, 2)]
