"""Tiny random models whose passes are native, or the same by rows, and what is fed to them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import torch
from families import ALTERNATING, MULTIPLIERS, PARTIAL, ROPE
from models import SIZES, tiny
from torch import Tensor
from transformers import (
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from selfspec.models.layout import apply_layout_
from selfspec.speculation.drafts import Draft

N, LAYERS, WORDS = 96, 3, SIZES["vocab_size"]
WHOLE = {**SIZES, "num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 96}  # heads of 16
MULTI_QUERY = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "tie_word_embeddings": True}
WINDOW = 13  # shorter than texts, and than some trees
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 12, "sliding_window": WINDOW, "layer_types": ALTERNATING}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "attn_implementation": "eager"}
NEOX = {name: value for name, value in WHOLE.items() if name != "num_key_value_heads"}
MODELS = {
    "llama": LlamaConfig(**WHOLE),
    "llama-mqa-tied": LlamaConfig(**{**WHOLE, **MULTI_QUERY}, head_dim=32),
    "llama-biases": LlamaConfig(**{**WHOLE, "num_key_value_heads": 4}, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**WHOLE),
    "mistral": MistralConfig(
        **{**WHOLE, "hidden_size": 80, "intermediate_size": 112}, head_dim=80, sliding_window=None
    ),
    "qwen2-window": Qwen2Config(**WHOLE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**WHOLE, head_dim=32),
    "smollm3": SmolLM3Config(**WHOLE, no_rope_layers=[1, 0, 1]),
    "phi3": Phi3Config(**WHOLE, rope_parameters=PARTIAL, sliding_window=WINDOW),
    "granite": GraniteConfig(**WHOLE, **MULTIPLIERS, attention_bias=True),
    "olmo2": Olmo2Config(**WHOLE),
    "gemma2": Gemma2Config(**WHOLE, **GEMMA, **CAPS),
    "gemma3": Gemma3TextConfig(**WHOLE, **GEMMA),
    "glm4": Glm4Config(**WHOLE, head_dim=16, rope_parameters=PARTIAL, attention_bias=True),
    "cohere2": Cohere2Config(**WHOLE, sliding_window=WINDOW, layer_types=ALTERNATING),
    "starcoder2": Starcoder2Config(**WHOLE, sliding_window=WINDOW),
    "stablelm": StableLmConfig(**WHOLE, rope_parameters=PARTIAL, use_qkv_bias=True),
    "gpt_neox": GPTNeoXConfig(**NEOX, rope_parameters={**ROPE, "partial_rotary_factor": 0.25}),
    "gpt_neox-serial": GPTNeoXConfig(**NEOX, rope_parameters=PARTIAL, use_parallel_residual=False),
    "llama in bfloat16": LlamaConfig(**WHOLE),
    "qwen2 in bfloat16": Qwen2Config(**WHOLE),
    "gemma2 in bfloat16": Gemma2Config(**WHOLE, **GEMMA, **CAPS),
    "gpt_neox in bfloat16": GPTNeoXConfig(**NEOX, rope_parameters=PARTIAL),
}
SINGLE = [name for name in MODELS if "bfloat16" not in name]


def model_of(name: str, layout: str = "native", **changes: Any) -> Any:
    """A model natively, or by rows: then always in float32, with the same weights."""
    config = copy.deepcopy(MODELS[name])
    config.update(changes)
    model = tiny(config, dtype=torch.bfloat16 if "bfloat16" in name else torch.float32)
    if layout == "rows":
        model = model.float()
    apply_layout_(model, layout)
    return model


def tokens_for(seed: int, n: int = N) -> Tensor:
    """Tokens `[1, n]`."""
    return torch.randint(WORDS, (1, n), generator=torch.Generator().manual_seed(seed))


def bits(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Whether two lists of tensors are equal, bit for bit."""
    return all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def random_tree(chance: random.Random, nodes: int) -> Draft:
    """A draft of any shape."""
    parents = tuple(chance.randrange(-1, node) if chance.random() < 0.6 else node - 1 for node in range(nodes))
    return Draft(tuple(chance.randrange(WORDS) for _ in parents), parents, None, (-1,) * nodes)
