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
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from wants import needs

from selfspec.models import kernels, norms
from selfspec.models.kernels import kernels_on
from selfspec.models.low_precision import quantize
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
@pytest.mark.parametrize("case", ["rows_among_others", "current_devices"])
def test_bits_of_rows_and_devices_of_launches(case):
    assert failures(case) == {case: None}


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


def test_where_triton_cannot_be_imported_torch_is_used(caplog, monkeypatch):
    switch._compiles.cache_clear()
    monkeypatch.setitem(sys.modules, "selfspec.models.triton_kernels.elementwise", None)
    assert not switch._compiles(torch.device("cpu"))
    assert "torch's are used" in caplog.text
    switch._compiles.cache_clear()


def test_the_weight_of_an_offloaded_norm_is_brought_to_the_device(monkeypatch):
    """A kernel cannot read memory of another device, as torch's own operations cannot."""
    weights = []
    monkeypatch.setattr(norms, "triton_enabled", lambda device: True)
    monkeypatch.setattr(norms, "device_of", lambda module: torch.device("meta"))
    monkeypatch.setattr(norms, "_triton_norm", lambda weight, eps: weights.append(weight))
    norms.Norms(1e-5).read(LlamaRMSNorm(8, eps=1e-5), torch.device("meta"))
    assert [weight.device.type for weight in weights] == ["meta"]


@needs_triton
def test_weights_are_converted_to_float8_a_few_outputs_at_a_time(monkeypatch):
    held = quantize(torch.randn(37, 128), 8)
    whole, convert, sizes = kernels.triton_float8(held, torch.bfloat16), kernels._in_float8, []
    monkeypatch.setattr(kernels, "_in_float8", lambda rows: (sizes.append(len(rows)), convert(rows))[1])
    monkeypatch.setattr(kernels, "_CONVERTED", 5 * 128)
    parts = kernels.triton_float8(held, torch.bfloat16)
    assert sizes == [5] * 7 + [2]
    assert torch.equal(parts.values.view(torch.uint8), whole.values.view(torch.uint8))
    assert torch.equal(parts.scale, whole.scale)


@needs_triton
def test_they_are_among_the_kernels_to_choose_from_where_they_are_on(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "triton" in kernels_on(gpu, 4)
    assert {"triton", "float8", "fake"} == {*kernels_on(gpu, 8)}  # float8 in registers wants 8.9
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "triton float8" in kernels_on(gpu, 8)
    monkeypatch.setenv("SELFSPEC_TRITON", "0")
    assert not any("triton" in name for bits in (8, 4) for name in kernels_on(gpu, bits))
