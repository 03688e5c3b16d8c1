"""What a study keeps: across processes that are killed, and between workers that share it."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from amount import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from selfspec.search import storage
from selfspec.search.ledger import Ledger, ScoredTexts
from selfspec.search.objective import Score
from selfspec.search.space import Space
from selfspec.search.storage import open_storage
from selfspec.search.trial_tables import as_profile, best_within, memory_of, pareto, sensitivity_frame, trials_frame

from selfspec.basics.errors import SelfspecError
from selfspec.profile.schema import Calibration
from selfspec.types.acceptance import AcceptanceCurve
from selfspec.types.controller import ControllerSpec
from selfspec.types.costs import CostModel
from selfspec.types.draft_path import DraftPath

COSTS = CostModel(context=9, base=0.1, attention=0.2, mlp=0.3, widths=[1], verify=[1.0], round=0.0)
CURVE = AcceptanceCurve(confidence=[0.1, 0.5], accepted=[0.3, 0.7], following=[0.5, 0.6], candidates=[[0.2, 0.1]])
SETTINGS = {"name": "here/model", "seed": 1, "objective": "replay", "context": None}
SPACE = Space(4)


def score(*attention):
    controller = ControllerSpec(name="fixed", options={"k": 2})
    return Score(
        DraftPath.skipping(attention, (3,)),
        12.5,
        1.25,
        0.5,
        2.0,
        controller,
        pruned=len(attention) == 2,
        acceptance=CURVE,
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trials.jsonl"


@pytest.fixture
def written(path):
    ledger = Ledger(path, settings=SETTINGS)
    ledger.keep_costs(COSTS)
    ledger.keep_gains(((0.5, -1.0), (0.0, 2.0)))
    for s in (score(), score(1), score(1, 2)):
        ledger.keep_score(s, SPACE, draft_cost=0.25, seconds=1.5)
    return path


def test_what_was_kept_is_there_again(written):
    ledger = Ledger(written, settings=SETTINGS)
    assert ledger.costs == COSTS
    assert ledger.gains == ((0.5, -1.0), (0.0, 2.0))
    assert list(ledger.scores.values()) == [score(), score(1), score(1, 2)]
    assert [(e.draft_cost, e.seconds) for e in ledger.entries] == [(0.25, 1.5)] * 3
    assert ledger.settings == SETTINGS


def test_how_much_text_there_is_is_decided_once(path):
    """Whoever comes first decides; a study of before, which has none of it, knows of none."""
    ledgers = [Ledger(path, settings=SETTINGS) for _ in range(2)]
    said = Calibration(source="mine", prompts=3, tokens=30, sha256="0")
    mine, other = ScoredTexts(prompts=3, max_new_tokens=16, calibration=said), ScoredTexts(prompts=8, max_new_tokens=64)
    assert ledgers[0].texts is None
    assert ledgers[0].keep_texts(mine) == mine
    assert ledgers[1].keep_texts(other) == mine
    assert Ledger(path, settings=SETTINGS).texts == mine


def test_a_file_may_be_named_by_its_path_as_text(written):
    assert Ledger(str(written), settings=SETTINGS).costs == COSTS
    content = written.read_text()
    written.write_text(content.replace('"draft_cost"', '"dearness"', 1))
    with pytest.raises(SelfspecError, match=r"trials\.jsonl is damaged \(KeyError\)"):
        Ledger(str(written), settings=SETTINGS)


def test_trials_are_an_optuna_study(written):
    import optuna

    study = optuna.load_study(study_name="selfspec", storage=open_storage(written))
    trials = study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    assert [t.value for t in trials] == [12.5] * 3
    assert trials[1].params == {
        f"{part} {layer}": "skip" if (part, layer) in {("attention", 1), ("mlp", 3)} else "full"
        for layer in range(4)
        for part in ("attention", "mlp")
    }
    assert not [t for t in study.trials if not t.state.is_finished()]


def test_every_cut_loses_at_most_the_last_line(written):
    """Killed at any byte: what was whole is there, and the ledger goes on from it."""
    content = written.read_bytes()
    kept = 0
    for cut in range(0, len(content), 97):
        written.write_bytes(content[:cut])
        ledger = Ledger(written, settings=SETTINGS)
        assert len(ledger.scores) >= kept
        kept = len(ledger.scores)
        ledger.keep_score(score(2), SPACE)
        again = Ledger(written, settings=SETTINGS)
        assert again.scores[score(2).path] == score(2)
        assert len(again.scores) == kept + 1
    assert kept >= 2


def test_another_search_is_refused(written):
    with pytest.raises(SelfspecError, match=r"trials\.jsonl holds the trials of another search \(of other seed\)"):
        Ledger(written, settings={**SETTINGS, "seed": 2})
    Ledger(written, settings={**SETTINGS, "name": "there/model"})
    Ledger(written, "another study", settings={**SETTINGS, "seed": 2})
    with pytest.raises(
        SelfspecError, match=r"^study 'another study' of .* \(of other context\); .* name another study"
    ):
        Ledger(written, "another study", settings={**SETTINGS, "seed": 2, "context": 3})


def test_a_study_that_is_not_there(written):
    with pytest.raises(SelfspecError, match="study 'mine': not in this storage; the storage holds selfspec"):
        Ledger(written, "mine")
    assert Ledger(written, None).settings == SETTINGS
    Ledger(written, "second", settings=SETTINGS)
    with pytest.raises(SelfspecError, match="study: not named; the storage holds second, selfspec"):
        Ledger(written, None)


def test_the_first_of_several_counts(path):
    """Workers that begin at once agree on what all trials rest on."""
    workers = [Ledger(path, settings=SETTINGS) for _ in range(3)]
    for number, ledger in enumerate(workers):
        ledger._records.pop("costs", None)  # as if none had seen the others'
        ledger.keep_costs(COSTS.model_copy(update={"context": 10 + number}))
    for ledger in workers:
        ledger.refresh()
    assert [ledger.costs.context for ledger in workers] == [10] * 3


def test_workers_see_each_other(path, monkeypatch):
    a, b = (Ledger(path, settings=SETTINGS) for _ in range(2))
    a.claim(score(1).path)
    assert b.claimed() == {score(1).path}
    assert a.claimed() == set()
    a.keep_score(score(1), SPACE, seconds=2.0)
    a.claim(None)
    assert b.claimed() == set()
    b.refresh()
    assert b.scores == {score(1).path: score(1)}
    b.claim(score(2).path)
    now = time.time()
    monkeypatch.setattr("selfspec.search.ledger.time.time", lambda: now + 75)
    assert a.claimed() == {score(2).path}
    monkeypatch.setattr("selfspec.search.ledger.time.time", lambda: now + 90)
    assert a.claimed() == set(), "a worker that is silent for so long is dead"


def test_one_of_the_workers_finishes_and_a_later_one_may_again(path):
    a, b, c = (Ledger(path, settings=SETTINGS) for _ in range(3))
    assert [b.claim_finish(), a.claim_finish(), c.claim_finish()] == [True, False, False]
    later = Ledger(path, settings=SETTINGS)
    assert later.claim_finish()


@pytest.mark.parametrize("finished", [False, True])
def test_a_worker_that_died_before_it_finished_is_replaced(path, monkeypatch, finished):
    a, b = (Ledger(path, settings=SETTINGS) for _ in range(2))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with monkeypatch.context() as patched:
        patched.setattr("selfspec.search.ledger.os.getpid", lambda: ended.pid)
        assert a.claim_finish()
    if finished:
        a.mark_finished()
    assert b.claim_finish() is not finished


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(150), deadline=None)
@given(st.text('{}[]":, settinrals\n01', max_size=80) | st.sampled_from(["op_code", "study_name"]))
def test_anything_else_is_one_clear_line(path, text):
    for content in (
        text,
        json.dumps({"op_code": 0, "study_name": "x"}) + "\n" + json.dumps({text: 3}) + "\n",
        '{"op_code": 9}\n',
    ):
        path.write_text(content)
        try:
            Ledger(path, settings=SETTINGS)
        except SelfspecError as error:
            assert "\n" not in str(error)
            assert str(path) in str(error)
        path.unlink()


HOSTILE = st.sampled_from(
    [None, True, -1, 0, 10**30, 1e308, float("inf"), float("nan"), "", "x", "\u202e", [], [None], [[]], {}, {"x": 1}]
)


def places(value, at=()):
    """Every place of a JSON value, those inside texts of JSON included."""
    yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inside:
        yield from places(child, (*at, key))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_a_journal_with_any_other_value_is_one_clear_line(written, data):
    lines = written.read_text().splitlines()
    number = data.draw(st.integers(0, len(lines) - 1))
    line = json.loads(lines[number])
    *outer, last = data.draw(st.sampled_from([*places(line)][1:]))
    holder = line
    for key in outer:
        holder = holder[key]
    holder[last] = data.draw(HOSTILE)
    other = written.with_name("other.jsonl")
    other.write_text("\n".join([*lines[:number], json.dumps(line), *lines[number + 1 :]]) + "\n")
    for read in (
        lambda ledger: ledger.claimed(),
        trials_frame,
        sensitivity_frame,
        best_within,
        lambda ledger: pareto(ledger.entries, memory_of(ledger)),
        lambda ledger: as_profile(ledger, ledger.entries[0]) if ledger.entries else None,
    ):
        try:
            read(Ledger(other, None))
        except SelfspecError as error:
            assert "\n" not in str(error)
            assert "other.jsonl" in str(error) or "study" in str(error)


def test_in_memory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = Ledger(settings=SETTINGS)
    ledger.keep_costs(COSTS)
    ledger.keep_score(score(), SPACE)
    ledger.claim(score(1).path)
    assert ledger.scores
    assert ledger.claim_finish()
    assert not list(tmp_path.iterdir())


def test_the_claim_of_a_process_that_has_ended_lapses_at_once(path, monkeypatch):
    a, b = (Ledger(path, settings=SETTINGS) for _ in range(2))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with monkeypatch.context() as patch:
        patch.setattr("selfspec.search.ledger.os.getpid", lambda: ended.pid)
        a.claim(score(1).path)
    assert b.claimed() == set()
    with monkeypatch.context() as patch:  # another machine's processes are not this one's
        patch.setattr("selfspec.search.ledger.os.getpid", lambda: ended.pid)
        patch.setattr("selfspec.search.ledger.socket.gethostname", lambda: "elsewhere")
        a.claim(score(1).path)
    assert b.claimed() == {score(1).path}


def test_a_database_of_another_optuna_is_an_error_of_one_line(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise RuntimeError("The runtime optuna version is no longer compatible\nwith the table schema")

    monkeypatch.setattr(storage, "RDBStorage", refuse)
    with pytest.raises(SelfspecError, match="compatible with the table schema"):
        open_storage(f"sqlite:///{tmp_path}/trials.db")


def test_a_study_goes_on_where_weights_are_held_otherwise(tmp_path):
    """Another machine may hold the same weights in 16 bits; the device, in contrast, has to be the same."""
    made, path = {"name": "a", "held": None, "device": "cpu"}, tmp_path / "trials.jsonl"
    Ledger(path, settings=made)
    assert Ledger(path, settings={**made, "held": "bfloat16"}).settings["held"] is None
    with pytest.raises(SelfspecError, match="of other device"):
        Ledger(path, settings={**made, "device": "cuda"})
