"""StarCoder 2: the Llama skeleton with LayerNorm, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from selfspec.models.dispatch import device_of
from selfspec.models.families.base import Layer, Mlp
from selfspec.models.families.common import PlainMlp
from selfspec.models.families.llama import Llama, activation, native_mlp
from selfspec.models.linears import linear_onto, side_by_side
from selfspec.models.norms import Norms


class Starcoder2(Llama):
    """The `Family` of models with the module tree of `Starcoder2ForCausalLM`."""

    linear_names = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("c_fc",), ("c_proj",))

    def mlp(self, layer: Layer, norms: Norms) -> Mlp:
        """Return a layer's MLP, without a gate."""
        return plain_mlp(layer, norms, layer.module.mlp.act)


def plain_mlp(layer: Layer, norms: Norms, act: Any) -> PlainMlp:
    """Return an MLP of two linears with `act` between them."""
    up, down = layer.groups[2:]
    call, kind = activation(act)
    return PlainMlp(
        norm=norms.read(layer.norms[1], device_of(layer.norms[0])),
        up=side_by_side(up.modules),
        act=call,
        down=linear_onto(down.module),
        native=native_mlp(layer, norms, kind, gated=False),
    )
