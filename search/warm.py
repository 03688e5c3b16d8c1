"""Warm starts: skip sets worth trying first. They matter more than which sampler proposes the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfspec.runtime import Runtime
from selfspec.skip import SkipSet

SHARES = (0.25, 0.375, 0.5, 0.625)  # of all sub-layers, the ones that change the stream least


def warm_starts(runtime: Runtime, prompts: Sequence[Sequence[int]]) -> tuple[SkipSet, ...]:
    """The sub-layers that change the stream least, the first k of them for several k; then every second layer.

    Sub-layers are ranked by the mean cosine of their input and output over the tokens of `prompts`; every second
    layer is where SWIFT (Xia et al. 2410.06916) starts.
    """
    layers = runtime.layers
    similarity = torch.zeros(2 * layers)
    for ids in prompts:
        similarity += _similarity(runtime, ids)
    ranked = similarity.argsort(descending=True).tolist()
    starts = []
    for share in SHARES:
        chosen = set(ranked[: round(2 * layers * share)])
        starts.append(SkipSet.from_bits([i in chosen for i in range(2 * layers)]))
    second = tuple(range(1, layers - 1, 2))
    return tuple(dict.fromkeys((*starts, SkipSet(second, second))))


def _similarity(runtime: Runtime, ids: Sequence[int]) -> torch.Tensor:
    """For each sub-layer, attention then MLP, the mean cosine of its input and output over a text `[2 * L]`."""
    layers = runtime.layers
    tokens = torch.tensor([list(ids)], device=runtime.device)
    with runtime.session(len(ids)):
        step = runtime.forward(tokens, 0, logits=None, hidden=range(layers + 1), between=range(layers))
    attention = [_cosine(step.hidden[i], step.between[i]) for i in range(layers)]
    mlp = [_cosine(step.between[i], step.hidden[i + 1]) for i in range(layers)]
    return torch.tensor([*attention, *mlp])


def _cosine(before: torch.Tensor, after: torch.Tensor) -> float:
    after = after.to(before.device)
    return float(torch.cosine_similarity(before.float(), after.float(), dim=-1).mean())
