"""A tiny configuration of every family that is served: two of one where its models differ in structure."""

from __future__ import annotations

from models import SIZES as OF_ALL
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

SIZES = {**OF_ALL, "num_hidden_layers": 3, "intermediate_size": 64}  # whole groups of weights in int4
WINDOW = 9  # shorter than the texts of tests
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
PARTIAL = {**ROPE, "partial_rotary_factor": 0.5}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
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
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]),
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
        **SIZES, **EXPERTS, head_dim=8, num_experts=4, moe_intermediate_size=32, mlp_only_layers=[1]
    ),
    "gpt_oss": GptOssConfig(
        **SIZES, **EXPERTS, head_dim=8, num_local_experts=4, sliding_window=WINDOW, layer_types=ALTERNATING
    ),
}

FEATURES = {
    "plain": "plain",
    "skip": "skip",
    "low": "int8 and int4",
    "trees": "trees",
    "batches": "batches",
    "drafters": "drafters and proposers",
    "trained": "trained parts",
    "window": "windows",
}
NAMES = {
    "llama": "Llama 2 and 3, and what else has its structure",
    "mistral": "Mistral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
    "phi3": "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    "granite": "Granite 3",
    "olmo2": "OLMo 2",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3, of text alone",
    "glm4": "GLM-4",
    "cohere2": "Command R7B and A (Cohere 2)",
    "starcoder2": "StarCoder2",
    "stablelm": "StableLM",
    "gpt_neox": "GPT-NeoX, Pythia",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "gpt_oss": "GPT-OSS",
}


def cell(name: str, feature: str) -> str:
    """What the table says of a feature of a configuration, or of a family; nothing where it has none to serve."""
    if feature == "window":
        return "yes" if any(windows(of) for of in FAMILY_CONFIGS.values() if of.model_type == _type(name)) else ""
    return "yes"


def windows(config: PreTrainedConfig) -> bool:
    """Whether any of its layers has a window."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return getattr(config, "sliding_window", None) is not None and "sliding_attention" in kinds


def _type(name: str) -> str:
    return FAMILY_CONFIGS[name].model_type


def table() -> str:
    """Families by features, as `docs/models.md` has it."""
    head = f"| family | `model_type` | {' | '.join(FEATURES.values())} |"
    rows = [
        f"| {NAMES[name]} | `{name}` | {' | '.join(cell(name, feature) for feature in FEATURES)} |" for name in NAMES
    ]
    return "\n".join([head, "|---" * (2 + len(FEATURES)) + "|", *rows])
