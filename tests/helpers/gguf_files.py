"""GGUF files of tiny models, written as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf_weights import quantize
from transformers import PreTrainedConfig

from selfspec import builtin
from selfspec.export.gguf_files import NAMES as LLAMA_NAMES

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "mistral": "llama",
}
"""Names of architectures that are not the model's type."""
NAMES = {
    **LLAMA_NAMES,
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate": "ffn_gate_exps",
    "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.down": "ffn_down_exps",
}
"""Tensors by the module's name."""
AFTER = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""The same of architectures that name the norm after attention so."""


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: str | Callable[[str], str] = "F32",
    more: Mapping[str, Any] | None = None,
    freqs: Any = None,
    files: int = 1,
) -> Path:
    """`model` as a GGUF file: 2D weights as `kind`, the built-in tokenizer's tokens cut to the vocabulary.

    `kind` may be a function of the tensor's name. `more` are further keys, None for one that is left out; `freqs`, what
    rope's frequencies are divided by. `files`: files of a split model, the first of which is returned.
    """
    config = model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    _sizes(writer, config)
    _tokens(writer, config.vocab_size)
    for key, value in {**of_architecture(config, arch), **(more or {})}.items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            adds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
            adds[type(value)](key, value)
    tensors = [pair for name, parameter in tensors_of(model) for pair in _written(name, parameter, config)]
    if freqs is not None:
        tensors.append(("rope_freqs.weight", np.asarray(freqs, dtype=np.float32)))
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        tensors += [(f"rope_factors_{n}.weight", np.float32(rope[f"{n}_factor"])) for n in ("long", "short")]
    if files == 1:
        _finish(writer, tensors, kind)
        return path
    paths = [path.with_name(f"{path.stem}-{n:05}-of-{files:05}.gguf") for n in range(1, files + 1)]
    for n, part in enumerate(paths):
        own = writer if n == 0 else gguf.GGUFWriter(part, arch)
        own.path = part
        own.add_uint16("split.no", n)
        own.add_uint16("split.count", files)
        own.add_int32("split.tensors.count", len(tensors))
        _finish(own, tensors[n::files], kind)
    return paths[0]


def _finish(writer: gguf.GGUFWriter, tensors: Any, kind: str | Callable[[str], str]) -> None:
    for name, weights in tensors:
        wanted = kind if isinstance(kind, str) else kind(name)
        quantised = Type[wanted if weights.ndim > 1 and not re.search("norm|gate_inp", name) else "F32"]
        writer.add_tensor(name, quantize(weights, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_architecture(config: PreTrainedConfig, arch: str) -> dict[str, Any]:
    """The keys that an architecture has besides those of all."""
    keys: dict[str, Any] = {}
    head = getattr(config, "head_dim", None)
    if (head and head != config.hidden_size // config.num_attention_heads) or arch.startswith("gemma"):
        keys |= {"attention.key_length": head, "attention.value_length": head}
    if getattr(config, "sliding_window", None) and arch not in ("llama", "qwen2", "qwen3moe", "starcoder2"):
        keys["attention.sliding_window"] = config.sliding_window
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    if (share := rope.get("partial_rotary_factor", 1.0)) != 1:
        keys["rope.dimension_count"] = int(share * config.hidden_size // config.num_attention_heads)
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if original := rope.get("original_max_position_embeddings"):
        keys["rope.scaling.original_context_length"] = original
    if arch == "gemma2":
        keys |= {
            "attn_logit_softcapping": float(config.attn_logit_softcapping),
            "final_logit_softcapping": float(config.final_logit_softcapping),
        }
    if arch == "granite":
        keys |= {
            "attention.scale": float(config.attention_multiplier),
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
        }
    if arch in ("qwen3moe", "gpt-oss"):
        width = config.moe_intermediate_size if arch == "qwen3moe" else config.intermediate_size
        count = config.num_experts if arch == "qwen3moe" else config.num_local_experts
        keys |= {
            "expert_count": count,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": width,
        }
    return {f"{arch}.{key}": value for key, value in keys.items()}


def tensors_of(model: Any) -> list[tuple[str, np.ndarray]]:
    """Parameters as the file has them one by one: experts' gates and ups apart, norms of heads together."""
    made: dict[str, Any] = {}
    across = model.config.model_type == "gpt_oss"
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        weights = parameter.float().numpy()
        if heads := re.fullmatch(r"(.*_layernorm)\.norms\.[0-9]+\.weight", name):
            made.setdefault(f"{heads[1]}.weight", []).append(weights)
        elif experts := re.fullmatch(r"(.*experts\.)(gate_up|down)_proj(_bias)?", name):
            suffix = ".bias" if experts[3] else ".weight"
            weights = weights.swapaxes(1, 2) if across and not experts[3] else weights
            if experts[2] == "down":
                made[f"{experts[1]}down{suffix}"] = weights
            else:
                pair = (weights[:, ::2], weights[:, 1::2]) if across else np.split(weights, 2, 1)
                made |= {f"{experts[1]}{part}{suffix}": half for part, half in zip(("gate", "up"), pair, strict=True)}
        else:
            made[f"{name}.weight" if name.endswith("sinks") else name] = weights
    return [(name, np.ascontiguousarray(weights)) for name, weights in made.items()]


def _written(name: str, weights: np.ndarray, config: PreTrainedConfig) -> list[tuple[str, np.ndarray]]:
    names = AFTER if config.model_type in ("gemma2", "gemma3_text", "olmo2", "gpt_oss") else NAMES
    if config.model_type in ("llama", "mistral", "granite") and re.search("[qk]_proj", name):
        weights = _paired(weights, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
    if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
        weights = weights + 1
    return [(_name(name, names), weights)]


def _sizes(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "norm_epsilon", getattr(config, "layer_norm_eps", None)))
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head)
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


def _name(name: str, names: Mapping[str, str]) -> str:
    module, _, suffix = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{names[rest]}.{suffix}"
    return f"{names[module]}.{suffix}"
