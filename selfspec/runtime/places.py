"""Where a pass's tokens stand: their rope, what they see of the cache, where they write. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """Where a forward's `[B, n]` tokens, N = B * n rows, stand: their rope, what they see and write of the cache.

    `turn`: rope as a matrix for each row `[N, d, d]`, of one row `[d, d]`, or as cosines and sines `[N, 1, d]`. `keys`
    and `values` are by layer, as `Cache.seen` gives them if attention is `direct`, else as `Cache.repeated` does. `to`
    are each layer's slots of keys and values to write `[B, H_kv, n, d]`, or, where slots are scattered, those slots
    `[B, n]`.
    """

    turn: Tensor | tuple[Tensor, Tensor]
    to: tuple[Sequence[Tensor], Sequence[Tensor]] | Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    mask: Tensor | None  # additive: [1 or B * H_kv, G * n, seen] when direct, else [B * H_kv, 1, n, seen] or [n, seen]
    direct: bool
    causal: bool
    rows: slice


def move(place: Place, device: torch.device) -> Place:
    """What lies beside the cache, on another device; every layer's keys are on its own already."""
    turn = place.turn.to(device) if isinstance(place.turn, Tensor) else tuple(t.to(device) for t in place.turn)
    moved: dict[str, Any] = {"turn": turn}
    if isinstance(place.to, Tensor):
        moved["to"] = place.to.to(device)
    if place.mask is not None:
        moved["mask"] = place.mask.to(device)
    return replace(place, **moved)
