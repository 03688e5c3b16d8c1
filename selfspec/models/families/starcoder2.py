"""StarCoder 2: the Llama skeleton with LayerNorm, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from selfspec.models.families.base import Layer, Mlp
from selfspec.models.families.llama import Llama, dense_mlp
from selfspec.models.norms import Norms


class Starcoder2(Llama):
    """The `Family` of models with the module tree of `Starcoder2ForCausalLM`."""

    linear_names = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("c_fc",), ("c_proj",))

    def mlp(self, layer: Layer, norms: Norms) -> Mlp:
        """Return a layer's MLP, without a gate."""
        return dense_mlp(layer, norms, layer.module.mlp.act)
