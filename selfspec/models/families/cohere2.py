"""Cohere 2 (Command R7B, A): both sub-layers read one norm; windowed layers alone have rope, over neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from selfspec.models.families.base import Attention, AttentionSpec, Block, Layer, Rope
from selfspec.models.families.common import ParallelBlock, not_turned, scaled, windows_of
from selfspec.models.families.llama import Llama
from selfspec.models.linears import Call
from selfspec.models.norms import Norms


class Cohere2(Llama):
    """The `Family` of models with the module tree of `Cohere2ForCausalLM`."""

    def attention_specs(self, body: Any, config: Any) -> list[AttentionSpec]:
        """Rope goes with windows."""
        turned, unturned = Rope(body.rotary_emb, neighbours=True), Rope(not_turned)
        windows = windows_of(config, len(body.layers))
        return [AttentionSpec(unturned if window is None else turned, window) for window in windows]

    def logits(self, config: Any) -> Call | None:
        """Multiplied."""
        return scaled(config.logit_scale)

    def layer(self, layer: Any, attention_spec: int) -> Layer:
        """One norm serves both sub-layers."""
        return Layer(layer, self.groups(layer.self_attn, layer.mlp), (layer.input_layernorm,) * 2, attention_spec)

    def attention(self, layer: Layer, norms: Norms) -> Attention:
        """Not a native pass's."""
        return replace(super().attention(layer, norms), plain=None)

    def block(self, layer: Layer, norms: Norms) -> Block:
        """Both sub-layers read the stream as it enters the layer."""
        return parallel(super().block(layer, norms))


def parallel(block: Block) -> ParallelBlock:
    """The same sub-layers beside each other."""
    return ParallelBlock(block.attention, block.mlp, block.device)
