"""Function-preserving widening: a small model's text at a large model's cost. An instrument for benchmarks.

The stream is padded with zeros; attention heads and MLP units are added that read it with random weights and write
nothing. Knows nothing of prompts and profiles.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.model.families import check_family


@torch.no_grad()
def widen(model: Any, factor: int, *, seed: int = 0) -> Any:
    """A new `transformers` model of `factor` times the hidden size, heads and MLP units, with the same logits.

    Head size, layers and vocabulary stay. Norms are rescaled: the mean square over D' = factor * D channels is D / D'
    of what it was, so eps' = eps * D / D' and weight' = weight * sqrt(D / D'), which is exact in floating point where
    the factor is a power of 4. About half of the weights, the output and down projections', are zeros. Raises
    `SelfspecError` for a factor below 1 or a model that is not served.
    """
    if factor < 1:
        raise SelfspecError(f"widening factor {factor}: want at least 1")
    check_family(model.config, type(model).__name__)
    config = copy.deepcopy(model.config)
    config.head_dim = model.model.layers[0].self_attn.head_dim
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, name, getattr(config, name) * factor)
    config.rms_norm_eps = config.rms_norm_eps / factor
    weight = model.lm_head.weight
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wide = type(model)(config).to(weight.dtype).to(weight.device).eval()
    wide.generation_config = copy.deepcopy(model.generation_config)
    _fill(wide.model.embed_tokens.weight, model.model.embed_tokens.weight, clear=True)
    if not config.tie_word_embeddings:
        _fill(wide.lm_head.weight, weight)
    for new, old in zip(_norms(wide), _norms(model), strict=True):
        new.weight[: len(old.weight)] = old.weight * factor**-0.5
    for new, old in zip(wide.model.layers, model.model.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            _linear(getattr(new.self_attn, name), getattr(old.self_attn, name), writes=name == "o_proj")
        for name in ("gate_proj", "up_proj", "down_proj"):
            _linear(getattr(new.mlp, name), getattr(old.mlp, name), writes=name == "down_proj")
    return wide


def _norms(model: Any) -> list[Any]:
    layers = model.model.layers
    return [model.model.norm, *(n for layer in layers for n in (layer.input_layernorm, layer.post_attention_layernorm))]


def _linear(new: nn.Linear, old: nn.Linear, *, writes: bool) -> None:
    """`writes`: to the stream, and so nothing but what the old one wrote."""
    _fill(new.weight, old.weight, clear=writes)
    if old.bias is not None:
        _fill(new.bias, old.bias, clear=True)


def _fill(new: Tensor, old: Tensor, *, clear: bool = False) -> None:
    """Put `old` into the corner of `new`, zeros elsewhere with `clear`."""
    if clear:
        new.zero_()
    new[tuple(slice(n) for n in old.shape)] = old
