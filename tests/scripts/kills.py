"""A search killed with -9 again and again, at random moments, then resumed to its end.

    python tests/scripts/kills.py --kills 100 [--storage URL]

After every kill: each trial that was completed before is still there, in its place, and none is left running.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optuna
from selfspec.search.storage import is_database, open_storage

SELFSPEC = str(Path(sys.executable).with_name("selfspec"))
STUDY = "kills"


def completed(storage: str | Path) -> list[tuple[float, dict[str, int]]]:
    """Value and variables of every completed trial. Raises `AssertionError` when one is left running."""
    if STUDY not in optuna.get_all_study_names(open_storage(storage)):
        return []
    trials = optuna.load_study(study_name=STUDY, storage=open_storage(storage)).trials
    assert all(trial.state.is_finished() for trial in trials), "a trial is left running"
    return [(trial.value, trial.params) for trial in trials if trial.state.name == "COMPLETE"]


def main() -> None:
    """Kill, look, resume."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--storage", help="a database's URL; a journal file when left out")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trials.jsonl"
        storage = given.storage if given.storage and is_database(given.storage) else file
        common = [
            "-m",
            "builtin",
            "--storage",
            str(storage),
            "--study",
            STUDY,
            "--num-prompts",
            "2",
            "--max-new-tokens",
            "8",
        ]
        command = [
            SELFSPEC,
            "search",
            "--model",
            "builtin",
            *common,
            "--threads",
            "1",
            "--keep-best",
            "--out",
            f"{folder}/p.yaml",
        ]
        before: list[tuple[float, dict[str, int]]] = []
        hurt = torn = 0
        for number in range(given.kills):
            process = subprocess.Popen(
                [*command, "--trials", "100000"], stderr=subprocess.DEVNULL, env=environment, cwd=folder
            )
            if draw.random() < 0.6:  # while trials are scored and written, not only before
                while process.poll() is None and len(completed(storage)) == len(before):
                    time.sleep(0.1)
                time.sleep(draw.uniform(0, 2))
            else:
                time.sleep(draw.uniform(0, 8))
            assert process.poll() is None, f"it ended by itself with code {process.returncode}"
            process.send_signal(signal.SIGKILL)
            process.wait()
            torn += storage is file and file.exists() and not file.read_bytes().endswith(b"\n")
            now = completed(storage)
            assert now[: len(before)] == before, "a completed trial was lost"
            hurt += len(now) > len(before)
            before = now
            print(f"kill {number + 1}: {len(now)} trials", flush=True)
        done = subprocess.run([*command, "--trials", str(len(before) + 3)], env=environment, cwd=folder, check=False)
        assert done.returncode == 0
        assert completed(storage)[: len(before)] == before
        print(
            f"{given.kills} kills, {hurt} of them after new trials, {torn} in the middle of a line; {len(before)} "
            f"trials were there, {len(completed(storage))} at the end, none running"
        )


if __name__ == "__main__":
    main()
