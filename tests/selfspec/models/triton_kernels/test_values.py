"""The kernels' values, by Triton's interpreter on a CPU in a process of its own: see `triton_cases.py`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from wants import needs

from selfspec.models.kernels import kernels_on
from selfspec.models.triton_kernels import switch
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


@pytest.fixture
def gpu(monkeypatch):
    """A GPU for which kernels compile, as far as the switch asks."""
    switch._compiles.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(switch, "_compiles", lambda device: True)
    return torch.device("cuda", 0)


@pytest.mark.parametrize(("value", "on"), [("1", True), (" On ", True), ("", True), ("0", False), (" off", False)])
def test_they_are_on_unless_switched_off_and_on_nvidias_gpus_alone(monkeypatch, gpu, value, on):
    monkeypatch.setenv("SELFSPEC_TRITON", value)
    assert triton_enabled(gpu) == on
    assert not triton_enabled(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not triton_enabled(gpu)


@pytest.mark.parametrize(
    ("target", "name", "instead"),
    [
        (torch.cuda, "is_available", lambda: False),
        (torch.cuda, "get_device_capability", lambda device: (7, 5)),
        (importlib.util, "find_spec", lambda name: None),
        (switch, "_compiles", lambda device: False),
    ],
)
def test_they_need_a_gpu_that_is_new_enough_triton_and_a_compiler(monkeypatch, gpu, target, name, instead):
    assert triton_enabled(gpu)
    monkeypatch.setattr(target, name, instead)
    assert not triton_enabled(gpu)


@needs_triton
def test_where_they_cannot_be_compiled_torch_is_used_with_one_warning(caplog):
    switch._compiles.cache_clear()
    for _ in range(2):  # Triton finds no driver for a CPU
        assert not switch._compiles(torch.device("cpu"))
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "Triton kernels cannot be compiled here, torch's are used"
    ]


@needs_triton
def test_they_are_among_the_kernels_to_choose_from_where_they_are_on(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "triton" in kernels_on(gpu, 4)
    assert {"triton", "float8", "fake"} == {*kernels_on(gpu, 8)}  # float8 in registers wants 8.9
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "triton float8" in kernels_on(gpu, 8)
    monkeypatch.setenv("SELFSPEC_TRITON", "0")
    assert not any("triton" in name for bits in (8, 4) for name in kernels_on(gpu, bits))
