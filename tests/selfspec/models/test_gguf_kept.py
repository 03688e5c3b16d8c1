"""GGUF files kept in their few bits: the file's weights and memory, and drafts that change nothing."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from gguf_files import write_gguf
from layouts import needs_native
from models import CONFIGS, plain, tiny

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.models.gguf_blocks import TYPES
from selfspec.models.gguf_linear import BlockLinear
from selfspec.models.half_storage import held_dtypes
from selfspec.models.loading import load_model
from selfspec.models.stored_linear import StoredEmbedding
from selfspec.runtime.forward import LeanRuntime
from selfspec.types.draft_path import DraftPath, SkipSet

TOKENS = {"vocab_size": 300, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
PROMPT = torch.arange(20, 60)[None]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # whole blocks of the K types
KINDS = tuple(TYPES)


@pytest.fixture(autouse=True)
def cache_of_a_test(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SELFSPEC_GGUF_COPIES", "0")


def file_of(name, kind, tmp_path, **changes):
    config = CONFIGS[name]
    wide = WIDE if callable(kind) or kind.endswith("K") else {}
    entries = {**config.to_dict(), **TOKENS, "head_dim": 16, "layer_types": None, **wide, **changes}
    config = type(config)(**entries)
    return str(write_gguf(tmp_path / "m.gguf", tiny(config, dtype=torch.float32), kind=kind))


@torch.no_grad()
def logits(model):
    return model(PROMPT).logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "llama-mqa-tied", "qwen2"])
def test_it_computes_what_the_dequantised_model_computes(name, kind, tmp_path, monkeypatch):
    path = file_of(name, kind, tmp_path)
    whole, _ = load_model(path, dtype="float32")
    kept, _ = load_model(path, dtype="file")
    assert isinstance(kept.model.embed_tokens, StoredEmbedding)
    assert isinstance(kept.model.layers[1].mlp.down_proj, BlockLinear)
    assert torch.equal(kept.model.layers[1].self_attn.k_proj.weight, whole.model.layers[1].self_attn.k_proj.weight)
    torch.testing.assert_close(logits(kept), logits(whole), atol=1e-4, rtol=1e-4)
    assert kept.generation_config.eos_token_id == whole.generation_config.eos_token_id


@needs_native
@pytest.mark.parametrize(
    ("kind", "bits"), [("Q4_1", 5), ("Q5_0", 6), ("Q8_0", 8.5), ("Q4_K", 4.625), ("Q5_K", 5.625), ("Q6_K", 6.5625)]
)
def test_memory_is_the_files_and_passes_are_native(kind, bits, tmp_path):
    path = file_of("llama-mqa-tied", kind, tmp_path)
    llm = selfspec.load(path, dtype="file", profile="none")
    norms = 4 * llm.model.config.hidden_size * (2 * TOKENS["num_hidden_layers"] + 1)
    whole = selfspec.load(path, profile="none")
    assert llm.weight_bytes - norms == (whole.weight_bytes - norms) * bits / 32
    assert llm.runtime.native


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiler", [pytest.param(True, marks=needs_native), False])
def test_drafted_is_plain(kind, compiler, tmp_path, monkeypatch):
    """Along paths that skip, with fewer words, from the text; without a compiler, too."""
    if not compiler:
        monkeypatch.setenv("SELFSPEC_NATIVE", "0")
    path = file_of("llama", kind, tmp_path)
    llm = selfspec.load(path, dtype="file", profile="none")
    assert llm.runtime.native == compiler
    ids = PROMPT[0].tolist()
    expected = plain(LeanRuntime(llm.model), ids, 24)
    assert llm.generate(ids, max_new_tokens=24).tokens == expected
    for compiled, words in (SkipSet(attention={1}, mlp={1}), None), (SkipSet(mlp={0}), range(200)):
        drafter = llm.layer_skip(compiled, "fixed:k=3", words)
        assert llm.generate(ids, max_new_tokens=24, drafter=drafter).tokens == expected
    looked = selfspec.load(path, dtype="file", profile="none", method="lookup")
    found = looked.generate(ids, max_new_tokens=24)
    assert found.tokens == expected


@needs_native
def test_several_at_once_are_each_alone(tmp_path):
    llm = selfspec.load(file_of("llama", "Q4_1", tmp_path), dtype="file", profile="none")
    prompts = [PROMPT[0, n:].tolist() for n in (0, 7, 30)]
    alone = [llm.generate(ids, max_new_tokens=16).tokens for ids in prompts]
    assert [one.tokens for one in llm.generate_many(prompts, max_new_tokens=16)] == alone


def test_transformers_generate_gives_the_same(tmp_path):
    llm = selfspec.load(file_of("llama", "Q4_1", tmp_path), dtype="file", profile="none")
    theirs = llm.model.generate(PROMPT, do_sample=False, max_new_tokens=16)[0, PROMPT.shape[1] :].tolist()
    assert llm.generate(PROMPT[0].tolist(), max_new_tokens=16).tokens == theirs
    assert torch.equal(logits(copy.deepcopy(llm.model)), logits(llm.model))


@pytest.mark.parametrize("compiler", [pytest.param(True, marks=needs_native), False])
def test_a_tied_head_is_saved_once(compiler, tmp_path, monkeypatch):
    if not compiler:
        monkeypatch.setenv("SELFSPEC_NATIVE", "0")
    model, _ = load_model(file_of("llama-mqa-tied", "Q8_0", tmp_path), dtype="file")
    state = model.state_dict()
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    model.save_pretrained(tmp_path / "saved")
    again, _ = load_model(str(tmp_path / "m.gguf"), dtype="float32")
    again.save_pretrained(tmp_path / "whole")
    ours, theirs = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("saved", "whole"))
    assert abs(ours - theirs) < 1000


@needs_native
def test_float16_tensors_are_held_in_float16(tmp_path):
    model, _ = load_model(path := file_of("llama-mqa-tied", "F16", tmp_path), dtype="file")
    assert held_dtypes(model) == "float16"
    whole, _ = load_model(path, dtype="float32")
    torch.testing.assert_close(logits(model), logits(whole), atol=1e-4, rtol=1e-4)


def test_few_bits_are_not_offered_where_they_are_no_cheaper(tmp_path):
    four = selfspec.load(file_of("llama", "Q4_1", tmp_path), dtype="file", profile="none").runtime
    assert four.part_bytes("attention", 0, "int8") is None
    assert four.part_bytes("mlp", 0, "int4") is None
    eight = selfspec.load(file_of("llama", "Q8_0", tmp_path), dtype="file", profile="none").runtime
    assert eight.part_bytes("mlp", 0, "int8") is None
    assert eight.part_bytes("mlp", 0, "int4") is not None


def test_drafts_in_4_bits_of_a_target_in_8_are_plain(tmp_path):
    llm = selfspec.load(file_of("llama", "Q8_0", tmp_path), dtype="file", profile="none")
    ids = PROMPT[0].tolist()
    drafter = llm.layer_skip(DraftPath.from_modes(["int4"] * 4), "fixed:k=3")
    drafted = llm.generate(ids, max_new_tokens=24, drafter=drafter)
    assert drafted.tokens == llm.generate(ids, max_new_tokens=24).tokens
    assert drafted.stats.accepted > 0


def mixed(name):
    """The types of llama.cpp's Q4_K_M, in which some values and down projections have more bits; and three others."""
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"} if "blk.1" not in name else {"ffn_up": "Q8_0"}
    of = {"attn_output": "F16", "output.weight": "BF16", **kinds}
    return next((kind for part, kind in of.items() if part in name), "Q4_K")


