"""`selfspec env`: what a bug report needs, and what a model takes in memory."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from models import CONFIGS, tiny

from selfspec import __version__
from selfspec.cli.env import bytes_in, model_memory
from selfspec.models import native_library
from selfspec.models.triton_kernels import switch


@pytest.fixture(autouse=True)
def own_variables(monkeypatch):
    monkeypatch.setenv("SELFSPEC_API_KEY", "secret")
    monkeypatch.setenv("SELFSPEC_TEST", "told")


def test_a_report(cli, monkeypatch):
    code, out, _ = cli("env", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["selfspec"], found["torch"]) == (__version__, torch.__version__)
    assert found["transformers"] == transformers.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["variables"]["SELFSPEC_TEST"] == "told"
    assert "secret" not in out
    assert found["devices"][0]["device"] == "cpu"
    assert (found["kernels"], found["layout"]) in (("selfspec", "native"), ("torch", "timed for each model"))
    monkeypatch.setenv("SELFSPEC_NATIVE", "0")
    code, out, _ = cli("env")
    assert code == 0
    assert "native kernels are turned off by SELFSPEC_NATIVE=0" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(("on", "kernels"), [(True, "kernels by Triton"), (False, "kernels by torch")])
def test_a_gpu_and_its_kernels(cli, monkeypatch, on, kernels):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=141 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(switch, "triton_enabled", lambda device: on)
    code, out, _ = cli("env")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if "NVIDIA H200, 141 GB" in line and kernels in line] == [
        "cuda:0"
    ]


def test_the_memory_of_a_model(cli):
    model = tiny(CONFIGS["llama"])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained("m")
    found = model_memory("m")
    config = model.config
    assert found["parameters"] == parameters
    assert found["weight_bytes"]["float32"] == 4 * parameters
    assert found["weight_bytes"]["int8"] == parameters
    wide = config.num_key_value_heads * config.head_dim
    assert found["kv_bytes"] == 2 * config.num_hidden_layers * wide * 2048 * 4
    assert found["kv_copy_bytes"] == config.num_hidden_layers * 2048 * (2 * wide + 8 * config.num_key_value_heads)
    code, out, _ = cli("env", "-m", "m")
    assert code == 0
    assert f"m: llama, {parameters:,} parameters" in out


def test_a_model_that_is_not_there(cli):
    code, _, err = cli("env", "--model", "no/such/model/at/all")
    assert code == 2
    assert err.startswith("error: model no/such/model/at/all: no such folder")


def test_bytes_of_a_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"12345")
    (tmp_path / "c").write_bytes(b"678")
    assert bytes_in(tmp_path) == 8
    assert bytes_in(tmp_path / "none") == 0


def test_instruction_sets(monkeypatch):
    monkeypatch.delenv("SELFSPEC_ISA", raising=False)
    monkeypatch.setattr(native_library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native_library, "_instructions", lambda: "flags : avx2 fma f16c bmi2")
    assert native_library.instruction_set() == "avx2"
    amx = "avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni amx_tile"
    monkeypatch.setattr(native_library, "_instructions", lambda: amx)
    assert native_library.instruction_set() == "avx512vnni, amx"
    monkeypatch.setenv("SELFSPEC_ISA", "sse")
    assert native_library.instruction_set() == "sse"
