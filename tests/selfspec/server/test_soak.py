"""A minute of mixed traffic on one server process: `tests/scripts/soak.py`, which runs for hours by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from wants import needs

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"
WAYS = ("ask", "stream", "four", "schema", "cancel", "stall", "nonsense", "mistake")


@pytest.mark.long("servers under attack")
@needs("llguidance", "llguidance")
def test_every_client_is_answered_rightly_to_the_end(tmp_path):
    out = tmp_path / "soak.json"
    done = subprocess.run([sys.executable, SCRIPT, "--minutes", "1", "--out", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(out.read_text())["counts"]
    assert all(counts[way] > 0 for way in WAYS), counts
    assert counts["rests"] == 1, counts  # after which nothing ran, nothing waited and every slot was free
