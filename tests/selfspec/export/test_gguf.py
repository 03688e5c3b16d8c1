"""GGUF files: read back by the project's own loader, they are the model that was written."""

from __future__ import annotations

import json

import gguf
import pytest
import torch
from models import CONFIGS, SIZES, YARN, tiny
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from selfspec import builtin
from selfspec.basics.errors import SelfspecError
from selfspec.export.gguf_files import check_type, fake_quantize, type_of, write_model
from selfspec.export.gguf_tokenizer import tokenizer_keys, tokenizer_keys_of_file
from selfspec.export.weights import model_of, weights_of
from selfspec.models.gguf_header import read_header
from selfspec.models.loading import load_model, load_tokenizer

VOCABULARY = 300
TOKENS = torch.tensor([[5, 17, 200, 240, 5, 17, 91, 2]])
TEXT = "def read(self, path):\n    return 12345  # é, 你好\n"
LLAMA_31 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def like(pre, **more):
    """A byte-level BPE of one merge that splits text in some way."""
    known = {char: i for i, char in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"])}
    tokenizer = Tokenizer(models.BPE(known, [("a", "b")], **more))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="!", bos_token='"')


@pytest.fixture(scope="module")
def words():
    return tokenizer_keys(like(pre_tokenizers.ByteLevel(add_prefix_space=False)), None, VOCABULARY)


def model_like(name, **more):
    config = CONFIGS[name].to_dict() | {"vocab_size": VOCABULARY} | more
    return tiny(type(CONFIGS[name])(**config), dtype=torch.float32)


def written(path, model, words, kind="F32"):
    held = gguf.GGMLQuantizationType[kind]
    return write_model(path, weights_of(model), words, lambda module: held, context=128, name="tiny")


SHARP = {"rope_parameters": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.25}}
ROPE = {"rope_parameters": {**LLAMA_31, "original_max_position_embeddings": 8192}}


@pytest.mark.parametrize(
    ("name", "more"),
    [("llama-mqa-tied", ROPE), ("llama-yarn", {}), ("llama-yarn", SHARP), ("qwen2", {})],
    ids=["llama3", "yarn", "sharp yarn", "qwen2"],
)
def test_in_f32_it_is_the_same_model(tmp_path, words, name, more):
    model = model_like(name, **more)
    assert written(tmp_path / "model.gguf", model, words) == []
    again, _ = load_model(str(tmp_path / "model.gguf"), dtype="float32")
    mine = model.state_dict()
    assert all(torch.equal(tensor, mine[name]) for name, tensor in again.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits, atol=0, rtol=1e-6)


def test_its_tokenizer_is_the_models(tmp_path):
    mine = load_tokenizer("builtin")
    model = model_like("llama-mqa-tied", vocab_size=4096, num_hidden_layers=1)
    written(tmp_path / "model.gguf", model, tokenizer_keys(mine, None, 4096))
    again = load_tokenizer(str(tmp_path / "model.gguf"))
    assert again(TEXT).input_ids == mine(TEXT).input_ids
    assert again.eos_token_id == mine.eos_token_id


def test_in_few_bits_it_is_what_was_rounded(tmp_path, words):
    """What is rehearsed is what is written."""
    model = model_like("llama-mqa-tied", intermediate_size=64)
    kind = gguf.GGMLQuantizationType.Q8_0
    assert written(tmp_path / "model.gguf", model, words, "Q8_0") == []
    again, _ = load_model(str(tmp_path / "model.gguf"), dtype="float32")
    mine = model_of(fake_quantize(weights_of(model), lambda module: kind))
    with torch.no_grad():
        found, exact = mine(TOKENS).logits, model(TOKENS).logits
        torch.testing.assert_close(again(TOKENS).logits, found, atol=1e-5, rtol=1e-5)
    assert not torch.equal(found, exact)
    assert (found - exact).norm() < 0.05 * exact.norm()


def test_rows_that_do_not_divide_stay_in_16_bits(tmp_path, words):
    held = written(tmp_path / "model.gguf", model_like("llama-mqa-tied"), words, "Q4_0")  # an MLP of 48
    assert held == [f"model.layers.{i}.mlp.down_proj" for i in range(4)]
    tensors = read_header(tmp_path / "model.gguf").tensors
    assert tensors["blk.0.ffn_down.weight"].type == gguf.GGMLQuantizationType.F16
    assert tensors["blk.0.ffn_up.weight"].type == gguf.GGMLQuantizationType.Q4_0


