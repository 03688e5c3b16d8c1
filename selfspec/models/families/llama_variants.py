"""Families that differ little from the Llama skeleton: Qwen3, SmolLM3, Phi-3 and Phi-4, and Granite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from selfspec.models.families.base import Attention, AttentionSpec, GatedMlp, Layer, Mlp, Parts, Rope
from selfspec.models.families.common import no_rotation, normed_heads, scaled, scaled_onto, windows_of, with_native
from selfspec.models.families.llama import Llama, gated_mlp
from selfspec.models.linears import Call
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


class SmolLM3(Llama):
    """The `Family` of models with the module tree of `SmolLM3ForCausalLM`."""

    def attention_specs(self, body: Any, config: Any) -> list[AttentionSpec]:
        """Return the layers' attention specs: RoPE only where the layer's `use_rope` is true."""
        rope, unturned = Rope(body.rotary_emb), Rope(no_rotation)
        windows = windows_of(config, len(body.layers))
        return [
            AttentionSpec(rope if layer.self_attn.use_rope else unturned, window)
            for layer, window in zip(body.layers, windows, strict=True)
        ]


class Phi3(Llama):
    """The `Family` of models with the module tree of `Phi3ForCausalLM`."""

    linear_names = (("qkv_proj",), ("o_proj",), ("gate_up_proj",), ("down_proj",))

    def mlp(self, layer: Layer, norms: Norms) -> Mlp:
        """Return a layer's MLP, with fused gate and up."""
        return fused_mlp(layer, norms)


def fused_mlp(layer: Layer, norms: Norms) -> GatedMlp:
    """Return an MLP whose gate and up are one linear."""
    return replace(gated_mlp(layer, norms, layer.module.mlp.activation_fn), gated=None)


class Granite(Llama):
    """The `Family` of models with the module tree of `GraniteForCausalLM`; `Parts.scaling` multiplies scores."""

    def parts(self, model: Any) -> Parts:
        """Return the model's modules, with the embedding's multiplier."""
        return replace(super().parts(model), embedded=float(model.config.embedding_multiplier))

    def logits(self, config: Any) -> Call | None:
        """Return the division of logits by `logits_scaling`."""
        return scaled(1 / config.logits_scaling)

    def attention(self, layer: Layer, norms: Norms) -> Attention:
        """Return a layer's attention, whose output has a multiplier."""
        factor = layer.module.residual_multiplier
        add = scaled_onto(layer.groups[1].module, factor)
        return with_native(replace(super().attention(layer, norms), add=add), factor=factor)

    def mlp(self, layer: Layer, norms: Norms) -> Mlp:
        """Return a layer's MLP, whose output has a multiplier."""
        mlp = super().mlp(layer, norms)
        assert isinstance(mlp, GatedMlp)
        factor = layer.module.residual_multiplier
        return with_native(replace(mlp, down=scaled_onto(layer.groups[3].module, factor)), factor=factor)
