"""The draft heads with decoder layers (EAGLE, MTP, Chimera), and the registry of the kinds of draft heads.

The encoder computes the code of a token from the embeddings of the token and of the two tokens before it. A (token,
hidden state) pair is two entries in the decoder layer: the hidden state, and one position later the token's code. For
drafted tokens, the layer's output for the previous pair replaces the model's hidden state. Each draft position has a
linear map, from the model's last hidden state and the layer's output at the code of this position, to the input of the
head over the vocabulary.

Every module runs over all (token, hidden state) pairs. At pair i, module k (from 0) reads the token of pair i + k, and
the output of module k - 1 at pair i; module 0 reads the model's hidden state. Of n pairs, module k can therefore read
only the first n - k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selfspec.basics.errors import SelfspecError, reason
from selfspec.draft_modules.heads import Head, LayerShape, OwnLayer, PairLayer, layer_of, normed
from selfspec.draft_modules.mlp_heads import HydraHead, MedusaHead, MlpHead
from selfspec.draft_modules.module_files import PartFile
from selfspec.runtime.base import Runtime

REACH = 2  # number of earlier tokens that the code of a token depends on


class _ChimeraState(NamedTuple):
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
        state = _ChimeraState(stream[-1:], padded[-REACH:], left)
        return self._head_input(0, state), state

    def _draft_step(
        self, row: int, start: int, place: int, tokens: Tensor, embedded: Tensor, state: _ChimeraState
    ) -> tuple[Tensor, Any]:
        known = torch.cat((state.tail, embedded))
        left = self._run(row, start + place - 1, self._codes(known), state.layer_output)
        state = _ChimeraState(state.stream, known[-REACH:], left)
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

    def _head_input(self, place: int, state: _ChimeraState) -> Tensor:
        return self._maps[place](torch.cat((state.stream, self._layer.last(state.layer_output)), -1))


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


@dataclass(frozen=True, slots=True)
class _MtpState:
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
        state = _MtpState(end, tuple(tails), embedded[:0], left[:0])
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
        return self._modules[place].last(left), _MtpState(state.end, state.tails, read, left)


HEADS: dict[str, type[Head]] = {
    head.kind: head for head in (EagleHead, MedusaHead, HydraHead, MlpHead, MtpHead, ChimeraHead)
}


def make_head(target: Runtime, part: PartFile, *, low: bool = True) -> Head:
    """Return the draft head in a part file, loaded for `target`; `low`: quantise its weights to int8.

    Raises `SelfspecError` if the part file holds no head, or a head that does not fit the target.
    """
    if part.kind not in HEADS:
        raise SelfspecError(f"the part is of kind '{part.kind}'; expected a head ({', '.join(HEADS)})")
    try:
        return HEADS[part.kind](target, part, low=low)
    except SelfspecError:
        raise
    except Exception as error:  # a damaged or foreign file can raise anything
        raise SelfspecError(f"part file of a head of kind {part.kind}: wrong contents ({reason(error)})") from None
