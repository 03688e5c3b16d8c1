"""Qwen3: the Llama skeleton, with normalised heads of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from selfspec.models.families.base import Attention, Layer
from selfspec.models.families.common import normed_heads, with_native
from selfspec.models.families.llama import Llama
from selfspec.models.norms import Norms


class Qwen3(Llama):
    """The `Family` of models with the module tree of `Qwen3ForCausalLM`."""

    def attention(self, layer: Layer, norms: Norms) -> Attention:
        """Return a layer's attention with normalised heads."""
        return with_normed_heads(super().attention(layer, norms), layer, norms)


def with_normed_heads(attention: Attention, layer: Layer, norms: Norms) -> Attention:
    """Return attention whose query and key heads are normalised by its module's `q_norm` and `k_norm`."""
    module = layer.module.self_attn
    qkv = normed_heads(attention.qkv, norms.rows(module.q_norm), norms.rows(module.k_norm), shape_of(module))
    q_norm, k_norm = norms.data(module.q_norm), norms.data(module.k_norm)
    return with_native(replace(attention, qkv=qkv), q_norm=q_norm, k_norm=k_norm)


def shape_of(attention: Any) -> tuple[int, int, int]:
    """Return the number of query heads, the number of KV heads, and the head size."""
    d = attention.head_dim
    return attention.q_proj.out_features // d, attention.k_proj.out_features // d, d
