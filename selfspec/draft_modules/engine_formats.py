"""Published heads as engines' own files say them, brought to what their authors call things.

`speculators` puts the layer's configuration apart; SGLang counts streams by the layer that they leave, in a place of
its own; vLLM has its own names for Medusa's tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A head's configuration in one piece, with streams counted as `Step.hidden` counts them."""
    nested = config.get("transformer_layer_config") or {}
    flat = {**nested, **{name: value for name, value in config.items() if name != "transformer_layer_config"}}
    layers = "eagle_aux_hidden_state_layer_ids"
    left = (config.get("eagle_config") or {}).get(layers)
    if flat.get(layers) is None and left:
        flat[layers] = [int(layer) + 1 for layer in left]
    return flat


def authors_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Medusa's tensors as its authors call them, where vLLM named them; all others as they are."""
    blocks = {int(match[2]) for name in tensors if (match := _BLOCK.fullmatch(name))}
    if not blocks:
        return dict(tensors)
    named = {}
    for name, tensor in tensors.items():
        if match := _BLOCK.fullmatch(name):
            name = f"{match[1]}.{match[2]}.linear.{match[3]}"
        elif match := _HEAD.fullmatch(name):
            name = f"{match[1]}.{max(blocks) + 1}.weight"
        named[name] = tensor
    return named
