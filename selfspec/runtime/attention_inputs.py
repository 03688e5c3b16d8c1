"""Where a pass's tokens stand: their rope, what they see of the cache, where they write.

Knows nothing of what layers compute.
"""

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
    """The tokens `[batch, n]` of a pass, as `Runtime.forward` is told of them."""

    batch: int
    n: int
    positions: int | Tensor
    slots: int | Tensor
    mask: Tensor | None
    rows: slice


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where a forward's `[B, n]` tokens, N = B * n rows, stand: their rope, what they see and write of the cache.

    `turn`: rope as a matrix for each row `[N, d, d]`, of one row `[d, d]`, or as cosines and sines `[N, 1, d]`, with
    each dimension's `partner` `[d]`; None: that half of them apart. `keys` and `values` are by layer, as `Cache.seen`
    gives them if attention is `direct`, else as `Cache.repeated` does. `to` are each layer's slots of keys and values
    to write `[B, H_kv, n, d]`, or, where slots are scattered, those slots `[B, n]`.
    """

    turn: Tensor | tuple[Tensor, Tensor]
    partner: Tensor | None
    to: tuple[Sequence[Tensor], Sequence[Tensor]] | Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    mask: Tensor | None  # additive: [1 or B * H_kv, G * n, seen] when direct, else [B * H_kv, 1, n, seen] or [n, seen]
    direct: bool
    causal: bool
    rows: slice


def place(
    attention_spec: AttentionSpec, turning: RotaryTable, cache: Cache, masks: Masks, of: PassInputs, *, narrow: bool
) -> AttentionInputs:
    """Where tokens stand for the layers of one sight. `narrow`: by small products, as a few rows are best computed."""
    batch, n, positions, slots, mask, rows = of
    window, direct = attention_spec.window, narrow or attention_spec.custom_attention
    turn = turning.of(positions, batch, n, matrix=narrow)
    first, causal, additive = 0, False, None
    if mask is None and isinstance(slots, Tensor):
        mask = torch.arange(int(slots.max()) + 1, device=slots.device) <= slots.unsqueeze(-1)
    if mask is not None:
        seen = mask.shape[-1]
        if window is not None:
            mask = mask & cache.near(window, positions, n, seen, rows)
        additive = masks.additive(mask)
    else:
        assert isinstance(slots, int)
        seen, first = slots + n, 0 if window is None else max(0, slots + 1 - window)
        causal = n > 1 and slots == 0 and not direct and (window is None or seen <= window)
        additive = masks.chain(n, seen - first, window) if n > 1 and not causal else None
    if direct and additive is not None:
        additive = masks.grouped(additive)
    keys, values = (cache.seen if direct else cache.repeated)(seen, rows, first)
    to = slots if isinstance(slots, Tensor) else cache.run(slots, n, rows)
    return AttentionInputs(turn, turning.partner, to, keys, values, additive, direct, causal, rows)


def move(place: AttentionInputs, device: torch.device) -> AttentionInputs:
    """What lies beside the cache, on another device; every layer's keys are on its own already."""
    turn = place.turn.to(device) if isinstance(place.turn, Tensor) else tuple(t.to(device) for t in place.turn)
    moved: dict[str, Any] = {"turn": turn}
    if isinstance(place.to, Tensor):
        moved["to"] = place.to.to(device)
    if place.partner is not None:
        moved["partner"] = place.partner.to(device)
    if place.mask is not None:
        moved["mask"] = place.mask.to(device)
    return replace(place, **moved)
