"""Function-preserving widening for benchmarks: a small model's text at a large model's cost.

The residual stream is padded with channels of zeros. The added attention heads and MLP units read the residual stream
with random weights, and their output weights are zero. This preserves the logits of RMSNorm models with separate
projections and no other weights, as in the Llama skeleton.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError
from selfspec.models.families import Parts, find_family
from selfspec.models.families.llama import Llama


@torch.no_grad()
def widen(model: Any, factor: int, *, seed: int = 0) -> Any:
    """Return a new `transformers` model of `factor` times the hidden size, heads and MLP units, with the same logits.

    Head size, layers and vocabulary are unchanged. Norms are rescaled: the mean square over D' = factor * D channels is
    D / D' of the old one, so eps' = eps * D / D' and weight' = weight * sqrt(D / D'), which is exact in floating point
    if the factor is a power of 4. About half of the weights are zeros, those of the output and down projections. Raises
    `SelfspecError` for a factor below 1 or a model that is not of the Llama skeleton.
    """
    if factor < 1:
        raise SelfspecError(f"widening factor {factor}: expected at least 1")
    family = find_family(model.config, type(model).__name__)
    if type(family) is not Llama:
        raise SelfspecError(f"{type(model).__name__} cannot be widened; expected a model of the Llama skeleton")
    narrow = family.parts(model)
    config = copy.deepcopy(model.config)
    config.head_dim = narrow.head_dim
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, name, getattr(config, name) * factor)
    config.rms_norm_eps = config.rms_norm_eps / factor
    weight = narrow.head.module.weight
    # Created on the model's device and in its dtype, so that a large model need not fit into memory twice.
    with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []), weight.device:
        torch.manual_seed(seed)
        widened = type(model)._from_config(config, dtype=weight.dtype).eval()
    widened.generation_config = copy.deepcopy(model.generation_config)
    wide = family.parts(widened)
    _fill(wide.embedding.weight, narrow.embedding.weight, clear=True)
    if not config.tie_word_embeddings:
        _fill(wide.head.module.weight, weight)
    for new, old in zip(_norms(wide), _norms(narrow), strict=True):
        new.weight[: len(old.weight)] = old.weight * factor**-0.5
    for group, source in zip(wide.groups(), narrow.groups(), strict=True):
        for new, old in zip(group.modules, source.modules, strict=True):
            _linear(new, old, writes=group.writes)
    return widened


def _norms(parts: Parts) -> list[Any]:
    """Return the norms of the residual stream."""
    return [parts.norm, *(norm for layer in parts.layers for norm in layer.norms)]


def _linear(new: nn.Linear, old: nn.Linear, *, writes: bool) -> None:
    """Copy `old` into the corner of `new`; if it `writes` to the residual stream, set all other weights to zero."""
    _fill(new.weight, old.weight, clear=writes)
    if old.bias is not None:
        _fill(new.bias, old.bias, clear=True)


def _fill(new: Tensor, old: Tensor, *, clear: bool = False) -> None:
    """Copy `old` into the corner of `new`; with `clear`, set all else to zero."""
    if clear:
        new.zero_()
    new[tuple(slice(n) for n in old.shape)] = old
