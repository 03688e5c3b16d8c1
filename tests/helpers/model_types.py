"""A tiny configuration of everything that the installed `transformers` calls a causal language model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WINDOW = 9  # shorter than the texts
MANY = 4_000_000  # parameters: more is a configuration that was not made tiny
FEW_LAYERS, HEADS, KV_HEADS, WIDTH = 4, 4, 2, 32

# Whatever a configuration calls it; names that it does not have are left out.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "decoder_vocab_size"), 61),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("attention_hidden_size", "lru_width", "input_embedding_size", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("output_embedding_size",), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dff", "dim_ff", "d_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "feed_forward_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("dense_intermediate_size", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_experts_intermediate_size",), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), FEW_LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers", "num_blocks"), FEW_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups"), KV_HEADS),
    **dict.fromkeys(("head_dim", "d_head", "dim_head", "kv_channels", "swa_head_dim", "attention_head_dim"), 8),
    **dict.fromkeys(("attention_head_size",), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "context_length", "n_ctx"), 128),
    **dict.fromkeys(("model_max_length", "max_target_positions", "max_source_positions"), 128),
    **dict.fromkeys(("original_max_position_embeddings",), 128),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "local_attention"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 12),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "index_head_dim"), 8),
    **dict.fromkeys(("hc_mult", "hc_count", "o_groups"), 2),
    "index_n_heads": 16,  # with few heads, scores after ReLU are often all zero, and which keys come first is chance
    **dict.fromkeys(("index_topk",), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), 8),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("laurel_rank", "adapter_rank", "gated_norm_rank", "d_rel", "hc_lowrank"), 4),
    **dict.fromkeys(("hidden_size_per_layer_input", "router_hidden_size", "ple_embed_dim"), 8),
    "rel_extent": 16,
    "query_pre_attn_scalar": 12,
    "is_decoder": True,
    "tie_word_embeddings": False,  # a random model with tied embeddings repeats the last token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HYBRID = ["linear_attention", "full_attention"] * 2
ALTERNATING = ["sliding_attention", "full_attention"] * 2
FLOAT32 = ("inkling2_text", "xglm", "xlnet")  # their own forward casts to it, or overflows
PADDED = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")
# What the sizes above do not fit, or what a model of few layers would not have.
OWN: dict[str, dict[str, Any]] = {
    **{name: {"pad_token_id": 0} for name in PADDED},
    "bamba": {"attn_layer_indices": [1, 3]},
    "beam": {"layer_types": ALTERNATING},
    "bailing_hybrid": {"layer_group_size": 2},
    "cwm": {"bos_token_id": 1, "layer_types": ALTERNATING},
    "cohere_compass_text": {
        "layer_types": ALTERNATING,
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROPE),
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"layer_types": [*ALTERNATING, *ALTERNATING], "num_hidden_layers": 8, "num_kv_shared_layers": 4},
    "gemma4_text": {
        "layer_types": [*ALTERNATING, *ALTERNATING],
        "num_hidden_layers": 8,
        "num_kv_shared_layers": 4,
        "global_head_dim": 16,
    },
    "gemma4_unified_text": {"layer_types": ALTERNATING, "global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": HYBRID},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": HYBRID},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 2},
    "mamba2": {"num_heads": 8},
    "modernbert-decoder": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "layer_types": ALTERNATING},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "prophetnet": {"pad_token_id": 0},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "roc_bert": {"pronunciation_vocab_size": 61, "shape_vocab_size": 61},
    "xglm": {"attention_heads": HEADS},
    "xmod": {"default_language": "en_XX", "pad_token_id": 0},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * WIDTH // HEADS,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"], "mamba_headdim": 8},
    "zaya": {"num_experts_per_tok": 1},
}


def model_types() -> tuple[str, ...]:
    """The types of all causal language models of the installed `transformers`."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> Any:
    """A configuration of a few layers, whose windows and chunks are shorter than the texts of tests."""
    return _tiny(CONFIG_MAPPING[model_type], OWN.get(model_type, {}))


def _tiny(config_class: Any, own: dict[str, Any]) -> Any:
    """Sizes for every name that the class has, in itself and in the configuration of its text model."""
    fields = _names(config_class)
    sizes = {name: value for name, value in SIZES.items() if name in fields}
    if "kv_lora_rank" in fields:
        sizes["num_key_value_heads"] = HEADS  # keys and values are made for every query head
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        if name not in own and hasattr(part, "model_type"):
            sizes[name] = _tiny(part, OWN.get(part.model_type, {})).to_dict()
    return config_class(**{**sizes, "experts_implementation": "eager", **own})


def _names(config_class: Any) -> set[str]:
    fields = {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
    return fields - {name for name in fields if name.startswith("_")}


def tiny_model(model_type: str, *, seed: int = 0) -> Any:
    """A random model in float64 (`FLOAT32`: in float32), in which every weight and every token tells on the logits."""
    config = tiny_config(model_type)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > MANY:
        raise ValueError(f"{model_type}: {size} parameters in the tiny configuration; expected at most {MANY}")
    torch.manual_seed(seed)
    model = (
        AutoModelForCausalLM.from_config(config).to(torch.float32 if model_type in FLOAT32 else torch.float64).eval()
    )
    model.generation_config = GenerationConfig()  # some types force a last token, or forbid to repeat one
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and name.endswith("weight") and "norm" not in name:
                parameter.mul_(8 if float(parameter.std()) < 0.1 else 1)  # what is drawn small gives flat logits
    return model
