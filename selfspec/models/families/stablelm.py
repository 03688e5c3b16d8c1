"""StableLM: the Llama skeleton with LayerNorm and partial RoPE; some models have head norms or parallel sub-layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from selfspec.models.families.base import Attention, Block, Layer
from selfspec.models.families.cohere2 import parallel
from selfspec.models.families.common import normed_heads
from selfspec.models.families.llama import Llama
from selfspec.models.families.llama_variants import shape_of
from selfspec.models.linears import Call
from selfspec.models.norms import Norms


class StableLm(Llama):
    """The `Family` of models with the module tree of `StableLmForCausalLM`."""

    def layer(self, layer: Any, attention_spec: int) -> Layer:
        """Return a layer's modules; one norm serves both sub-layers if they are parallel."""
        norms = (layer.input_layernorm, layer.post_attention_layernorm or layer.input_layernorm)
        return Layer(layer, self.groups(layer.self_attn, layer.mlp), norms, attention_spec)

    def attention(self, layer: Layer, norms: Norms) -> Attention:
        """Return a layer's attention; with `qk_layernorm`, each query and key head has its own norm."""
        attention, module = super().attention(layer, norms), layer.module.self_attn
        if not module.qk_layernorm:
            return attention
        q_norm, k_norm = _by_head(module.q_layernorm), _by_head(module.k_layernorm)
        return replace(attention, qkv=normed_heads(attention.qkv, q_norm, k_norm, shape_of(module)), native=None)

    def block(self, layer: Layer, norms: Norms) -> Block:
        """Return a layer's block, parallel or sequential by its `use_parallel_residual`."""
        block = super().block(layer, norms)
        return parallel(block) if layer.module.use_parallel_residual else block


def _by_head(module: Any) -> Call:
    """Return a norm of `[N, H, d]` from a module that reads `[B, H, n, d]`."""

    def norm(x: Tensor) -> Tensor:
        normed: Tensor = module(x.transpose(0, 1).unsqueeze(0))
        return normed.squeeze(0).transpose(0, 1)

    return norm
