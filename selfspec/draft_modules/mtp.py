"""Multi-token prediction (DeepSeek-V3, 2412.19437): a decoder layer for each further token, each over all pairs.

Module k (from 0) reads at pair i the token of pair i + k, and the stream that module k - 1 left there; module 0 the
model's. So it stands k pairs behind the last one.
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
    """After `end` pairs. `tails`: of each module, its stream at the last pair that it could read, if there was one.

    `embedded`: the own tokens so far; `left`: the last asked module's streams at the pairs that needed them.
    """

    end: int
    tails: tuple[Tensor, ...]
    embedded: Tensor
    left: Tensor


class MtpHead(Head):
    """As many modules as it drafts tokens. Module k's tensors: a `PairLayer`'s under `layers.k.`."""

    kind = "mtp"

    def _begin(self, settings: Any, tensors: dict[str, Tensor]) -> None:
        shape, self.places = LayerShape(**settings["shape"]), int(settings["places"])
        self._modules = [
            PairLayer(self.target, shape, layer_of(tensors, f"layers.{k}."), self._make) for k in range(self.places)
        ]
        self._left: dict[tuple[int, int], tuple[int, Tensor]] = {}  # by row and module: from which pair on, streams

    def reserve(self, slots: int) -> None:
        """Hold so many pairs of each row."""
        for module in self._modules:
            module.reserve(slots)

    def _read(self, row: int, start: int, tokens: Tensor, embedded: Tensor, streams: Tensor) -> tuple[Tensor, Any]:
        end = start + len(tokens)
        left = self._keep(row, 0, start, self._modules[0].read(row, start, embedded, streams, given=True))
        tails = [left]
        for k in range(1, self.places):
            begun, before = self._left[row, k - 1]
            first, last = max(start - k, 0), end - k
            out = left[:0]
            if last > first:
                read, given = embedded[first - last :], before[first - begun : last - begun]
                out = self._modules[k].read(row, first, read, given, given=False)
            tails.append(self._keep(row, k, first, out))
        state = _State(end, tuple(tails), embedded[:0], left[:0])
        return self._modules[0].last(left), state

    def _keep(self, row: int, k: int, first: int, out: Tensor) -> Tensor:
        """Keep a module's streams from a pair on, and the one before, which the next module needs; gives the last."""
        begun, before = self._left.get((row, k), (0, out[:0]))
        one = before[first - 1 - begun : first - begun] if begun < first else out[:0]
        self._left[row, k] = first - len(one), torch.cat((one, out))
        return self._left[row, k][1][-1:]

    def _go_on(
        self, row: int, start: int, place: int, tokens: Tensor, embedded: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        read = torch.cat((state.embedded, embedded))
        given = torch.cat((state.tails[place - 1], state.left))
        left = self._modules[place].read(row, state.end - len(given), read[-len(given) :], given, given=False)
        return self._modules[place].last(left), _State(state.end, state.tails, read, left)