@needs_native
def test_a_file_of_several_types_is_kept_whole(tmp_path, caplog):
    path = file_of("llama", mixed, tmp_path)
    with caplog.at_level(logging.WARNING, "selfspec"):
        llm = selfspec.load(path, dtype="file", profile="none")
    assert "dequantised" not in caplog.text
    assert llm.runtime.native
    assert held_dtypes(llm.model) == "bfloat16 and float16"
    whole, _ = load_model(path, dtype="float32")
    torch.testing.assert_close(logits(llm.model), logits(whole), atol=1e-3, rtol=1e-3)
    ids = PROMPT[0].tolist()
    expected = plain(LeanRuntime(llm.model), ids, 24)
    drafter = llm.layer_skip(SkipSet(attention={1}, mlp={0}), "fixed:k=3", range(200))
    assert llm.generate(ids, max_new_tokens=24, drafter=drafter).tokens == expected
    prompts = [PROMPT[0, n:].tolist() for n in (0, 7, 30)]
    alone = [llm.generate(prompt, max_new_tokens=16).tokens for prompt in prompts]
    assert [one.tokens for one in llm.generate_many(prompts, max_new_tokens=16)] == alone


@pytest.mark.parametrize("kind", ["Q2_K", "MXFP4"])
def test_other_types_are_dequantised_and_said(kind, tmp_path, caplog):
    path = file_of("llama", lambda name: kind if "ffn_up" in name else "Q8_0", tmp_path)
    with caplog.at_level(logging.WARNING, "selfspec"):
        kept, _ = load_model(path, dtype="file")
    assert f"dequantised to float32: 2 of type {kind}; kept in quantised form: Q8_0, Q4_0" in caplog.text
    whole, _ = load_model(path, dtype="float32")
    torch.testing.assert_close(logits(kept), logits(whole), atol=1e-4, rtol=1e-4)


def test_iq_types_are_refused_by_name_and_dequantised(tmp_path):
    path = file_of("llama", lambda name: "IQ4_NL" if "ffn_up" in name else "Q8_0", tmp_path)
    with pytest.raises(SelfspecError, match="type IQ4_NL cannot be kept quantised; expected .* --dtype auto") as error:
        load_model(path, dtype="file")
    assert "\n" not in str(error.value)
    loaded, _ = load_model(path, dtype="float32")
    up = loaded.model.layers[0].mlp.up_proj.weight
    assert len(up.unique()) == 16
    assert bool(up.isfinite().all())


def test_wrong_wishes_are_one_clear_line(tmp_path):
    with pytest.raises(SelfspecError, match="dtype 'file' .* model builtin is not a GGUF file"):
        load_model("builtin", dtype="file")
    with pytest.raises(SelfspecError, match="run on the CPU only; expected --device cpu"):
        load_model(file_of("llama", "Q8_0", tmp_path), dtype="file", device=selfspec.DeviceMap())
