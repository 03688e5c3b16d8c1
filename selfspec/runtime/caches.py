"""What a runtime keeps beside the model: its cache, and the model's rope as tables. Knows nothing of passes."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.basics.errors import SelfspecError
from selfspec.facts.limits import WIDEST_DRAFT
from selfspec.model.skeleton import Skeleton
from selfspec.runtime.cache import Cache
from selfspec.runtime.paged import PagedCache, Pool


def cache_of(skeleton: Skeleton, *, rows: int, slots: int, turned: bool, pool: Pool | None) -> Cache | PagedCache:
    """`slots` for each row; or a pool, of which a row has at most what the model's context and a draft take."""
    s = skeleton.sizes
    if pool is not None:
        return PagedCache(s, len(skeleton.blocks), pool, rows=rows, slots=skeleton.context + WIDEST_DRAFT)
    return Cache(
        rows=rows,
        kv_heads=s.kv_heads,
        group=s.heads // s.kv_heads,
        slots=slots,
        head_dim=s.head_dim,
        dtype=s.dtype,
        devices=[block.device for block in skeleton.blocks],
        turned=turned,
    )


def rope_of(skeleton: Skeleton, keep: Tensor, positions: int, scale: float) -> tuple[Tensor, Tensor]:
    """The model's own rope as tables `[positions, 1, d]`, both scaled; `keep`: the identity `[d, d]`.

    x turned is x * cos + (x, halves swapped) * sin.
    """
    d = skeleton.sizes.head_dim
    at = torch.arange(max(positions, 1), device=skeleton.device)[None]
    cos, sin = (t.to(skeleton.device) for t in skeleton.rotary(keep, at))  # which may be on another
    if cos.shape[-1] != d:
        raise SelfspecError(f"rope covers {cos.shape[-1]} of {d} dimensions; partial rope is not supported")
    sin = torch.cat((-sin[..., : d // 2], sin[..., d // 2 :]), dim=-1)
    return cos[0].unsqueeze(1) * scale, sin[0].unsqueeze(1) * scale
