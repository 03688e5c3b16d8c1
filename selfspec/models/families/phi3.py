"""Phi-3 and Phi-4: the Llama skeleton with fused projections, and in some models RoPE over a part of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from selfspec.models.dispatch import device_of
from selfspec.models.families.base import Attention, GatedMlp, Layer, Mlp
from selfspec.models.families.llama import Llama, activation
from selfspec.models.linears import Group, linear_onto, side_by_side
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

    def attention(self, layer: Layer, norms: Norms) -> Attention:
        """Return a layer's attention, without `plain` if RoPE is partial: native passes rotate whole heads only."""
        attention = super().attention(layer, norms)
        share = layer.module.self_attn.config.rope_parameters.get("partial_rotary_factor", 1.0)
        return attention if share == 1.0 else replace(attention, plain=None)

    def mlp(self, layer: Layer, norms: Norms) -> Mlp:
        """Return a layer's MLP, with fused gate and up."""
        return fused_mlp(layer, norms)


def fused_mlp(layer: Layer, norms: Norms) -> GatedMlp:
    """Return an MLP whose gate and up are one linear."""
    gate_up, down = layer.groups[2:]
    act, silu = activation(layer.module.mlp.activation_fn)
    return GatedMlp(
        norm=norms.read(layer.norms[1], device_of(layer.norms[0])),
        gate_up=side_by_side(gate_up.modules),
        act=act,
        down=linear_onto(down.module),
        plain=(gate_up.modules, down.modules) if silu else None,
    )
