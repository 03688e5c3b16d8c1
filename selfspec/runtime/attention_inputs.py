"""The attention inputs of a forward pass: rotary factors, visible keys and values, mask, and slots to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec.models.families.base import AttentionSpec
from selfspec.runtime.cache import Cache
from selfspec.runtime.masks import Masks
from selfspec.runtime.rotary import RotaryTable


class PassInputs(NamedTuple):
    """Shape, positions, slots, mask and cache rows of a pass over tokens `[batch, n]`; see `Runtime.forward`.

    `causal`: whether `mask` shows a token exactly the slots up to its own, which equal their tokens' positions; padding
    alone is written elsewhere, see `Cache.spare`.
    """

    batch: int
    n: int
    positions: int | Tensor
    slots: int | Tensor
    mask: Tensor | None
    rows: slice
    causal: bool = False


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Attention inputs of N = B * n tokens `[B, n]`: RoPE, visible keys and values, mask and slots to write.

    `rotation` is the RoPE rotation: a matrix per token `[N, d, d]`, one matrix `[d, d]` if N is 1, or cosines and sines
    `[N, 1, d]`. `partner` `[d]` is the index of the dimension that each dimension is rotated with (None: the dimension
    d / 2 away). `direct`: whether attention is computed by explicit products, instead of fused attention. `keys` and
    `values` are lists by layer, from `Cache.kv_views` if `direct`, else from `Cache.repeated_views`. `to` is either
    views by layer of the keys and values to write `[B, H_kv, n, d]`, or scattered slot numbers `[B, n]`. `causal`:
    whether fused attention applies its own causal mask.
    """

    rotation: Tensor | tuple[Tensor, Tensor]
    partner: Tensor | None
    to: tuple[Sequence[Tensor], Sequence[Tensor]] | Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    mask: Tensor | None  # additive: [1 or B * H_kv, G * n, S] if direct, else [1 or B * H_kv, 1, n, S] or [n, S]
    direct: bool
    causal: bool
    rows: slice


def build_attention_inputs(
    attention_spec: AttentionSpec,
    rotary_table: RotaryTable,
    cache: Cache,
    masks: Masks,
    pass_inputs: PassInputs,
    *,
    narrow: bool,
) -> AttentionInputs:
    """Return the attention inputs of a pass for the layers that share `attention_spec`.

    `narrow`: rotate by matrices and compute attention by explicit products, which is fastest for few tokens.
    """
    batch, n, positions, slots, mask, rows, _ = pass_inputs
    window, direct = attention_spec.window, narrow or attention_spec.custom_attention
    rotation = rotary_table.rotation(positions, batch, n, matrix=narrow)
    first, causal, additive = 0, False, None
    if mask is None and isinstance(slots, Tensor):
        mask = torch.arange(int(slots.max()) + 1, device=slots.device) <= slots.unsqueeze(-1)
    if mask is not None:
        kv_len = mask.shape[-1]
        if window is not None:
            mask = mask & cache.window_mask(window, positions, n, kv_len, rows)
        additive = masks.additive(mask)
    else:
        assert isinstance(slots, int)
        kv_len, first = slots + n, 0 if window is None else max(0, slots + 1 - window)
        causal = n > 1 and slots == 0 and not direct and (window is None or kv_len <= window)
        additive = masks.chain(n, kv_len - first, window) if n > 1 and not causal else None
    if direct and additive is not None:
        additive = masks.grouped(additive)
    keys, values = (cache.kv_views if direct else cache.repeated_views)(kv_len, rows, first)
    to = slots if isinstance(slots, Tensor) else cache.writable_views(slots, n, rows)
    return AttentionInputs(rotation, rotary_table.partner, to, keys, values, additive, direct, causal, rows)


def to_device(inputs: AttentionInputs, device: torch.device) -> AttentionInputs:
    """Return a copy with rotation, mask and slots on `device`; keys and values stay on the devices of their layers."""
    rotation = (
        inputs.rotation.to(device)
        if isinstance(inputs.rotation, Tensor)
        else tuple(t.to(device) for t in inputs.rotation)
    )
    moved: dict[str, Any] = {"rotation": rotation}
    if isinstance(inputs.to, Tensor):
        moved["to"] = inputs.to.to(device)
    if inputs.partner is not None:
        moved["partner"] = inputs.partner.to(device)
    if inputs.mask is not None:
        moved["mask"] = inputs.mask.to(device)
    return replace(inputs, **moved)
