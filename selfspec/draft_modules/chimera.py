"""Chimera (Zeng et al. 2402.15758): a trigram encoder, and a decoder layer over codes and the model's hidden states.

The encoder computes the code of a token from the embeddings of the token and of the two tokens before it. A (token,
hidden state) pair is two entries in the decoder layer: the hidden state, and one position later the token's code. For
drafted tokens, the layer's output for the previous pair replaces the model's hidden state. Each draft position has a
linear map, from the model's last hidden state and the layer's output at the code of this position, to the input of the
head over the vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.draft_modules.decoder_head import LayerShape, OwnLayer, layer_of
from selfspec.draft_modules.heads import Head, normed

REACH = 2  # number of earlier tokens that the code of a token depends on


class _State(NamedTuple):
    """The model's last hidden state, normed, the last embeddings `[REACH, D]`, and the layer's last output `[1, D]`."""

    stream: Tensor
    tail: Tensor
    layer_output: Tensor


class ChimeraHead(Head):
    """A Chimera draft head.

    Its part file holds the tensors of the decoder layer (names with the prefix `layer.`), the encoder's linears `wide`
    and `narrow`, and the map `maps.k.weight` `[D, 2 D]` of each draft position k.
    """

    kind = "chimera"

    def _begin(self, settings: Any, tensors: dict[str, Tensor]) -> None:
        self._shape, self.places = LayerShape(**settings["shape"]), int(settings["places"])
        self._norm = tensors["given_norm.weight"]
        self._layer = OwnLayer(self.target, self._shape, layer_of(tensors, "layer."), self._linears)
        self._wide = self._linears.linear(tensors["wide.weight"], tensors["wide.bias"])
        self._narrow = self._linears.linear(tensors["narrow.weight"])
        self._maps = [self._linears.linear(tensors[f"maps.{k}.weight"]) for k in range(self.places)]
        self._tails: dict[int, tuple[int, Tensor]] = {}  # by row: first pair, embeddings from there on

    def reserve(self, slots: int) -> None:
        """Reserve `slots` token pairs in each row of the KV cache; each pair takes two cache entries."""
        self._layer.reserve(2 * slots)

    def _read(self, row: int, start: int, tokens: Tensor, embedded: Tensor, streams: Tensor) -> tuple[Tensor, Any]:
        begun, before = self._tails.get(row, (0, embedded[:0])) if start else (0, embedded[:0])
        tail = before[max(start - REACH - begun, 0) : start - begun]
        known = torch.cat((tail, embedded))
        self._tails[row] = start - len(tail), known
        padded = torch.cat((known[:1].expand(REACH - len(tail), -1), known))
        stream = normed(streams, self._norm, self._shape.eps)
        left = self._run(row, start, self._codes(padded), stream)[-1:]
        state = _State(stream[-1:], padded[-REACH:], left)
        return self._head_input(0, state), state

    def _draft_step(
        self, row: int, start: int, place: int, tokens: Tensor, embedded: Tensor, state: _State
    ) -> tuple[Tensor, Any]:
        known = torch.cat((state.tail, embedded))
        left = self._run(row, start + place - 1, self._codes(known), state.layer_output)
        state = _State(state.stream, known[-REACH:], left)
        return self._head_input(place, state), state

    def _codes(self, embedded: Tensor) -> Tensor:
        """Encode each of the last n tokens with the REACH tokens before it: `[n + REACH, D]` to `[n, D]`."""
        read = torch.cat([embedded[i : len(embedded) - REACH + i] for i in range(REACH + 1)], -1)
        return self._narrow(read + F.silu(self._wide(read)))

    def _run(self, row: int, start: int, codes: Tensor, streams: Tensor) -> Tensor:
        n = len(codes)
        entries = torch.stack((streams, codes), 1).flatten(0, 1)
        positions = torch.arange(start, start + n, device=codes.device).repeat_interleave(2)
        positions[1::2] += 1
        return self._layer.run(row, 2 * start, entries, self._layer.normed("input_layernorm", entries), positions)[1::2]

    def _head_input(self, place: int, state: _State) -> Tensor:
        return self._maps[place](torch.cat((state.stream, self._layer.last(state.layer_output)), -1))
