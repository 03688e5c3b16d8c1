"""Runner of native passes: over the tokens of one cache row, or over the drafts of several rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from selfspec.models.families.base import AttentionSpec
from selfspec.models.skeleton import Skeleton
from selfspec.runtime.attention_inputs import RotaryTable
from selfspec.runtime.cache import Cache
from selfspec.runtime.compiled_path import LeanPath
from selfspec.runtime.native_bindings import ROWS, NativeBatch
from selfspec.runtime.paged import PagedCache
from selfspec.speculation.forward_output import ForwardOutput, joined
from selfspec.speculation.tree_batch import PlacedDraft

CHUNK = 256  # most tokens of one native call: keeps the workspace small, while each weight read serves many tokens


class NativeRunner:
    """Runs native passes over one KV cache with transposed keys, along draft paths that have a native pass."""

    def __init__(
        self,
        skeleton: Skeleton,
        cache: Cache | PagedCache,
        attention_specs: Sequence[tuple[AttentionSpec, RotaryTable]],
    ) -> None:
        self._embed, self._dtype, self._layers = skeleton.embed, skeleton.sizes.dtype, len(skeleton.blocks)
        self._batch = NativeBatch(cache, attention_specs)

    def forward(
        self,
        compiled: LeanPath,
        tokens: Tensor,
        positions: int | Tensor,
        slots: int | Tensor,
        masks: Sequence[Tensor] | None,
        row: int,
        *,
        logits: Literal["all", "last"] | None,
        hidden: Sequence[int],
    ) -> ForwardOutput:
        """Run `Runtime.forward` over tokens `[1, n]` of one cache row; `masks` are as in `NativeBatch.for_row`."""
        n = tokens.shape[1]
        if n > CHUNK and masks is None and isinstance(positions, int) and isinstance(slots, int):
            steps = []
            for start in range(0, n, CHUNK):
                chunk, wanted = (
                    tokens[:, start : start + CHUNK],
                    None if logits == "last" and start + CHUNK < n else logits,
                )
                steps.append(
                    self.forward(
                        compiled, chunk, positions + start, slots + start, None, row, logits=wanted, hidden=hidden
                    )
                )
            return joined(steps)
        batch = self._batch.for_row(n, positions, slots, masks, row, int8_layers=compiled.int8_layers)
        normed, streams = self._run(compiled, tokens, batch, hidden, logits is not None)
        hidden_streams = {layer: stream.unsqueeze(0) for layer, stream in streams.items()}
        if normed is None:
            return ForwardOutput(None, hidden_streams)
        head = compiled.head if n <= ROWS or compiled.batch_invariant_head is None else compiled.batch_invariant_head
        return ForwardOutput(head(normed[0 if logits == "all" else n - 1 :]).unsqueeze(0), hidden_streams)

    def forward_drafts(
        self, compiled: LeanPath, placed: Sequence[PlacedDraft], *, hidden: Sequence[int], logits: bool
    ) -> list[ForwardOutput]:
        """Run `Runtime.forward_drafts`; each draft's output is bitwise equal to that of a pass over the draft alone."""
        ids: list[int] = []
        for placement in placed:
            ids += (placement.root, *placement.draft.tokens)
        row, _, start, draft = placed[0]
        if len(placed) == 1 and draft.is_chain:
            batch = self._batch.for_row(len(ids), start, start, None, row, int8_layers=compiled.int8_layers)
        else:
            batch = self._batch.for_drafts(placed, int8_layers=compiled.int8_layers)
        normed, streams = self._run(compiled, torch.tensor([ids]), batch, hidden, logits)
        ends = list(accumulate(1 + len(placement.draft) for placement in placed))
        spans = [slice(*span) for span in pairwise((0, *ends))]
        out: Sequence[Tensor | None] = [None] * len(placed)
        if normed is not None and compiled.batch_invariant_head is not None:
            every = compiled.batch_invariant_head(normed)
            out = [every[span].unsqueeze(0) for span in spans]
        elif normed is not None:
            out = [compiled.head(normed[span]).unsqueeze(0) for span in spans]
        return [
            ForwardOutput(rows, {layer: stream[span].unsqueeze(0) for layer, stream in streams.items()})
            for rows, span in zip(out, spans, strict=True)
        ]

    def _run(
        self, compiled: LeanPath, tokens: Tensor, batch: NativeBatch, hidden: Sequence[int], logits: bool
    ) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Return the head's input `[n, D]` of tokens `[1, n]` (None unless `logits`), and the inputs of `hidden`."""
        assert compiled.native is not None
        stream = self._embed(tokens)[0].float()
        inner = [layer for layer in hidden if layer < self._layers]
        normed, inner_streams = compiled.native.run(stream, batch, inner, logits)
        streams = {
            layer: layer_stream.to(self._dtype) for layer, layer_stream in zip(inner, inner_streams, strict=True)
        }
        if self._layers in hidden:
            streams[self._layers] = stream.to(self._dtype)
        return None if normed is None else normed.to(self._dtype), streams
