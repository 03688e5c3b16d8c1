"""GLM-4: norms before and after each sub-layer, a fused MLP, RoPE on adjacent pairs in a part of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from selfspec.models.families.base import Attention, AttentionSpec, Layer, Mlp, Rope
from selfspec.models.families.common import interleaved_rotary, normed_onto, windows_of, with_native
from selfspec.models.families.gemma import normed_after
from selfspec.models.families.llama import Llama
from selfspec.models.families.llama_variants import fused_mlp
from selfspec.models.norms import Norms


class Glm4(Llama):
    """The `Family` of models with the module tree of `Glm4ForCausalLM`."""

    norm_names = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
    linear_names = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_up_proj",), ("down_proj",))

    def attention_specs(self, body: Any, config: Any) -> list[AttentionSpec]:
        """Return the layers' attention specs, with RoPE on adjacent pairs of dimensions."""
        rope = Rope(interleaved_rotary(body.rotary_emb), interleaved=True)
        return [AttentionSpec(rope, window) for window in windows_of(config, len(body.layers))]

    def attention(self, layer: Layer, norms: Norms) -> Attention:
        """Return a layer's attention with a norm after it."""
        add = normed_onto(layer.groups[1].module, norms.rows(layer.norms[2]))
        return with_native(replace(super().attention(layer, norms), add=add), after=norms.data(layer.norms[2]))

    def mlp(self, layer: Layer, norms: Norms) -> Mlp:
        """Return a layer's MLP with a norm after it."""
        return normed_after(fused_mlp(layer, norms), layer, norms)
