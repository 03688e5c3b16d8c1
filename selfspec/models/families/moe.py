"""Mixtral and Qwen3-MoE: experts in place of the MLP, in all layers or some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from selfspec.models.dispatch import device_of
from selfspec.models.families.base import Layer, Mlp
from selfspec.models.families.experts import ExpertParts, Experts
from selfspec.models.families.llama import Llama
from selfspec.models.families.qwen3 import Qwen3
from selfspec.models.linears import Group
from selfspec.models.norms import Norms


class Mixtral(Llama):
    """The `Family` of models with the module tree of `MixtralForCausalLM`."""

    def layer(self, layer: Any, attention_spec: int) -> Layer:
        """Return a layer's modules, with its experts if it has any."""
        experts = getattr(layer.mlp, "experts", None)
        expert_parts = None if experts is None else ExpertParts(layer.mlp.gate, experts)
        return replace(super().layer(layer, attention_spec), experts=expert_parts)

    def groups(self, attention: Any, mlp: Any) -> tuple[Group, ...]:
        """Return a layer's linears without its experts, which run as the model's own module."""
        groups = super().groups(attention, mlp)
        return groups[:2] if hasattr(mlp, "experts") else groups

    def mlp(self, layer: Layer, norms: Norms) -> Mlp:
        """Return a layer's experts, or its dense MLP."""
        mlp = layer.module.mlp
        if not hasattr(mlp, "experts"):
            return super().mlp(layer, norms)
        return Experts(norms.read(layer.norms[1], device_of(layer.norms[0])), mlp)


class Qwen3Moe(Mixtral, Qwen3):
    """The `Family` of models with the module tree of `Qwen3MoeForCausalLM`."""
