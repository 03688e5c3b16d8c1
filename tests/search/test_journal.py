from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selfspec.search.journal import Journal
from selfspec.search.objective import Score

from selfspec.costs import CostModel
from selfspec.errors import SelfspecError
from selfspec.profile import ControllerSpec
from selfspec.skip import SkipSet

COSTS = CostModel(context=9, base=0.1, attention=0.2, mlp=0.3, widths=[1], verify=[1.0], round=0.0)
SETTINGS = {"seed": 1, "search": ["replay", None]}


def score(*attention):
    controller = ControllerSpec(name="fixed", options={"k": 2})
    return Score(SkipSet(attention, (3,)), 12.5, 1.25, 0.5, 2.0, controller, pruned=len(attention) == 2)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trials.jsonl"


@pytest.fixture
def written(path):
    journal = Journal(path, SETTINGS)
    journal.keep_costs(COSTS)
    journal.keep_gains([0.5, -1.0])
    for s in (score(), score(1), score(1, 2)):
        journal.keep_score(s)
    return path


def test_what_was_kept_is_there_again(written):
    journal = Journal(written, SETTINGS)
    assert journal.costs == COSTS
    assert journal.gains == (0.5, -1.0)
    assert list(journal.scores.values()) == [score(), score(1), score(1, 2)]


def test_every_cut_loses_at_most_the_last_line(written):
    """Killed at any byte: what was whole is there, and the journal goes on from it."""
    text = written.read_text()
    for cut in range(0, len(text), 7):
        written.write_text(text[:cut])
        whole = text[:cut].count("\n")
        journal = Journal(written, SETTINGS)
        assert len(journal.scores) == max(0, whole - 3)
        journal.keep_score(score(2))
        again = Journal(written, SETTINGS)
        assert again.scores[score(2).skip] == score(2)
        assert len(again.scores) == max(0, whole - 3) + 1


def test_another_search_is_refused(written):
    with pytest.raises(
        SelfspecError, match=r"trials\.jsonl holds the trials of another search; resume with its options"
    ):
        Journal(written, {**SETTINGS, "seed": 2})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(st.text('{}[]":, settinrals\n01', max_size=80) | st.sampled_from(["costs", "gains", "trial"]))
def test_anything_else_is_one_clear_line(path, text):
    path.write_text(json.dumps({"settings": SETTINGS}) + "\n" + (text if "{" in text else json.dumps({text: 3})) + "\n")
    try:
        Journal(path, SETTINGS)
    except SelfspecError as error:
        assert "\n" not in str(error)
    path.write_text(text)
    try:
        Journal(path, SETTINGS)
    except SelfspecError as error:
        assert "\n" not in str(error)


def test_without_a_path_nothing_is_written(tmp_path):
    journal = Journal(None, SETTINGS)
    journal.keep_costs(COSTS)
    journal.keep_score(score())
    assert journal.scores
    assert not list(tmp_path.iterdir())
