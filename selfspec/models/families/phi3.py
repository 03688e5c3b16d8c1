"""Phi-3 and Phi-4: the Llama skeleton with fused projections, and in some models RoPE over a part of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from selfspec.models.families.base import GatedMlp, Layer, Mlp
from selfspec.models.families.llama import Llama, gated_mlp
from selfspec.models.linears import Group
from selfspec.models.norms import Norms


class Phi3(Llama):
    """The `Family` of models with the module tree of `Phi3ForCausalLM`."""

    def groups(self, attention: Any, mlp: Any) -> tuple[Group, ...]:
        """Return a layer's linears: queries, keys and values are one linear, and gate and up another."""
        return (
            Group(attention, ("qkv_proj",)),
            Group(attention, ("o_proj",), writes=True),
            Group(mlp, ("gate_up_proj",)),
            Group(mlp, ("down_proj",), writes=True),
        )

    def mlp(self, layer: Layer, norms: Norms) -> Mlp:
        """Return a layer's MLP, with fused gate and up."""
        return fused_mlp(layer, norms)


def fused_mlp(layer: Layer, norms: Norms) -> GatedMlp:
    """Return an MLP whose gate and up are one linear."""
    return replace(gated_mlp(layer, norms, layer.module.mlp.activation_fn), gated=None)
