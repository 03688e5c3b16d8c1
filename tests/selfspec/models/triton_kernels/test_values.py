"""The kernels' values, by Triton's interpreter on a CPU in a process of its own: see `triton_cases.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from wants import needs

from selfspec.models.kernels import kernels_on
from selfspec.models.triton_kernels.switch import triton_enabled

HELPERS = Path(__file__).parents[3] / "helpers"
needs_triton = needs("triton", "Triton")


def failures(*cases: str) -> dict[str, str | None]:
    """The traceback of each case, None where it passed."""
    paths = os.pathsep.join([str(HELPERS), *sys.path])
    command = [sys.executable, str(HELPERS / "triton_cases.py"), *cases]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(cases)
    return found


@needs_triton
def test_a_row_has_the_bits_that_it_has_alone():
    assert failures("rows_among_others") == {"rows_among_others": None}


@needs_triton
@pytest.mark.long("kernels under an interpreter")
@pytest.mark.parametrize(
    "case",
    [
        "nodes",
        "nodes_of_a_round",
        "rounds",
        "products",
        "many_rows",
        "norms",
        "rope",
        "attention",
        "passes_in_float32",
        "passes_in_bfloat16",
        "draft_paths",
    ],
)
def test_kernels_and_passes_over_shapes_and_dtypes(case):
    assert failures(case) == {case: None}


@pytest.mark.parametrize(("value", "on"), [("1", True), (" On ", True), ("", False), ("0", False)])
def test_they_are_off_unless_asked_for_and_on_cuda_alone(monkeypatch, value, on):
    monkeypatch.setenv("SELFSPEC_TRITON", value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert triton_enabled(torch.device("cuda", 0)) == on
    assert not triton_enabled(torch.device("cpu"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not triton_enabled(torch.device("cuda", 0))
    monkeypatch.delenv("SELFSPEC_TRITON")
    assert not triton_enabled(torch.device("cuda", 0))


@needs_triton
def test_they_are_among_the_kernels_to_choose_from_where_they_are_on(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not any("triton" in name for bits in (8, 4) for name in kernels_on(device, bits))
    monkeypatch.setenv("SELFSPEC_TRITON", "1")
    assert "triton" in kernels_on(device, 4)
    assert {"triton", "float8", "fake"} == {*kernels_on(device, 8)}  # float8 in registers wants 8.9
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "triton float8" in kernels_on(device, 8)