def test_a_head_dim_of_its_own_is_told(tmp_path, words):
    written(tmp_path / "model.gguf", model_like("llama-head-dim"), words)
    header = read_header(tmp_path / "model.gguf")
    assert (header.arch_value("attention.key_length"), header.arch_value("rope.dimension_count")) == (16, 16)
    assert header.arch_value("context_length") == 128


def test_a_tokenizer_is_copied_from_a_file(tmp_path, words):
    written(tmp_path / "model.gguf", model_like("llama"), words)
    copied = {key: value for key, value, *_ in tokenizer_keys_of_file(tmp_path / "model.gguf")}
    assert copied == {key: value for key, value, *_ in words}
    assert copied["tokenizer.ggml.pre"] == "gpt-2"
    assert copied["tokenizer.ggml.eos_token_id"] == 0
    assert not copied["tokenizer.ggml.add_bos_token"]


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT = {"behavior": "isolated", "invert": False}


def split(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), **SPLIT),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def digits():
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: like(split(LLAMA_3), ignore_merges=True), "llama-bpe"),
        (lambda: like(split(LLAMA_3.replace("{1,3}", ""))), "qwen2"),
        (lambda: like(digits()), "smollm"),
        (lambda: like(pre_tokenizers.ByteLevel(add_prefix_space=False)), "gpt-2"),
    ],
    ids=["llama-bpe", "qwen2", "smollm", "gpt-2"],
)
def test_llama_cpps_name_of_how_text_is_split(make, name):
    found = {key: value for key, value, *_ in tokenizer_keys(make(), None, 300)}
    assert found["tokenizer.ggml.pre"] == name
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert (len(tokens), tokens[299], kinds[299], kinds[5]) == (300, "[PAD299]", 5, 1)
    assert kinds[tokens.index("!")] == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: like(pre_tokenizers.Metaspace()),
        lambda: like(split(r"\w+")),
        lambda: like(split(LLAMA_3)),  # whose merges count
        lambda: like(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    ],
    ids=["sentencepiece", "another pattern", "merges", "a space before"],
)
def test_any_other_tokenizer_is_refused(make):
    with pytest.raises(SelfspecError, match="name as --model a GGUF file of the model, whose tokenizer is copied"):
        tokenizer_keys(make(), None, 300)


def test_the_template_and_further_ends_are_told():
    tokenizer = load_tokenizer("builtin")
    tokenizer.chat_template = "{{ messages }}"

    class Ends:
        eos_token_id = [0, 7]

    found = {key: value for key, value, *_ in tokenizer_keys(tokenizer, Ends(), 4096)}
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    assert (found["tokenizer.ggml.eos_token_id"], found["tokenizer.ggml.eot_token_id"]) == (0, 7)
    vocabulary = json.loads((builtin.model_folder() / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    assert all(found["tokenizer.ggml.tokens"][number] == text for text, number in vocabulary.items())


def test_types():
    check_type("q8_0")
    check_type(None)
    with pytest.raises(SelfspecError, match="--type q9: expected one of f32, f16, bf16, q8_0"):
        check_type("q9")
    assert type_of(None, torch.bfloat16).name == "BF16"
    assert type_of(None, torch.float64).name == "F32"
    assert type_of("q4_0", torch.float32).name == "Q4_0"


def test_other_models_are_refused():
    model = tiny(LlamaConfig(**SIZES))
    model.config.model_type = "gemma"
    with pytest.raises(SelfspecError, match="models of type 'gemma' are not exported; known: llama, mistral, qwen2"):
        weights_of(model)


def test_rope_with_a_divisor_for_each_frequency_is_refused(tmp_path, words):
    half = [1.0] * 4
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": half, "long_factor": half, "factor": 2.0}
    model = model_like("llama-mqa-tied", rope_parameters={**long, "original_max_position_embeddings": 64})
    with pytest.raises(SelfspecError, match="RoPE of type 'longrope' cannot be written as GGUF"):
        written(tmp_path / "model.gguf", model, words)
