"""GGUF files of every architecture: read from a file, a model computes what the model that it was written from does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FAMILY_CONFIGS, ROPE
from gguf_files import ARCHITECTURES as NAMED
from gguf_files import write_gguf
from models import LINEAR, YARN, tiny

import selfspec
from selfspec.basics.errors import SelfspecError
from selfspec.models.gguf_blocks import TYPES
from selfspec.models.gguf_config import ARCHITECTURES, read_config
from selfspec.models.gguf_header import read_header
from selfspec.models.loading import load_model

TOKENS = {"vocab_size": 300, "hidden_size": 64, "max_position_embeddings": 96}
PROMPT = torch.arange(20, 60)[None]
FACTORS = [1.0 + i / 4 for i in range(8)]
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": FACTORS,
    "long_factor": [2 * factor for factor in FACTORS],
    "original_max_position_embeddings": 48,
    "factor": 2.0,
}
GPT_OSS_YARN = {**YARN, "truncate": False}
BOTH = {"full_attention": {**LINEAR, "rope_theta": 1e6}, "sliding_attention": ROPE}


def config_of(name, **changes):
    config = FAMILY_CONFIGS[name]
    heads = {"head_dim": 16} if name not in ("phi3", "phi3-partial") else {}
    entries = {**config.to_dict(), **TOKENS, "torch_dtype": None, **heads, **changes}
    return type(config)(**{key: value for key, value in entries.items() if key != "dtype"})


CASES = {
    "llama": config_of("llama", attention_bias=True, mlp_bias=True),
    "mistral": config_of("mistral", sliding_window=None),
    "qwen2": config_of("qwen2", use_sliding_window=False, layer_types=None),
    "qwen3": config_of("qwen3", head_dim=32),
    "gemma2": config_of("gemma2", query_pre_attn_scalar=16, sliding_window=9),
    "gemma2 with two norms of scores": config_of("gemma2", query_pre_attn_scalar=12, attn_implementation="eager"),
    "gemma3": config_of(
        "gemma3_text", num_hidden_layers=7, layer_types=None, rope_parameters=BOTH, query_pre_attn_scalar=16
    ),
    "phi3": config_of("phi3"),
    "phi3-partial": config_of("phi3-partial"),
    "phi3-longrope": config_of("phi3", rope_parameters=LONG, original_max_position_embeddings=48),
    "qwen3_moe": config_of("qwen3_moe", mlp_only_layers=[], norm_topk_prob=True),
    "starcoder2": config_of("starcoder2", rope_parameters={**ROPE, "rope_theta": 999999.0}, sliding_window=None),
    "stablelm": config_of("stablelm"),
    "stablelm-parallel": config_of("stablelm-parallel"),
    "granite": config_of("granite", attention_bias=True),
    "olmo2": config_of("olmo2"),
    "gpt_oss": config_of("gpt_oss", rope_parameters=GPT_OSS_YARN, layer_types=None),
}
MORE = {"gemma2 with two norms of scores": {"gemma2.attention.scale": 12**-0.5}}


@pytest.fixture(autouse=True)
def cache_of_a_test(monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


def model_of(config):
    """A random model; norms that a file holds plus 1 can be told from it exactly."""
    model = tiny(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
                parameter.copy_(torch.round(parameter * 64) / 64)
    return model


@torch.no_grad()
def logits(model):
    model.set_experts_implementation("eager")  # which alone multiplies in float64
    return model(PROMPT).logits


def test_every_architecture_has_a_case():
    assert {NAMED.get(config.model_type, config.model_type) for config in CASES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("copies", ["1", "0"])
@pytest.mark.parametrize("name", CASES)
def test_logits_in_float64_are_those_of_the_model_that_was_written(name, copies, tmp_path, monkeypatch):
    monkeypatch.setenv("SELFSPEC_GGUF_COPIES", copies)
    model = model_of(CASES[name])
    path = write_gguf(tmp_path / "m.gguf", model, more=MORE.get(name))
    loaded, tokenizer = load_model(str(path), dtype="float64")
    assert torch.equal(logits(loaded), logits(model.double()))
    assert tokenizer.decode(tokenizer("def main():").input_ids) == "def main():"
    assert loaded.config.model_type == CASES[name].model_type or name == "mistral"


@pytest.mark.parametrize("name", CASES)
def test_kept_as_in_the_file_it_computes_the_same(name, tmp_path, caplog):
    path = str(write_gguf(tmp_path / "m.gguf", model_of(CASES[name]), kind="Q8_0", more=MORE.get(name)))
    whole, _ = load_model(path, dtype="float32")
    llm = selfspec.load(path, dtype="file", profile="none", method="plain")
    torch.testing.assert_close(logits(llm.model), logits(whole), atol=2e-3, rtol=2e-3)
    assert ("dequantised to float32" in caplog.text) == ARCHITECTURES[read_header(Path(path)).architecture].experts
    ids = PROMPT[0].tolist()
    expected = llm.model.generate(PROMPT, do_sample=False, max_new_tokens=8)[0, len(ids) :].tolist()
    assert llm.generate(ids, max_new_tokens=8).tokens == expected


def test_the_table_of_architectures_and_types_is_in_the_documentation():
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text("utf-8")
    for name, architecture in ARCHITECTURES.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |") and "yes | all" in line]
        assert f"| `{architecture.model_type}` |" in row
        assert row.endswith("all but experts |" if architecture.experts else "all matrices |")
    rows = [line.split(" | ") for line in text.splitlines() if " | yes | yes | " in line]
    assert set(TYPES) <= {kind.strip("`") for row in rows for kind in row[0].removeprefix("| ").split(", ")}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"llama.attention.head_count": "x"}, "attention.head_count 'x'; expected a number above 0"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "attention.layer_norm_rms_epsilon None; expected a number"),
        ({"llama.embedding_length": 64.5}, "embedding_length 64.5; expected an integer above 0"),
        ({"llama.rope.dimension_count": 8}, "RoPE over a part of each head; expected all of it"),
    ],
)
def test_a_configuration_that_is_wrong_gets_one_line(more, said, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", model_of(CASES["llama"]), more=more)
    with pytest.raises(SelfspecError, match=said) as error:
        read_config(path, read_header(path))
    assert "\n" not in str(error.value)


def test_numbers_are_those_that_were_meant(tmp_path):
    """A file's float32 stands for the number with the fewest digits, as it stood in the configuration."""
    path = write_gguf(tmp_path / "m.gguf", model_of(CASES["starcoder2"]), more={"x": 0.1, "y": 1e-5, "z": 3.4e38})
    metadata = read_header(path).metadata
    assert [metadata[key] for key in "xyz"] == [0.1, 1e-5, 3.4e38]
    assert read_config(path, read_header(path)).norm_epsilon == CASES["starcoder2"].norm_epsilon
