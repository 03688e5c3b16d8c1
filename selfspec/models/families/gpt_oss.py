"""GPT-OSS: experts with biases, sliding windows in some layers, and attention sinks: extra scores without values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from selfspec.models.families.base import Attention, AttentionSpec, Layer, Rope, Weights
from selfspec.models.families.common import repeated_halves, softmax, windows_of
from selfspec.models.families.experts import ExpertParts, Mixtral
from selfspec.models.families.llama import Llama
from selfspec.models.norms import Formula, Norms


class GptOss(Mixtral):
    """The `Family` of models with the module tree of `GptOssForCausalLM`."""

    formula: ClassVar[Formula] = Formula(once=True)

    def attention_specs(self, body: Any, config: Any) -> list[AttentionSpec]:
        """Return the layers' attention specs, with `custom_attention` for the sinks."""
        rope = Rope(repeated_halves(body.rotary_emb))
        return [AttentionSpec(rope, window, custom_attention=True) for window in windows_of(config, len(body.layers))]

    def layer(self, layer: Any, attention_spec: int) -> Layer:
        """Return a layer's modules; its MLP also returns the router's scores."""
        experts = ExpertParts(layer.mlp.router, layer.mlp.experts, across=True)
        return replace(Llama.layer(self, layer, attention_spec), experts=experts, mlp_returns_tuple=True)

    def attention(self, layer: Layer, norms: Norms) -> Attention:
        """Return a layer's attention with a sink for each query head."""
        sinks = layer.module.self_attn.sinks
        kv_heads = layer.module.self_attn.config.num_key_value_heads
        return replace(
            super().attention(layer, norms), native=None, weights=_softmax_with_sinks(sinks.detach(), kv_heads)
        )


def _softmax_with_sinks(sinks: Tensor, kv_heads: int) -> Weights:
    """Return attention weights: the softmax over scores and each query head's sink, without the sink's own weight."""
    by_head = sinks.view(1, kv_heads, -1, 1)  # [1, H_kv, G, 1]

    def weights(scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            scores = scores.add_(mask)
        rows, (group, width) = scores.shape[0] // kv_heads, (by_head.shape[2], scores.shape[1])
        of_rows = by_head.expand(rows, -1, -1, width // group).reshape(-1, width, 1)
        return softmax(torch.cat((scores, of_rows.to(scores)), -1))[..., :-1]

    return weights
