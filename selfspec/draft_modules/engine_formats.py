"""Conversion of inference engines' formats of published heads to the format of the heads' authors.

The library `speculators` nests the layer's configuration. SGLang numbers hidden states by the layer that outputs them,
in a nested `eagle_config`. vLLM has different names for Medusa's tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a head's configuration as one flat dict, with hidden states numbered as in `ForwardOutput`."""
    nested = config.get("transformer_layer_config") or {}
    flat = {**nested, **{name: value for name, value in config.items() if name != "transformer_layer_config"}}
    layers = "eagle_aux_hidden_state_layer_ids"
    left = (config.get("eagle_config") or {}).get(layers)
    if flat.get(layers) is None and left:
        flat[layers] = [int(layer) + 1 for layer in left]
    return flat


def authors_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename vLLM's Medusa tensors to the names of Medusa's authors; other heads' tensors are unchanged."""
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
