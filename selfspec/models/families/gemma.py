"""Gemma 2 and 3: norms before and after each sub-layer, a scaled embedding, sliding windows in most layers.

Gemma 2 soft-caps scores and logits. Gemma 3 normalises the heads of queries and keys, and has separate RoPEs for
sliding-window and full-attention layers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from selfspec.basics.errors import UnsupportedModelError
from selfspec.models.families.base import Attention, AttentionSpec, GatedMlp, Layer, Mlp, Parts, Rope, Rotary
from selfspec.models.families.common import capped, capped_weights, normed_onto, windows_of, with_native
from selfspec.models.families.llama import Llama
from selfspec.models.families.llama_variants import with_normed_heads
from selfspec.models.linears import Call
from selfspec.models.norms import Formula, Norms


class Gemma2(Llama):
    """The `Family` of models with the module tree of `Gemma2ForCausalLM`."""

    formula: ClassVar[Formula] = Formula(plus=1.0, once=True)
    norm_names = (
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    )

    def parts(self, model: Any) -> Parts:
        """Return the model's modules. Raises `UnsupportedModelError` for bidirectional attention."""
        if getattr(model.config, "use_bidirectional_attention", None):
            raise UnsupportedModelError(f"{type(model).__name__} with attention in both directions is not supported")
        return super().parts(model)

    def attention_specs(self, body: Any, config: Any) -> list[AttentionSpec]:
        """Return the layers' attention specs, with `custom_attention` if attention scores are soft-capped."""
        return [
            replace(attention_spec, custom_attention=bool(_cap(config)))
            for attention_spec in super().attention_specs(body, config)
        ]

    def logits(self, config: Any) -> Call | None:
        """Return the soft cap of logits; None if the config has no cap."""
        limit = config.final_logit_softcapping
        return None if limit is None else capped(limit)

    def attention(self, layer: Layer, norms: Norms) -> Attention:
        """Return a layer's attention with a norm after it and capped scores."""
        limit = _cap(layer.module.self_attn.config)
        attention = replace(
            super().attention(layer, norms),
            add=normed_onto(layer.groups[1].module, norms.rows(layer.norms[2])),
            weights=None if limit is None else capped_weights(limit),
        )
        return with_native(attention, after=norms.data(layer.norms[2]), cap=limit or 0.0)

    def mlp(self, layer: Layer, norms: Norms) -> Mlp:
        """Return a layer's MLP with a norm after it."""
        return normed_after(super().mlp(layer, norms), layer, norms)


class Gemma3(Gemma2):
    """The `Family` of text-only models with the module tree of `Gemma3ForCausalLM`."""

    def rotary(self, body: Any, index: int) -> Rotary:
        """Return the `Rotary` for the layer type of layer `index`."""
        return partial(body.rotary_emb, layer_type=body.config.layer_types[index])

    def attention_specs(self, body: Any, config: Any) -> list[AttentionSpec]:
        """Return the layers' attention specs, with one RoPE for each layer type."""
        kinds = config.layer_types[: len(body.layers)]
        ropes = {kind: Rope(self.rotary(body, kinds.index(kind))) for kind in dict.fromkeys(kinds)}
        windows = windows_of(config, len(body.layers))
        return [AttentionSpec(ropes[kind], window) for kind, window in zip(kinds, windows, strict=True)]

    def attention(self, layer: Layer, norms: Norms) -> Attention:
        """Return a layer's attention with normalised heads; scores are never capped, whatever the config says."""
        attention = with_normed_heads(super().attention(layer, norms), layer, norms)
        return with_native(replace(attention, weights=None), cap=0.0)


def normed_after(mlp: Mlp, layer: Layer, norms: Norms) -> GatedMlp:
    """Return an MLP whose output is normalised by the layer's last norm."""
    assert isinstance(mlp, GatedMlp)
    normed = replace(mlp, down=normed_onto(layer.groups[3].module, norms.rows(layer.norms[3])))
    return with_native(normed, after=norms.data(layer.norms[3]))


def _cap(config: Any) -> float | None:
    limit: float | None = config.attn_logit_softcapping
    return limit
