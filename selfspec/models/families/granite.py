"""Granite: the Llama skeleton, with multipliers of the embedding, sub-layer outputs, scores and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from selfspec.models.families.base import Attention, GatedMlp, Layer, Mlp, Parts
from selfspec.models.families.common import scaled, scaled_onto, with_native
from selfspec.models.families.llama import Llama
from selfspec.models.linears import Call
from selfspec.models.norms import Norms


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
