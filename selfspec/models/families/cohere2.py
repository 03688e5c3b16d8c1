"""Cohere 2 (Command R7B, A): both sub-layers read one norm; only sliding-window layers have RoPE, on adjacent pairs."""

from __future__ import annotations

from typing import Any

from selfspec.models.families.base import AttentionSpec, Block, Layer, Rope
from selfspec.models.families.common import ParallelBlock, no_rotation, scaled, windows_of
from selfspec.models.families.llama import Llama
from selfspec.models.linears import Call
from selfspec.models.norms import Norms


class Cohere2(Llama):
    """The `Family` of models with the module tree of `Cohere2ForCausalLM`."""

    norm_names = ("input_layernorm", "input_layernorm")  # one norm serves both sub-layers

    def attention_specs(self, body: Any, config: Any) -> list[AttentionSpec]:
        """Return the layers' attention specs: RoPE only in layers with a sliding window."""
        rope, unturned = Rope(body.rotary_emb, interleaved=True), Rope(no_rotation)
        windows = windows_of(config, len(body.layers))
        return [AttentionSpec(unturned if window is None else rope, window) for window in windows]

    def logits(self, config: Any) -> Call | None:
        """Return the multiplication of logits by `logit_scale`."""
        return scaled(config.logit_scale)

    def block(self, layer: Layer, norms: Norms) -> Block:
        """Return a block whose sub-layers both read the layer's input."""
        return parallel(super().block(layer, norms))


def parallel(block: Block) -> ParallelBlock:
    """Return the same sub-layers as a parallel block."""
    return ParallelBlock(block.attention, block.mlp, block.device)
