"""A draft model apart from the target, made of the sub-layers that a skip set leaves, with keys of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from models import exact_norms
from torch import Tensor

from selfspec.controllers import Controller
from selfspec.drafters import LayerSkipDrafter
from selfspec.runtime.base import Runtime
from selfspec.types.draft_path import SkipSet


def pruned(model: Any, skip: SkipSet) -> Any:
    """A copy of `model` whose skipped sub-layers give nothing, and whose norms keep float64 exact."""
    copied = exact_norms(copy.deepcopy(model))
    with torch.no_grad():
        for layer in skip.attention:
            copied.model.layers[layer].self_attn.o_proj.weight.zero_()
        for layer in skip.mlp:
            copied.model.layers[layer].mlp.down_proj.weight.zero_()
    return copied


class PrunedModel(LayerSkipDrafter):
    """Drafts by the pruned model's own forward in `transformers` over all tokens, each time from the first one on."""

    def __init__(self, runtime: Runtime, skip: SkipSet, controller: Controller, *, candidates: int = 1) -> None:
        super().__init__(runtime, skip, controller, candidates=candidates)
        self._model = pruned(runtime.model, skip)
        self._known: dict[tuple[int, ...], Tensor] = {}

    def _pass(self, chains: Sequence[Any]) -> None:
        for chain in chains:
            chain.passes.append(1)
            chain.logits = [self._after((*chain.seq.tokens, *chain.tokens))]

    def _after(self, tokens: tuple[int, ...]) -> Tensor:
        if tokens not in self._known:
            with torch.no_grad():
                self._known[tokens] = self._model(torch.tensor([tokens])).logits[0, -1:]
        return self._known[tokens]
