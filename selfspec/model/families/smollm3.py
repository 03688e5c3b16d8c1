"""SmolLM3: the Llama skeleton, where some layers have no rope."""

from __future__ import annotations

from typing import Any

from selfspec.model.families.base import Rope, Sight
from selfspec.model.families.llama import Llama
from selfspec.model.families.pieces import not_turned, windows_of


class SmolLM3(Llama):
    """The `Family` of models with the module tree of `SmolLM3ForCausalLM`."""

    def sights(self, body: Any, config: Any) -> list[Sight]:
        """Rope where attention says that it uses it."""
        turned, unturned = Rope(body.rotary_emb), Rope(not_turned)
        windows = windows_of(config, len(body.layers))
        return [
            Sight(turned if layer.self_attn.use_rope else unturned, window)
            for layer, window in zip(body.layers, windows, strict=True)
        ]
