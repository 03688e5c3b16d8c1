"""SmolLM3: the Llama skeleton, with some layers without RoPE."""

from __future__ import annotations

from typing import Any

from selfspec.models.families.base import AttentionSpec, Rope
from selfspec.models.families.common import no_rotation, windows_of
from selfspec.models.families.llama import Llama


class SmolLM3(Llama):
    """The `Family` of models with the module tree of `SmolLM3ForCausalLM`."""

    def attention_specs(self, body: Any, config: Any) -> list[AttentionSpec]:
        """Return the layers' attention specs: RoPE only where the layer's `use_rope` is true."""
        rope, unturned = Rope(body.rotary_emb), Rope(no_rotation)
        windows = windows_of(config, len(body.layers))
        return [
            AttentionSpec(rope if layer.self_attn.use_rope else unturned, window)
            for layer, window in zip(body.layers, windows, strict=True)
        ]
