"""Passes that are one native call: over tokens of one row, or over drafts of several. Knows nothing of other passes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from selfspec.model.skeleton import Skeleton
from selfspec.runtime.cache import Cache
from selfspec.runtime.paged import PagedCache
from selfspec.runtime.passes import ROWS, Spot
from selfspec.runtime.paths import CompiledPath
from selfspec.speculation.passes import Placed
from selfspec.speculation.step import Step, joined

CHUNK = 128  # tokens of one call: what they are computed in stays small, and each weight serves many


class Natively:
    """Passes over one cache of turned keys, along paths that are native."""

    def __init__(self, skeleton: Skeleton, cache: Cache | PagedCache, cos: Tensor, sin: Tensor) -> None:
        self._embed, self._dtype, self._layers = skeleton.embed, skeleton.sizes.dtype, len(skeleton.blocks)
        self._spot = Spot(cache, cos, sin)

    def forward(
        self,
        way: CompiledPath,
        tokens: Tensor,
        positions: int | Tensor,
        slots: int | Tensor,
        mask: Tensor | None,
        row: int,
        *,
        logits: Literal["all", "last"] | None,
        hidden: Sequence[int],
    ) -> Step:
        """`Runtime.forward` over tokens `[1, n]` of a row; `mask` is additive, `[1, 1, n, S]`."""
        n = tokens.shape[1]
        if n > CHUNK and mask is None and isinstance(positions, int) and isinstance(slots, int):
            steps = []
            for at in range(0, n, CHUNK):
                some, wanted = tokens[:, at : at + CHUNK], None if logits == "last" and at + CHUNK < n else logits
                steps.append(
                    self.forward(way, some, positions + at, slots + at, None, row, logits=wanted, hidden=hidden)
                )
            return joined(steps)
        spot = self._spot.alone(n, positions, slots, mask, row)
        normed, streams = self._run(way, tokens, spot, hidden, logits is not None)
        kept = {layer: stream.unsqueeze(0) for layer, stream in streams.items()}
        if normed is None:
            return Step(None, kept)
        head = way.head if n <= ROWS or way.head_alike is None else way.head_alike
        return Step(head(normed[0 if logits == "all" else n - 1 :]).unsqueeze(0), kept)

    def over(self, way: CompiledPath, placed: Sequence[Placed], *, hidden: Sequence[int], logits: bool) -> list[Step]:
        """`Runtime.over`: each token gives the bits that it gives alone."""
        ids: list[int] = []
        for one in placed:
            ids += (one.root, *one.draft.tokens)
        row, _, start, draft = placed[0]
        if len(placed) == 1 and draft.is_chain:
            spot = self._spot.alone(len(ids), start, start, None, row)
        else:
            spot = self._spot.several(placed)
        normed, streams = self._run(way, torch.tensor([ids]), spot, hidden, logits)
        ends = list(accumulate(1 + len(one.draft) for one in placed))
        spans = [slice(*span) for span in pairwise((0, *ends))]
        out: Sequence[Tensor | None] = [None] * len(placed)
        if normed is not None and way.head_alike is not None:
            every = way.head_alike(normed)
            out = [every[span].unsqueeze(0) for span in spans]
        elif normed is not None:
            out = [way.head(normed[span]).unsqueeze(0) for span in spans]
        return [
            Step(rows, {layer: stream[span].unsqueeze(0) for layer, stream in streams.items()})
            for rows, span in zip(out, spans, strict=True)
        ]

    def _run(
        self, way: CompiledPath, tokens: Tensor, spot: Spot, hidden: Sequence[int], logits: bool
    ) -> tuple[Tensor | None, dict[int, Tensor]]:
        """What the head reads `[n, D]` of tokens `[1, n]`, where it is to, and the streams at the layers `hidden`."""
        assert way.native is not None
        stream = self._embed(tokens)[0].float()
        inner = [layer for layer in hidden if layer < self._layers]
        normed, kept = way.native.run(stream, spot, inner, logits)
        streams = {layer: one.to(self._dtype) for layer, one in zip(inner, kept, strict=True)}
        if self._layers in hidden:
            streams[self._layers] = stream.to(self._dtype)
        return None if normed is None else normed.to(self._dtype), streams
