"""GLM-4: norms before and after each sub-layer, a fused MLP, rope over neighbours in a part of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from selfspec.model.families.base import Attention, Layer, Mlp, Rope, Sight
from selfspec.model.families.gemma import normed_after
from selfspec.model.families.llama import Llama
from selfspec.model.families.phi3 import fused_mlp
from selfspec.model.families.pieces import normed_onto, repeated_neighbours, windows_of
from selfspec.model.linears import Group
from selfspec.model.norms import Norms


class Glm4(Llama):
    """The `Family` of models with the module tree of `Glm4ForCausalLM`."""

    def sights(self, body: Any, config: Any) -> list[Sight]:
        """Pairs stand side by side."""
        rope = Rope(repeated_neighbours(body.rotary_emb), neighbours=True)
        return [Sight(rope, window) for window in windows_of(config, len(body.layers))]

    def layer(self, layer: Any, sight: int) -> Layer:
        """Its norms before sub-layers, then those after them."""
        norms = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.post_self_attn_layernorm,
            layer.post_mlp_layernorm,
        )
        return Layer(layer, self.groups(layer.self_attn, layer.mlp), norms, sight)

    def groups(self, attention: Any, mlp: Any) -> tuple[Group, ...]:
        """Gate and up are one linear."""
        qkv, o, _, down = super().groups(attention, mlp)
        return qkv, o, Group(mlp, ("gate_up_proj",)), down

    def attention(self, layer: Layer, norms: Norms) -> Attention:
        """Normed after it."""
        add = normed_onto(layer.groups[1].module, norms.rows(layer.norms[2]))
        return replace(super().attention(layer, norms), add=add, plain=None)

    def mlp(self, layer: Layer, norms: Norms) -> Mlp:
        """Normed after it."""
        return normed_after(fused_mlp(layer, norms), layer, norms)
