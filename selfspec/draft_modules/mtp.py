"""Multi-token prediction (DeepSeek-V3, 2412.19437): one decoder layer (module) for each drafted token.

Every module runs over all (token, hidden state) pairs. At pair i, module k (from 0) reads the token of pair i + k, and
the output of module k - 1 at pair i; module 0 reads the model's hidden state. Of n pairs, module k can therefore read
only the first n - k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec.draft_modules.decoder_head import LayerShape, PairLayer, layer_of
from selfspec.draft_modules.heads import Head


@dataclass(frozen=True, slots=True)
class _State:
    """The state after `end` committed pairs and some drafted tokens.

    `tails` holds each module's output `[1, D]` at the last committed pair that the module could read, or `[0, D]` if
    there was no such pair. `embedded` are the embeddings of the drafted tokens. `last_streams` are the outputs, for the
    drafted tokens, of the module that ran last.
    """

    end: int
    tails: tuple[Tensor, ...]
    embedded: Tensor
    last_streams: Tensor


class MtpHead(Head):
    """An MTP draft head with one module for each drafted token.

    Its part file holds the tensors of module k, a `PairLayer`, under names with the prefix `layers.k.`.
    """

    kind = "mtp"

    def _begin(self, settings: Any, tensors: dict[str, Tensor]) -> None:
        shape, self.places = LayerShape(**settings["shape"]), int(settings["places"])
        self._modules = [
            PairLayer(self.target, shape, layer_of(tensors, f"layers.{k}."), self._linears) for k in range(self.places)
        ]
        self._left: dict[tuple[int, int], tuple[int, Tensor]] = {}  # by cache row and module: first pair, outputs

    def reserve(self, slots: int) -> None:
        """Reserve KV cache entries of every module for `slots` pairs in each cache row."""
        for module in self._modules:
            module.reserve(slots)

    def _read(self, row: int, start: int, tokens: Tensor, embedded: Tensor, streams: Tensor) -> tuple[Tensor, Any]:
        end = start + len(tokens)
        left = self._keep(row, 0, start, self._modules[0].read(row, start, embedded, streams, from_target=True))
        tails = [left]
        for k in range(1, self.places):
            begun, before = self._left[row, k - 1]
            first, last = max(start - k, 0), end - k
            out = left[:0]
            if last > first:
                read, input_streams = embedded[first - last :], before[first - begun : last - begun]
                out = self._modules[k].read(row, first, read, input_streams, from_target=False)
            tails.append(self._keep(row, k, first, out))
        state = _State(end, tuple(tails), embedded[:0], left[:0])
        return self._modules[0].last(left), state

    def _keep(self, row: int, k: int, first: int, out: Tensor) -> Tensor:
        """Store the outputs of module k from pair `first` on, and the output before `first`; return the last output."""
        begun, before = self._left.get((row, k), (0, out[:0]))
        previous = before[first - 1 - begun : first - begun] if begun < first else out[:0]
        self._left[row, k] = first - len(previous), torch.cat((previous, out))
        return self._left[row, k][1][-1:]

    def _draft_step(
        self, row: int, start: int, place: int, tokens: Tensor, embedded: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        read = torch.cat((state.embedded, embedded))
        input_streams = torch.cat((state.tails[place - 1], state.last_streams))
        left = self._modules[place].read(
            row, state.end - len(input_streams), read[-len(input_streams) :], input_streams, from_target=False
        )
        return self._modules[place].last(left), _State(state.end, state.tails, read, left)
