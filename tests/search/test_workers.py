"""Several processes that share a study, on a journal file and on a real PostgreSQL."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import postgres
import pytest
from selfspec.search.ledger import Ledger
from selfspec.search.objective import Score
from selfspec.search.storage import open_storage
from studies import small_study

from selfspec.basics.errors import SelfspecError
from selfspec.cli import pick
from selfspec.profile.reading import read_profile

SELFSPEC = str(Path(sys.executable).with_name("selfspec"))
TRIALS = 12
on_a_file = pytest.mark.parametrize("storage", ["journal file"], indirect=True)  # what no storage does otherwise
OPTIONS = ["--trials", TRIALS, "--prompts", 2, "--max-new-tokens", 8, "--threads", 1, "--keep-best"]


@pytest.fixture(scope="module", params=["journal file", "PostgreSQL"])
def storage(request, tmp_path_factory):
    if request.param == "journal file":
        yield tmp_path_factory.mktemp("shared") / "trials.jsonl"
        return
    pytest.importorskip("psycopg", reason="the PostgreSQL driver is not installed")
    if postgres.binaries() is None:
        pytest.skip("PostgreSQL is not installed here")
    with postgres.server(tmp_path_factory.mktemp("postgres")) as url:
        yield url


def worker(storage, folder, study="selfspec", *options):
    folder.mkdir(exist_ok=True)
    shared = ["--storage", storage, "--study", study, *OPTIONS, *options]
    command = [SELFSPEC, "search", *map(str, shared)]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, env=os.environ)


def states(storage, study="selfspec"):
    trials = optuna.load_study(study_name=study, storage=open_storage(storage)).trials
    return [trial.state.name for trial in trials]


def completed(storage, study):
    """Trials that are there; a worker may not have come to make the study yet."""
    try:
        return states(storage, study).count("COMPLETE")
    except KeyError:
        return 0


def test_two_workers_share_a_study(storage, tmp_path):
    """Begun at once on a storage that is not there yet: one study, no set scored twice for long, one profile."""
    trials = 30  # so many that the first has not ended when the second begins
    workers = [worker(storage, tmp_path / name, "selfspec", "--trials", trials) for name in ("a", "b")]
    said = [process.communicate(timeout=300)[1].decode() for process in workers]
    assert [process.returncode for process in workers] == [0, 0], said
    profiles = [path for path in (tmp_path / name / "profile.yaml" for name in ("a", "b")) if path.exists()]
    assert len(profiles) == 1
    assert sum("another worker measures the best and saves the profile" in text for text in said) == 1
    profile = read_profile(profiles[0])
    assert profile.measured
    assert profile.search.trials >= trials
    ledger = Ledger(storage)
    by = [sum(entry.worker == w for entry in ledger.entries) for w in {entry.worker for entry in ledger.entries}]
    assert len(by) == 2
    assert min(by) >= 2
    assert len(ledger.entries) - len(ledger.scores) <= 2
    assert len(ledger.entries) <= trials + 2
    assert {"RUNNING", "WAITING"}.isdisjoint(states(storage))


def test_other_text_is_refused(tmp_path):
    small_study(tmp_path / "trials.jsonl")
    process = worker(tmp_path / "trials.jsonl", tmp_path)
    said = process.communicate(timeout=120)[1].decode().strip()
    assert process.returncode == 2
    assert re.search(
        r"holds the trials of another search \(of other calibration text, .*\); resume with its options", said
    )
    assert "\n" not in said


@on_a_file
def test_a_killed_worker_leaves_nothing_behind(storage, tmp_path):
    """Killed with -9, begun again, and again: every completed trial is known, and none runs forever."""
    before: list[Score] = []
    for least in (2, 5):
        process = worker(storage, tmp_path, "killed")
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and completed(storage, "killed") < least:
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        now = [entry.score for entry in Ledger(storage, "killed").entries]
        assert now[: len(before)] == before
        assert len(now) >= least
        before = now
    assert worker(storage, tmp_path, "killed").wait(timeout=300) == 0
    entries = Ledger(storage, "killed").entries
    assert [entry.score for entry in entries[: len(before)]] == before
    assert len(entries) == TRIALS
    assert {"RUNNING", "WAITING"}.isdisjoint(states(storage, "killed"))


def test_a_profile_is_picked(tmp_path, capsys):
    ledger = small_study(tmp_path / "trials.jsonl")
    costs = sorted(entry.draft_cost for entry in ledger.entries if not entry.score.pruned)
    place, out = str(tmp_path / "trials.jsonl"), tmp_path / "p.yaml"
    pick.run("selfspec", place, costs[0] + 1e-9, out, as_json=True)
    said = json.loads(capsys.readouterr().out)
    profile = read_profile(tmp_path / "p.yaml")
    assert profile.predicted.draft_cost == pytest.approx(costs[0], abs=1e-3)
    assert profile.note.endswith("not measured")
    front = said["pareto"]
    assert [row["draft_cost"] for row in front] == sorted(row["draft_cost"] for row in front)
    assert [row["acceptance_rate"] for row in front] == sorted(row["acceptance_rate"] for row in front)
    with pytest.raises(SelfspecError, match="no trial's draft step costs 0.001 of a plain one or less; the cheapest"):
        pick.run("selfspec", place, 0.001, out, as_json=True)
    assert read_profile(out) == profile
