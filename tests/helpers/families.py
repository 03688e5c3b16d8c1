"""A tiny configuration of every family that is served: two of one where its models differ in structure."""

from __future__ import annotations

from models import SIZES
from transformers import (
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

WINDOW = 9  # shorter than the texts of tests
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
PARTIAL = {**ROPE, "partial_rotary_factor": 0.5}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
    "attention_multiplier": 0.2,
}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": WINDOW, "layer_types": ALTERNATING}
NEOX = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}

FAMILY_CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 1, 0, 1]),
    "phi3": Phi3Config(**SIZES, rope_parameters=ROPE, sliding_window=WINDOW),
    "phi3-partial": Phi3Config(**SIZES, rope_parameters=PARTIAL),
    "granite": GraniteConfig(**SIZES, **MULTIPLIERS, attention_bias=True),
    "olmo2": Olmo2Config(**SIZES),
    "gemma2": Gemma2Config(
        **SIZES, **GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=5.0, attn_implementation="eager"
    ),
    "gemma3_text": Gemma3TextConfig(**SIZES, **GEMMA),
    "glm4": Glm4Config(**SIZES, head_dim=8, rope_parameters=PARTIAL, attention_bias=True),
    "cohere2": Cohere2Config(**SIZES, sliding_window=WINDOW, layer_types=ALTERNATING),
    "starcoder2": Starcoder2Config(**SIZES, sliding_window=WINDOW),
    "stablelm": StableLmConfig(**SIZES, rope_parameters=PARTIAL, use_qkv_bias=True),
    "stablelm-parallel": StableLmConfig(
        **SIZES, rope_parameters=PARTIAL, use_parallel_residual=True, qk_layernorm=True
    ),
    "gpt_neox": GPTNeoXConfig(**NEOX, rope_parameters={**ROPE, "partial_rotary_factor": 0.25}),
    "gpt_neox-serial": GPTNeoXConfig(**NEOX, rope_parameters=PARTIAL, use_parallel_residual=False),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=8, num_experts=4, moe_intermediate_size=24, mlp_only_layers=[1]
    ),
    "gpt_oss": GptOssConfig(
        **SIZES, **EXPERTS, head_dim=8, num_local_experts=4, sliding_window=WINDOW, layer_types=ALTERNATING
    ),
}
