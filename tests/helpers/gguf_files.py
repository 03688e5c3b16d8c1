"""GGUF files of tiny models, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedConfig

from selfspec import builtin

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Tensors by the module's name."""


def write_gguf(
    path: Path, model: Any, *, kind: str = "F32", more: Mapping[str, Any] | None = None, freqs: Any = None
) -> Path:
    """`model` as a GGUF file: 2D weights as `kind`, the built-in tokenizer's tokens cut to the vocabulary.

    `more` are further keys; `freqs`, what rope's frequencies are divided by.
    """
    config = model.config
    llama = config.model_type != "qwen2"
    writer = gguf.GGUFWriter(path, "llama" if llama else "qwen2")
    _sizes(writer, config)
    _tokens(writer, config.vocab_size)
    for key, value in (more or {}).items():
        writer.kv_data[0].pop(key, None)
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weights = parameter.float().numpy()
        if llama and ("q_proj" in name or "k_proj" in name):
            weights = _paired(weights, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        quantised = gguf.GGMLQuantizationType[kind if weights.ndim > 1 else "F32"]
        writer.add_tensor(_name(name), gguf.quants.quantize(weights, quantised), raw_dtype=quantised)
    if freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(freqs, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sizes(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)


def _tokens(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(builtin.model_folder())
    tokens = tokenizer.convert_ids_to_tokens(range(vocabulary))
    known = set(tokens)
    merges = [pair for pair in _merges() if "".join(pair) in known and set(pair) <= known]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (vocabulary - 1)])  # control, normal
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(5)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _merges() -> list[tuple[str, str]]:
    import json

    data = json.loads((builtin.model_folder() / "tokenizer.json").read_text("utf-8"))
    return [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in data["model"]["merges"]]


def _paired(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows `[H * d, ...]` as llama.cpp's rope wants them: the two of a pair side by side, not half a head apart."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def _name(name: str) -> str:
    module, _, suffix = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{suffix}"
    return f"{NAMES[module]}.{suffix}"
