"""Attention sub-layers of passes over few tokens by Triton kernels, which read the KV length on the device.

`models/triton_kernels/switch.py` says where they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.models.families.base import AttentionSpec
from selfspec.models.skeleton import Skeleton
from selfspec.models.triton_kernels.switch import DTYPES, ROWS
from selfspec.runtime.attention_inputs import PassInputs, RotaryTable
from selfspec.runtime.cache import Cache
from selfspec.runtime.workspace import Scratch


@dataclass(frozen=True, slots=True)
class TritonInputs:
    """Inputs of one attention spec: RoPE tables, positions and slots `[B, n]`, and which slots a token sees.

    `tables` are cosines, sines, and the dimension that each dimension is rotated with. `mask` `[1 or B, n, kv_len]` is
    true where a token sees a slot; without a mask it sees the slots up to its own, only the last `window` if not None.
    """

    tables: tuple[Tensor, Tensor, Tensor]
    positions: Tensor
    slots: Tensor
    mask: Tensor | None
    window: int | None
    kv_len: int
    first_row: int


class TritonAttention:
    """Attention sub-layers over one cache: RoPE, the writing of keys and values, and attention, in three kernels."""

    def __init__(
        self, cache: Cache, attention_specs: Sequence[tuple[AttentionSpec, RotaryTable]], scaling: float
    ) -> None:
        from selfspec.models.triton_kernels.elementwise import partner_of

        self._cache, self._scaling = cache, scaling
        self._specs = [
            (spec.window, (table.cos, table.sin, partner_of(table.partner, table.cos.shape[-1], table.cos.device)))
            for spec, table in attention_specs
        ]

    def inputs(self, pass_inputs: PassInputs) -> list[TritonInputs] | None:
        """Return the inputs of a pass for each attention spec; None for a pass that is too large for the kernels."""
        batch, n, positions, slots, mask, rows, causal = pass_inputs
        if batch * n > ROWS:
            return None
        cache, device = self._cache, self._specs[0][1][0].device

        def numbers(given: int | Tensor) -> Tensor:
            if isinstance(given, Tensor):
                return given.expand(batch, n).contiguous()
            return torch.arange(given, given + n, device=device).expand(batch, n).contiguous()

        if causal or (mask is None and isinstance(slots, int)):
            mask = None
        elif mask is None:
            assert isinstance(slots, Tensor)
            mask = torch.arange(cache.slots, device=device) <= slots.unsqueeze(-1)
        kv_len = cache.slots if mask is None else mask.shape[-1]
        placed = (numbers(positions), numbers(slots))
        made = []
        for window, tables in self._specs:
            seen = mask
            if mask is not None and window is not None:
                seen = mask & cache.window_mask(window, positions, n, kv_len, rows)
            seen = None if seen is None else seen.contiguous()
            made.append(TritonInputs(tables, *placed, seen, window, kv_len, rows.indices(cache.rows)[0]))
        return made

    def run(self, index: int, scratch: Scratch, inputs: TritonInputs) -> None:
        """Attend in layer `index`: from `scratch.qkv` to `scratch.attention_out`."""
        from selfspec.models.triton_kernels.attention import decode_attention
        from selfspec.models.triton_kernels.elementwise import rope_and_write

        kv = (self._cache.keys[index], self._cache.values[index])
        rope_and_write(scratch.qkv, inputs.tables, inputs.positions, inputs.slots, scratch.q, kv, inputs.first_row)
        decode_attention(
            scratch.q,
            kv,
            inputs.slots,
            scratch.attention_out,
            scaling=self._scaling,
            kv_len=inputs.kv_len,
            mask=inputs.mask,
            window=inputs.window,
            first_row=inputs.first_row,
        )


def triton_attention(
    skeleton: Skeleton, cache: Cache, attention_specs: Sequence[tuple[AttentionSpec, RotaryTable]], scaling: float
) -> TritonAttention | None:
    """Return the Triton kernels' attention; None if they do not support the model.

    They support one device, a softmax without a function of the model's own, and no float64.
    """
    devices = {skeleton.device, *(block.device for block in skeleton.blocks)}
    custom = any(spec.custom_attention for spec, _ in attention_specs)
    if len(devices) > 1 or custom or skeleton.sizes.dtype not in DTYPES:
        return None
    return TritonAttention(cache, attention_specs, scaling)
