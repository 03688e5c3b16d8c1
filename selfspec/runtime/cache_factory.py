"""Creation of a runtime's KV cache, static or paged."""

from __future__ import annotations

from selfspec.models.skeleton import Skeleton
from selfspec.runtime.cache import Cache
from selfspec.runtime.paged import BlockTables, PagedCache
from selfspec.types.methods import WIDEST_DRAFT


def cache_of(
    skeleton: Skeleton, *, rows: int, slots: int, keys_transposed: bool, track_positions: bool, pool: BlockTables | None
) -> Cache | PagedCache:
    """Return a static KV cache of `slots` slots per row, or a paged KV cache if `pool` is given.

    A row of a paged cache has at most as many slots as the model's context plus the widest draft.
    """
    s = skeleton.sizes
    if pool is not None:
        longest = skeleton.context + WIDEST_DRAFT
        return PagedCache(s, len(skeleton.blocks), pool, rows=rows, slots=longest, track_positions=track_positions)
    return Cache(
        rows=rows,
        kv_heads=s.kv_heads,
        group=s.heads // s.kv_heads,
        slots=slots,
        head_dim=s.head_dim,
        dtype=s.dtype,
        devices=[block.device for block in skeleton.blocks],
        keys_transposed=keys_transposed,
        track_positions=track_positions,
    )
