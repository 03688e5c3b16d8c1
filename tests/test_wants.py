"""What was skipped is told at the end, with what to install for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from wants import INSTALL, reason, summary

SKIPPED = """
import pytest
from wants import missing, needs

@pytest.fixture(scope="module")
def server():
    missing("PostgreSQL")

@pytest.mark.parametrize("n", range(12))
def test_with_a_server(server, n): ...

@needs("no_such_module", "llguidance")
def test_guided(): ...

@pytest.mark.skip(reason="for another reason")
def test_other(): ...

def test_that_runs(): ...
"""
TOLD = [
    "12 skipped, wants PostgreSQL; to run them: apt-get install postgresql",
    " 1 skipped, for another reason",
    " 1 skipped, wants llguidance; to run them: pip install llguidance",
]


def test_each_want_is_one_line():
    reasons = [reason("llguidance"), *[reason("PostgreSQL")] * 12, "for another reason"]
    assert sorted(summary(reasons)) == sorted(TOLD)
    assert summary(reasons)[0] == TOLD[0], "most first"
    assert summary([]) == []
    assert all(": " not in what for what in INSTALL)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_summary(tmp_path, workers):
    """Also where the tests are shared between processes."""
    (tmp_path / "conftest.py").write_text("from wants import summary_of_skipped as pytest_terminal_summary")
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    helpers = str(Path(__file__).parent / "helpers")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers), "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": helpers},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    _, _, told = done.stdout.partition(" skipped tests ==")
    assert sorted(told.splitlines()[1:4]) == sorted(TOLD)
