"""OLMo 2: norms of queries, keys and sub-layer outputs, but none before sub-layers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from selfspec.models.families.base import Attention, GatedMlp, Layer, Mlp
from selfspec.models.families.common import identity_norm, normed_onto, normed_projections, with_native
from selfspec.models.families.llama import Llama
from selfspec.models.families.llama_variants import shape_of
from selfspec.models.norms import NO_NORM, Formula, Norms


class Olmo2(Llama):
    """The `Family` of models with the module tree of `Olmo2ForCausalLM`; OLMo 3 adds sliding windows."""

    formula: ClassVar[Formula] = Formula(once=True)
    norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")  # both follow their sub-layers

    def attention(self, layer: Layer, norms: Norms) -> Attention:
        """Return a layer's attention, with all heads of queries normalised together, and all of keys."""
        attention, module = super().attention(layer, norms), layer.module.self_attn
        q_norm, k_norm = norms.rows(module.q_norm), norms.rows(module.k_norm)
        normed = replace(
            attention,
            norm=identity_norm,
            qkv=normed_projections(attention.qkv, q_norm, k_norm, shape_of(module)),
            add=normed_onto(layer.groups[1].module, norms.rows(layer.norms[0])),
        )
        return with_native(
            normed,
            before=NO_NORM,
            after=norms.data(layer.norms[0]),
            q_norm=norms.data(module.q_norm),
            k_norm=norms.data(module.k_norm),
        )

    def mlp(self, layer: Layer, norms: Norms) -> Mlp:
        """Return a layer's MLP with a norm after it."""
        mlp = super().mlp(layer, norms)
        assert isinstance(mlp, GatedMlp)
        down = normed_onto(layer.groups[3].module, norms.rows(layer.norms[1]))
        normed = replace(mlp, norm=identity_norm, down=down)
        return with_native(normed, before=NO_NORM, after=norms.data(layer.norms[1]))
