"""EAGLE draft heads (Li et al. 2401.15077, 2503.01840): one decoder layer that predicts the next hidden states."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from selfspec.draft_modules.decoder_head import LayerShape, PairLayer, layer_of
from selfspec.draft_modules.heads import Head


class EagleHead(Head):
    """An EAGLE draft head: one decoder layer, which for drafted tokens reads its own outputs as hidden states.

    Its part file holds the tensors of a `PairLayer`, whose names have the prefix `layer.`.
    """

    kind = "eagle"

    def _begin(self, settings: Any, tensors: dict[str, Tensor]) -> None:
        self._layer = PairLayer(
            self.target, LayerShape(**settings["shape"]), layer_of(tensors, "layer."), self._linears
        )

    def reserve(self, slots: int) -> None:
        """Reserve KV cache entries for `slots` (token, hidden state) pairs in each cache row."""
        self._layer.reserve(slots)

    def _read(self, row: int, start: int, tokens: Tensor, embedded: Tensor, streams: Tensor) -> tuple[Tensor, Any]:
        left = self._layer.read(row, start, embedded, streams, from_target=True)[-1:]
        return self._layer.last(left), left

    def _draft_step(
        self, row: int, start: int, place: int, tokens: Tensor, embedded: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        left = self._layer.read(row, start + place - 1, embedded, state, from_target=False)
        return self._layer.last(left), left
