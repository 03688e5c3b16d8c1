"""Several processes that share a study, on a journal file and on a real PostgreSQL."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path

import command
import layouts
import optuna
import postgres
import pytest
from builtin_model import on_builtin
from selfspec.search.ledger import Ledger
from selfspec.search.storage import open_storage
from studies import small_study
from wants import is_there, missing

from selfspec.basics.errors import SelfspecError
from selfspec.cli import profile_commands
from selfspec.profile.reading import read_profile

pytestmark = pytest.mark.long("searches that several workers share")

COMMAND = str(Path(command.__file__))
TRIALS = 12
OPTIONS = ["--trials", TRIALS, "--num-prompts", 2, "--max-new-tokens", 8, "--threads", 1, "--keep-best"]


@pytest.fixture(scope="module", autouse=True)
def told_commands():
    """Two workers of different layouts could differ in what they search on."""
    layouts.tell_commands()


@pytest.fixture(scope="module", params=["journal file", "PostgreSQL"])
def storage(request, tmp_path_factory):
    if request.param == "journal file":
        yield tmp_path_factory.mktemp("shared") / "trials.jsonl"
        return
    if not is_there("psycopg"):
        missing("PostgreSQL's driver")
    if postgres.binaries() is None:
        missing("PostgreSQL")
    with postgres.server(tmp_path_factory.mktemp("postgres")) as url:
        yield url


def worker(warm, event, storage, folder, *options):
    """A search in a process of its own, with an event of `command.EVENTS`."""
    folder.mkdir(exist_ok=True)
    arguments = [warm.python, COMMAND, event, *on_builtin(["search", "--storage", storage, *OPTIONS, *options])]
    return subprocess.Popen([*map(str, arguments)], cwd=folder, stderr=subprocess.PIPE, env=os.environ)


def states(storage, study="selfspec"):
    trials = optuna.load_study(study_name=study, storage=open_storage(storage)).trials
    return [trial.state.name for trial in trials]


def test_two_workers_share_a_study(storage, tmp_path, warm):
    """Begun at once on a storage that is not there yet: one study, no trial lost, one profile."""
    workers = [worker(warm, "together:2", storage, tmp_path / name) for name in ("a", "b")]
    said = [process.communicate()[1].decode() for process in workers]
    assert [process.returncode for process in workers] == [0, 0], said
    profiles = [path for path in (tmp_path / name / "profile.yaml" for name in ("a", "b")) if path.exists()]
    assert len(profiles) == 1
    assert sum("another worker measures the best and saves the profile" in text for text in said) == 1
    profile = read_profile(profiles[0])
    assert profile.measured
    ledger = Ledger(storage)
    assert TRIALS <= profile.search.trials <= len(ledger.scores) <= TRIALS + 1  # each may have begun the last
    assert {entry.score.path for entry in ledger.entries} == set(ledger.scores)
    by = Counter(entry.worker for entry in ledger.entries)
    assert len(by) == 2
    assert min(by.values()) >= 2
    assert {"RUNNING", "WAITING"}.isdisjoint(states(storage))


def test_other_text_is_refused(tmp_path, warm):
    small_study(tmp_path / "trials.jsonl")
    process = worker(warm, "together:0", tmp_path / "trials.jsonl", tmp_path)
    said = process.communicate()[1].decode().strip()
    assert process.returncode == 2
    assert re.search(
        r"holds the trials of another search \(of other calibration text, .*\); resume with its options", said
    )
    assert "\n" not in said


def test_a_killed_worker_leaves_nothing_behind(tmp_path, warm):
    """Killed with -9, begun again, and again: every completed trial is known, and none runs forever."""
    storage, before = tmp_path / "trials.jsonl", []
    for known in (2, 5):
        process = worker(warm, f"killed:{known}", storage, tmp_path)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        now = [entry.score for entry in Ledger(storage).entries]
        assert now[: len(before)] == before
        assert len(now) == known
        before = now
    process = worker(warm, "together:0", storage, tmp_path)
    process.communicate()
    assert process.returncode == 0
    entries = Ledger(storage).entries
    assert [entry.score for entry in entries[: len(before)]] == before
    assert len(entries) == TRIALS
    assert {"RUNNING", "WAITING"}.isdisjoint(states(storage))


def test_a_profile_is_picked(tmp_path, capsys):
    ledger = small_study(tmp_path / "trials.jsonl")
    costs = sorted(entry.draft_cost for entry in ledger.entries if not entry.score.pruned)
    place, out = str(tmp_path / "trials.jsonl"), tmp_path / "p.yaml"
    profile_commands.run("selfspec", place, costs[0] + 1e-9, out, as_json=True)
    said = json.loads(capsys.readouterr().out)
    profile = read_profile(tmp_path / "p.yaml")
    assert profile.predicted.draft_cost == pytest.approx(costs[0], abs=1e-3)
    assert profile.note.endswith("not measured")
    front = said["pareto"]
    assert [row["draft_cost"] for row in front] == sorted(row["draft_cost"] for row in front)
    assert [row["acceptance_rate"] for row in front] == sorted(row["acceptance_rate"] for row in front)
    assert {row["memory"] for row in front} == {None}, "of a model whose sizes are not known"
    profile_commands.run("selfspec", place, costs[0] + 1e-9, out, extra_memory=0, as_json=False)
    assert "memory" in capsys.readouterr().err
    with pytest.raises(SelfspecError, match="no trial's draft step costs 0.001 of a plain one or less; the cheapest"):
        profile_commands.run("selfspec", place, 0.001, out, as_json=True)
    assert read_profile(out) == profile
