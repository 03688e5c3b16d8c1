"""Tiny random models whose passes are native, or the same by rows, and what is fed to them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import torch
from models import SIZES, tiny
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from selfspec.models.layout import apply_layout_
from selfspec.speculation.drafts import Draft

N, LAYERS, WORDS = 96, 3, SIZES["vocab_size"]
WHOLE = {**SIZES, "num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 96}  # heads of 16
MULTI_QUERY = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1, "tie_word_embeddings": True}
MODELS = {
    "llama": LlamaConfig(**WHOLE),
    "llama-mqa-tied": LlamaConfig(**{**WHOLE, **MULTI_QUERY}, head_dim=32),
    "llama-biases": LlamaConfig(**{**WHOLE, "num_key_value_heads": 4}, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**WHOLE),
    "mistral": MistralConfig(
        **{**WHOLE, "hidden_size": 80, "intermediate_size": 112}, head_dim=80, sliding_window=None
    ),
    "llama in bfloat16": LlamaConfig(**WHOLE),
    "qwen2 in bfloat16": Qwen2Config(**WHOLE),
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
